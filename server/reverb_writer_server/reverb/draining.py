"""Draining: the server refuses clients, but still answers the service.

Reverb has no such mode: a last checkpoint needs a running server, and items that it confirms while the checkpoint is
written would be lost. So this module shuts down the port's listening sockets and connections within the server's
process, except for the connections of the service, which asks for the checkpoint. Clients see a lost connection, keep
what is not acknowledged, and reconnect later.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

_INTERNET = (socket.AF_INET, socket.AF_INET6)
_NUM_SPARE = 16  # a listing of descriptors, a save's files, and some that a client may snatch


class Endpoint(NamedTuple):
    """One end of a connection: its address, an IPv4 one in its own notation, and its port."""

    address: str
    port: int


class Drain:
    """Ends the connections of a port of this process, later, even if no descriptor is left by then.

    Two things are prepared: the listening sockets, which are then shut down without a new descriptor, and spare
    descriptors, which are given back after that. A freed one cannot be taken by a client that waits to be accepted.
    """

    def __init__(self, port: int) -> None:
        """Note the listening sockets of `port`, and reserve descriptors."""
        self._port = port
        self._listeners = [one for one, local, remote in tcp_sockets() if local.port == port and remote is None]
        self._spare = [os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC) for _ in range(_NUM_SPARE)]

    def end_connections(self, keep: Collection[Endpoint]) -> int:
        """Refuse new connections, end the existing ones but those from `keep`; return how many were ended."""
        for listener in self._listeners:
            _shut_down(listener)
        while self._spare:
            os.close(self._spare.pop())
        ended = 0
        for one, local, remote in list(tcp_sockets()):
            if local.port == self._port and remote not in keep:
                _shut_down(one)
                ended += remote is not None
        return ended


def connections_to(port: int) -> set[Endpoint]:
    """Return this process's ends of its connections to `port`."""
    return {local for _, local, remote in tcp_sockets() if remote is not None and remote.port == port}


def _shut_down(descriptor: int) -> None:
    """Shut down a socket whose descriptor another owner keeps; no further one is needed."""
    with contextlib.suppress(OSError):
        borrowed = socket.socket(fileno=descriptor)
        try:
            borrowed.shutdown(socket.SHUT_RDWR)
        finally:
            borrowed.detach()


def tcp_sockets() -> Iterator[tuple[int, Endpoint, Endpoint | None]]:
    """Yield descriptor, local and remote end (None for a listener) of each TCP socket of this process."""
    for entry in list(Path("/proc/self/fd").iterdir()):
        with contextlib.suppress(OSError):
            if str(entry.readlink()).startswith("socket:"):
                one = socket.socket(fileno=int(entry.name))
                try:
                    if one.family in _INTERNET and one.type == socket.SOCK_STREAM:
                        listens = one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                        remote = None if listens else _endpoint(one.getpeername())
                        yield int(entry.name), _endpoint(one.getsockname()), remote
                finally:
                    one.detach()


def _endpoint(name: tuple[str, int]) -> Endpoint:
    return Endpoint(name[0].removeprefix("::ffff:"), name[1])
