"""Health checks, metrics and the status page over HTTP, read-only, on a port of their own."""

from __future__ import annotations

import errno
import json
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from typing import Any, NamedTuple

from reverb_writer_server.observability import metrics
from reverb_writer_server.observability.state import ServiceState
from reverb_writer_server.reverb.ports import port_in_use

__all__ = ["StatusServer"]

_IDLE_TIMEOUT_S = 10.0  # after which a silent client is disconnected
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"


class _Reply(NamedTuple):
    status: HTTPStatus
    kind: str
    body: bytes


class StatusServer:
    """Serves HTTP in its own threads until it is closed.

    Attributes:
        address: "HOST:PORT".
    """

    def __init__(self, host: str, port: int, state: ServiceState) -> None:
        """Start to listen.

        Raises:
            PortInUseError: another process has the port.
            OSError: `host` is not an address of this machine.
        """
        page = resources.files(__package__).joinpath("status.html").read_bytes()
        routes: dict[str, Callable[[], _Reply]] = {
            "/": lambda: _Reply(HTTPStatus.OK, "text/html; charset=utf-8", page),
            "/status.json": lambda: _Reply(HTTPStatus.OK, "application/json", json.dumps(state.snapshot()).encode()),
            "/metrics": lambda: _Reply(HTTPStatus.OK, metrics.CONTENT_TYPE, metrics.exposition(state)),
            "/livez": lambda: _health_reply(True, "alive"),
            "/readyz": lambda: _health_reply(*state.ready()),
        }
        try:
            self._server = _Server((host, port), _handler(routes))
        except OSError as error:
            raise port_in_use(port) if error.errno == errno.EADDRINUSE else error from error
        self.address = f"{host}:{self._server.server_address[1]}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.2,), name="status-server", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop listening. Idempotent."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(_IDLE_TIMEOUT_S)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Do not log clients that disconnect."""


def _health_reply(healthy: bool, text: str) -> _Reply:
    status = HTTPStatus.OK if healthy else HTTPStatus.SERVICE_UNAVAILABLE
    return _Reply(status, "text/plain; charset=utf-8", f"{text}\n".encode())


def _handler(routes: dict[str, Callable[[], _Reply]]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = _IDLE_TIMEOUT_S
        server_version = "reverb-writer-server"
        sys_version = ""

        def do_GET(self) -> None:  # the name that http.server looks for
            self._answer(with_body=True)

        def do_HEAD(self) -> None:  # as above
            self._answer(with_body=False)

        def log_message(self, *arguments: Any) -> None:
            """Do not log requests: health checks come every few seconds."""

        def _answer(self, *, with_body: bool) -> None:
            route = routes.get(self.path.partition("?")[0])
            reply = route() if route else _Reply(HTTPStatus.NOT_FOUND, "text/plain", f"{' '.join(routes)}\n".encode())
            self.send_response(reply.status)
            self.send_header("Content-Type", reply.kind)
            self.send_header("Content-Length", str(len(reply.body)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("Content-Security-Policy", _POLICY)
            self.send_header("X-Content-Type-Options", "nosniff")
            self.end_headers()
            if with_body:
                self.wfile.write(reply.body)

    return Handler
