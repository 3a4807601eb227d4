"""TCP ports that are one server's alone.

Reverb binds with SO_REUSEPORT: it starts without a word on a port that another server has, and the kernel then deals
the connections out to both. So the port is tried first, without that option. A lock keeps the other servers of this
package out between the trial and Reverb's own start. It is a socket in the abstract namespace: as a port does, it
belongs to the network namespace and vanishes with its owner. What is left is a foreign server that starts within the
same millisecond.
"""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Iterator

from reverb_writer.errors import ReverbWriterError

__all__ = ["PortInUseError", "free_port", "in_use", "reserved"]


class PortInUseError(ReverbWriterError, OSError):
    """Another process has the port."""


@contextlib.contextmanager
def reserved(port: int) -> Iterator[None]:
    """Keep `port` for the server that starts within the block.

    Raises:
        PortInUseError: Something listens on the port, on any address, or another server is starting on it.
        PermissionError: The port is below 1024 and this process may not have it.
    """
    with socket.socket(socket.AF_UNIX) as lock:
        try:
            lock.bind(f"\0reverb-writer-server/{port}")
            _bind(port)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise in_use(port) from error
            raise
        yield


def free_port() -> int:
    """Return a port that nothing listens on, chosen by the kernel."""
    return _bind(0)


def in_use(port: int) -> PortInUseError:
    """Say that `port` is taken, and what to do."""
    action = "Stop the process that has it, or choose another port; port=None finds a free one."
    return PortInUseError(errno.EADDRINUSE, f"port {port} is in use. {action}")


def _bind(port: int) -> int:
    """Bind to all interfaces, as Reverb does but beside nobody, and let go again."""
    dual = socket.has_dualstack_ipv6()
    with socket.socket(socket.AF_INET6 if dual else socket.AF_INET) as trial:
        # What connections of a dead server have left behind is no server.
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if dual:
            trial.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        trial.bind(("", port))
        bound: int = trial.getsockname()[1]
    return bound
