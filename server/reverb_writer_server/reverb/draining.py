"""A server that takes no more work, while it still answers one client.

Reverb can serve or stop, nothing between: a checkpoint needs a running server, and what is confirmed while it is
written would be lost. So the kernel closes the door: the port's listening sockets and its connections are shut down in
the process that has them, all but those of whoever asks for the checkpoint. Clients see a lost connection, keep what is
not confirmed, and look for the server again.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Collection, Iterator
from pathlib import Path

__all__ = ["connections_to", "shut"]

_INTERNET = (socket.AF_INET, socket.AF_INET6)


def connections_to(port: int) -> set[int]:
    """Return the local ports of this process's connections to `port`."""
    return {local for _, local, remote in _sockets() if remote == port}


def shut(port: int, keep: Collection[int]) -> int:
    """Refuse new connections to `port`, a port of this process, and end those there are; return how many those were.

    Args:
        port: that this process listens on.
        keep: remote ports of connections that stay.
    """
    ours = [(one, remote) for one, local, remote in _sockets() if local == port]
    ended = 0
    for one, remote in sorted(
        ours, key=lambda pair: pair[1] is not None
    ):  # listeners first, or clients would come back
        if remote not in keep:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(one)) as duplicate:
                duplicate.shutdown(socket.SHUT_RDWR)
                ended += remote is not None
    return ended


def _sockets() -> Iterator[tuple[int, int, int | None]]:
    """Yield descriptor, local port and remote port, None of a listener, of the TCP sockets of this process."""
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if str(entry.readlink()).startswith("socket:"):
                with socket.socket(fileno=os.dup(int(entry.name))) as one:
                    if one.family in _INTERNET and one.type == socket.SOCK_STREAM:
                        listens = one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                        yield int(entry.name), one.getsockname()[1], None if listens else one.getpeername()[1]
