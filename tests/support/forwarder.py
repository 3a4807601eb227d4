"""A forwarder between client and server that can break a connection in the ways in which networks do.

    client --TCP, Unix socket or TLS--> Forwarder --TCP--> server

Each connection has a thread that copies bytes.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import threading
from collections.abc import Callable
from pathlib import Path

_BLOCK_BYTES = 1 << 16


class Forwarder:
    """Forwards connections to `localhost:port` until it is closed.

    Attributes:
        port: Port on which it listens; None if it listens at a path.
        accepted: Connections taken so far.
    """

    def __init__(
        self,
        port: int,
        *,
        path: Path | None = None,
        tls: ssl.SSLContext | None = None,
        greet: Callable[[socket.socket], None] | None = None,
    ) -> None:
        """Listen on a free port, or at `path`; `greet` may talk to each client before anything is forwarded."""
        self._target = port
        self._tls = tls
        self._greet = greet
        self._pairs: list[_Pair] = []
        self.accepted = 0
        self._listener = socket.create_server(("localhost", 0)) if path is None else _listen_at(path)
        self.port: int | None = self._listener.getsockname()[1] if path is None else None
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def is_connected(self) -> bool:
        """Whether a connection is open."""
        return any(pair.is_open for pair in self._pairs)

    @property
    def address(self) -> str:
        """Where a client finds it."""
        return f"localhost:{self.port}"

    @property
    def num_open(self) -> int:
        """Connections that neither side has ended."""
        return sum(pair.is_open for pair in self._pairs)

    def cut(self) -> None:
        """Close all connections."""
        for pair in self._pairs:
            pair.end()

    def mute(self) -> None:
        """Keep the connections that there are, but forward nothing more on them; new ones are not affected."""
        for pair in self._pairs:
            pair.mute()

    def close(self) -> None:
        """Close all connections and take no new ones."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def __enter__(self) -> Forwarder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.accepted += 1
            threading.Thread(target=self._connect, args=[client], daemon=True).start()

    def _connect(self, client: socket.socket) -> None:
        try:
            if self._tls is not None:
                client = self._tls.wrap_socket(client, server_side=True)
            if self._greet is not None:
                self._greet(client)
            server = socket.create_connection(("localhost", self._target))
        except OSError:
            client.close()
            return
        pair = _Pair(client, server)
        self._pairs.append(pair)  # before anything passes: who has got an answer may cut or mute
        pair.start()


class _Pair:
    """A connection of a client and the one to the server that belongs to it, in one thread: TLS allows no two."""

    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self._ways = {client: server, server: client}
        self._muted = threading.Event()
        self._ended = threading.Event()
        self.is_open = True

    def start(self) -> None:
        threading.Thread(target=self._carry, daemon=True).start()

    def mute(self) -> None:
        self._muted.set()

    def end(self) -> None:
        self._ended.set()
        for end in self._ways:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _carry(self) -> None:
        with contextlib.ExitStack() as stack:
            for end in self._ways:
                stack.enter_context(end)
            with contextlib.suppress(OSError):
                while self._copy():
                    pass
            if self._muted.is_set():
                self._ended.wait()
        self.is_open = False

    def _copy(self) -> bool:
        """Copy what there is; return whether more may come."""
        for source in select.select(self._ways, [], [])[0]:
            block = source.recv(_BLOCK_BYTES)
            if isinstance(source, ssl.SSLSocket) and source.pending():
                block += source.recv(source.pending())
            if not block or self._muted.is_set():
                return False
            self._ways[source].sendall(block)
        return True


def _listen_at(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    return listener
