"""Loopback only, for a server that can only listen on all interfaces.

Reverb binds the wildcard address and has no option for another. A listening socket can be bound to a network interface
afterwards; the kernel then answers connections over any other interface as if there were no listener.
"""

from __future__ import annotations

import contextlib
import os
import socket

from reverb_writer.errors import ReverbWriterError
from reverb_writer_server.reverb.draining import tcp_sockets

LOOPBACK, ALL = "127.0.0.1", "0.0.0.0"  # noqa: S104  # the user says so
_INTERFACE = b"lo"


class LoopbackError(ReverbWriterError, OSError):
    """The system does not let this process listen on loopback only."""


def restrict_to_loopback(port: int) -> None:
    """Accept connections to `port`, on which this process listens, only from this machine; end those that there are.

    Raises:
        LoopbackError: the system refuses it, as Linux before 5.7 does without the capability NET_RAW.
    """
    ours = [(one, remote) for one, local, remote in tcp_sockets() if local.port == port]
    for one, remote in sorted(
        ours, key=lambda pair: pair[1] is not None
    ):  # listeners first, or clients would reconnect
        with socket.socket(fileno=os.dup(one)) as duplicate:
            if remote is not None:
                with contextlib.suppress(OSError):  # it has ended itself
                    duplicate.shutdown(socket.SHUT_RDWR)
                continue
            try:
                duplicate.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, _INTERFACE)
            except OSError as error:
                raise LoopbackError(
                    f"port {port}: cannot be restricted to this machine ({error.strerror}). That needs Linux 5.7, or "
                    f'the capability NET_RAW. Otherwise set bind to "{ALL}" and keep others away with a firewall.'
                ) from error
