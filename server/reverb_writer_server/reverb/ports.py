"""TCP ports that no two servers share.

Reverb binds with SO_REUSEPORT: it starts without an error on a port that another server uses, and the kernel then
distributes connections over both. So this module first binds the port without that option. A lock excludes other
servers of this package until Reverb has started. It is a socket in the abstract namespace: like a port, it belongs to
the network namespace and vanishes with its owner. A foreign server that starts within the same millisecond is not
noticed.
"""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Iterator

from reverb_writer.errors import ReverbWriterError

_HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\x04\0\0\0\0\0"  # and an empty SETTINGS frame
_FRAME_HEADER_BYTES, _FRAME_TYPE, _SETTINGS = 9, 3, 4


class PortInUseError(ReverbWriterError, OSError):
    """Another process uses the port."""

    def __str__(self) -> str:
        """Return the message, without the number that the system has for it."""
        return str(self.strerror)


@contextlib.contextmanager
def reserved(port: int) -> Iterator[None]:
    """Reserve `port` for the server that starts within the block.

    Raises:
        PortInUseError: Something listens on the port, on any address, or another server is starting on it.
        PermissionError: The port is below 1024 and this process may not bind it.
    """
    with socket.socket(socket.AF_UNIX) as lock:
        try:
            lock.bind(f"\0reverb-writer-server/{port}")
            _bind(port)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise port_in_use(port) from error
            raise
        yield


def accepts_connections(address: str, timeout_s: float) -> bool:
    """Return whether a server of gRPC accepts a new connection now.

    The kernel completes the handshake of a connection that the server never takes, so this waits for the first frame of
    HTTP/2 that the server sends.
    """
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout_s) as one:
            one.sendall(_HTTP2_PREFACE)
            header = one.recv(_FRAME_HEADER_BYTES, socket.MSG_WAITALL)
    except OSError:
        return False
    return len(header) == _FRAME_HEADER_BYTES and header[_FRAME_TYPE] == _SETTINGS


def free_port() -> int:
    """Return a port that no process listens on, chosen by the kernel."""
    return _bind(0)


def port_in_use(port: int) -> PortInUseError:
    """Return the error for a port that another process uses."""
    action = "Stop the process that uses it, or choose another port; port=None finds a free one."
    return PortInUseError(errno.EADDRINUSE, f"port {port} is in use. {action}")


def _bind(port: int) -> int:
    """Bind a port on all interfaces, as Reverb does but exclusively, close the socket, and return the port."""
    dual = socket.has_dualstack_ipv6()
    with socket.socket(socket.AF_INET6 if dual else socket.AF_INET) as trial:
        # Connections in TIME_WAIT of an ended server are no obstacle.
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if dual:
            trial.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        trial.bind(("", port))
        bound: int = trial.getsockname()[1]
    return bound
