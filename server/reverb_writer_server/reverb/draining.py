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

__all__ = ["connections_to", "end_connections", "tcp_sockets"]

_INTERNET = (socket.AF_INET, socket.AF_INET6)


def connections_to(port: int) -> set[int]:
    """Return the local ports of this process's connections to `port`."""
    return {local for _, local, remote in tcp_sockets() if remote == port}


def end_connections(port: int, keep: Collection[int]) -> int:
    """Refuse new connections to a port of this process, and end the existing ones; return how many were ended.

    Args:
        port: a port that this process listens on.
        keep: remote ports of connections to keep.
    """
    ours = [(one, remote) for one, local, remote in tcp_sockets() if local == port]
    ended = 0
    for one, remote in sorted(
        ours, key=lambda pair: pair[1] is not None
    ):  # listeners first, or clients would reconnect
        if remote not in keep:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(one)) as duplicate:
                duplicate.shutdown(socket.SHUT_RDWR)
                ended += remote is not None
    return ended


def tcp_sockets() -> Iterator[tuple[int, int, int | None]]:
    """Yield descriptor, local port and remote port (None for a listener) of each TCP socket of this process."""
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if str(entry.readlink()).startswith("socket:"):
                with socket.socket(fileno=os.dup(int(entry.name))) as one:
                    if one.family in _INTERNET and one.type == socket.SOCK_STREAM:
                        listens = one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                        yield int(entry.name), one.getsockname()[1], None if listens else one.getpeername()[1]
