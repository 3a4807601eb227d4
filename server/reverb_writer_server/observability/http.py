"""Health, metrics and the status page over HTTP, on a port of their own. It only ever tells; nothing can be changed."""

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
from reverb_writer_server.observability.state import State
from reverb_writer_server.reverb.ports import in_use

__all__ = ["Web"]

_SILENCE_S = 10.0  # after which a client that sends nothing is let go
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"


class _Reply(NamedTuple):
    status: HTTPStatus
    kind: str
    body: bytes


class Web:
    """Serves HTTP until it is closed, in threads of its own.

    Attributes:
        address: "HOST:PORT".
    """

    def __init__(self, host: str, port: int, state: State) -> None:
        """Listen.

        Raises:
            PortInUseError: another process has the port.
            OSError: `host` is no address of this machine.
        """
        page = resources.files(__package__).joinpath("status.html").read_bytes()
        routes: dict[str, Callable[[], _Reply]] = {
            "/": lambda: _Reply(HTTPStatus.OK, "text/html; charset=utf-8", page),
            "/status.json": lambda: _Reply(HTTPStatus.OK, "application/json", json.dumps(state.snapshot()).encode()),
            "/metrics": lambda: _Reply(HTTPStatus.OK, metrics.CONTENT_TYPE, metrics.exposition(state)),
            "/livez": lambda: _verdict(True, "alive"),
            "/readyz": lambda: _verdict(*state.ready()),
        }
        try:
            self._server = _Server((host, port), _handler(routes))
        except OSError as error:
            raise in_use(port) if error.errno == errno.EADDRINUSE else error from error
        self.address = f"{host}:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.2,), name="web", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening. Idempotent."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(_SILENCE_S)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of clients that hang up."""


def _verdict(good: bool, words: str) -> _Reply:
    status = HTTPStatus.OK if good else HTTPStatus.SERVICE_UNAVAILABLE
    return _Reply(status, "text/plain; charset=utf-8", f"{words}\n".encode())


def _handler(routes: dict[str, Callable[[], _Reply]]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = _SILENCE_S
        server_version = "reverb-writer-server"
        sys_version = ""

        def do_GET(self) -> None:  # the name that http.server looks for
            self._answer(with_body=True)

        def do_HEAD(self) -> None:  # as above
            self._answer(with_body=False)

        def log_message(self, *arguments: Any) -> None:
            """Say nothing of requests that went well: health checks come every few seconds."""

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
