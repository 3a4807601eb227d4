"""Health checks, metrics and the status page over HTTP, read-only, on a separate port.

Waitress bounds threads and requests. At its limit of connections it stops accepting, so idle connections would block
health checks; this module closes the oldest idle connection instead.
"""

from __future__ import annotations

import errno
import ipaddress
import json
import logging
import socket
import threading
from collections.abc import Callable, Iterable, Mapping
from http import HTTPStatus
from importlib import resources
from typing import TYPE_CHECKING, TypeAlias

from waitress import wasyncore
from waitress.adjustments import Adjustments
from waitress.server import TcpWSGIServer

from reverb_writer_server.config.keys import ConfigError
from reverb_writer_server.observability import metrics
from reverb_writer_server.observability.state import ServiceState
from reverb_writer_server.reverb.sockets import port_in_use

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

_MAX_CONNECTIONS = 128
_NUM_THREADS = 4
_BACKLOG = 1024
_IDLE_TIMEOUT_S = 10  # time after which a silent client is disconnected
_MAX_REQUEST_BYTES = 8192
_TEXT = "text/plain; charset=utf-8"
_Routes: TypeAlias = Mapping[str, tuple[str, Callable[[], tuple[bool, bytes | str]]]]
_HEADERS = [
    ("Cache-Control", "no-store"),
    (
        "Content-Security-Policy",
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:",
    ),
    ("X-Content-Type-Options", "nosniff"),
]


class StatusServer:
    """Serves HTTP in its own threads until it is closed."""

    def __init__(self, host: str, port: int, state: ServiceState) -> None:
        """Start to listen at an address of this machine; "0.0.0.0" is all of IPv4, "::" all of IPv4 and IPv6.

        Raises:
            ConfigError: the host is not an address of this machine.
            PortInUseError: another process uses the port.
            PermissionError: the port is below 1024, and this process may not bind it.
        """
        page = resources.files(__package__).joinpath("status.html").read_bytes()
        routes: _Routes = {
            "/": ("text/html; charset=utf-8", lambda: (True, page)),
            "/status.json": ("application/json", lambda: (True, json.dumps(state.snapshot()))),
            "/metrics": (metrics.CONTENT_TYPE, lambda: (True, metrics.exposition(state))),
            "/livez": (_TEXT, state.alive),
            "/readyz": (_TEXT, state.ready),
        }
        self.host, self.port = _reachable(host), port
        self.address = f"[{self.host}]:{port}" if ":" in self.host else f"{self.host}:{port}"
        logging.getLogger("waitress.queue").setLevel(logging.ERROR)  # a burst of requests needs no log line
        self._sockets: wasyncore.Map = {}
        self._server = _Server(_application(routes), self._sockets, _listener(host, port))
        self._thread = threading.Thread(target=self._server.run, name="status-server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening. Idempotent."""
        if self._thread.is_alive():
            self._server.trigger.pull_trigger(lambda: wasyncore.close_all(self._sockets))
            self._thread.join(_IDLE_TIMEOUT_S)
            self._server.task_dispatcher.shutdown()


class _Server(TcpWSGIServer):  # type: ignore[misc]  # waitress has no types
    """Waitress's server, which never stops accepting."""

    def __init__(self, application: WSGIApplication, sockets: wasyncore.Map, listener: socket.socket) -> None:
        adjustments = Adjustments(
            sockets=[listener],
            threads=_NUM_THREADS,
            backlog=_BACKLOG,
            connection_limit=2 * _MAX_CONNECTIONS,
            channel_timeout=_IDLE_TIMEOUT_S,
            cleanup_interval=_IDLE_TIMEOUT_S,
            max_request_header_size=_MAX_REQUEST_BYTES,
            max_request_body_size=_MAX_REQUEST_BYTES,
            log_socket_errors=False,  # clients may disconnect
            asyncore_use_poll=True,  # select() ends at descriptor 1,024
            ident=None,
        )
        about = (listener.family, listener.type, listener.proto, listener.getsockname())
        super().__init__(application, sockets, _sock=listener, adj=adjustments, sockinfo=about, bind_socket=False)

    def handle_accept(self) -> None:
        super().handle_accept()
        channels = [one for one in self.active_channels.values() if not one.will_close]  # oldest first
        if len(channels) > _MAX_CONNECTIONS:
            next((one for one in channels if not one.requests), channels[0]).will_close = True


def _listener(host: str, port: int) -> socket.socket:
    try:
        family, *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server((host, port), family=family, backlog=_BACKLOG, dualstack_ipv6=host == "::")
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise port_in_use(port) from error
        if error.errno == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror):
            raise ConfigError(f"`http.host`: got {host}, allowed: an address of this machine.") from error
        raise


def _reachable(host: str) -> str:
    try:
        unspecified = ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return host
    return "localhost" if unspecified else host


def _application(routes: _Routes) -> WSGIApplication:
    """Return the application of routes, each with a type of content and a function that returns success and content."""

    def application(environment: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        method, path = environment["REQUEST_METHOD"], environment["PATH_INFO"]
        kind, status, content = _TEXT, HTTPStatus.OK, b""
        if method not in ("GET", "HEAD"):
            status, content = HTTPStatus.METHOD_NOT_ALLOWED, b"GET, HEAD\n"
        elif path not in routes:
            status, content = HTTPStatus.NOT_FOUND, f"{' '.join(routes)}\n".encode()
        else:
            kind, reply = routes[path]
            is_well, body = reply()
            status = HTTPStatus.OK if is_well else HTTPStatus.SERVICE_UNAVAILABLE
            content = f"{body}\n".encode() if isinstance(body, str) else body
        headers = [("Content-Type", kind), ("Content-Length", str(len(content))), *_HEADERS]
        start_response(f"{status.value} {status.phrase}", headers)
        return [b"" if method == "HEAD" else content]

    return application
