"""The TCP port of a server and its connections, which Reverb itself cannot restrict or end.

reserve   Reverb binds with SO_REUSEPORT: it starts without an error on a port that another server uses, and the
          kernel then distributes connections over both. So the port is first bound without that option. A lock
          excludes other servers of this package until Reverb has started. The lock is a socket in the abstract
          namespace, which vanishes with its owner, as a port does. A foreign server that starts within the
          same millisecond is not noticed.
loopback  Reverb binds the wildcard address. A listening socket can be bound to a network interface afterwards; the
          kernel then answers connections over any other interface as if there were no listener.
drain     A last checkpoint needs a running server, and items that the server confirms while it writes the
          checkpoint would be lost. So listeners and connections are shut down within the server's process, except
          the connections of the service, which requests the checkpoint. Clients see a lost connection, keep
          unacknowledged items, and reconnect later.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

from reverb_writer.errors import ReverbWriterError

LOOPBACK, ALL = "127.0.0.1", "0.0.0.0"  # noqa: S104  # only if the user sets it
_INTERFACE = b"lo"
_INTERNET = (socket.AF_INET, socket.AF_INET6)
_NUM_SPARE = 16  # for a listing of descriptors, the files of a save, and descriptors that clients may take
_HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\x04\0\0\0\0\0"  # and an empty SETTINGS frame
_FRAME_HEADER_BYTES, _FRAME_TYPE, _SETTINGS = 9, 3, 4


class PortInUseError(ReverbWriterError, OSError):
    """Another process uses the port."""

    def __str__(self) -> str:
        """Return the message, without the system's error number."""
        return str(self.strerror)


class LoopbackError(ReverbWriterError, OSError):
    """The system does not let this process listen on loopback only."""


class Endpoint(NamedTuple):
    """One end of a connection: its address, with IPv4 addresses in IPv4 notation, and its port."""

    address: str
    port: int


@contextlib.contextmanager
def reserved(port: int) -> Iterator[None]:
    """Reserve `port` for the server that starts within the block.

    Raises:
        PortInUseError: A process listens on the port, on any address, or another server is starting on it.
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


def free_port() -> int:
    """Return a port that no process listens on, chosen by the kernel."""
    return _bind(0)


def port_in_use(port: int) -> PortInUseError:
    """Return the error for a port that another process uses."""
    action = "Stop the process that uses it, or choose another port."
    return PortInUseError(errno.EADDRINUSE, f"port {port} is in use. {action}")


def accepts_connections(address: str, timeout_s: float) -> bool:
    """Return whether a gRPC server accepts a new connection now.

    The kernel completes the handshake even if the server never takes the connection, so this waits for the server's
    first HTTP/2 frame.
    """
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout_s) as one:
            one.sendall(_HTTP2_PREFACE)
            header = one.recv(_FRAME_HEADER_BYTES, socket.MSG_WAITALL)
    except OSError:
        return False
    return len(header) == _FRAME_HEADER_BYTES and header[_FRAME_TYPE] == _SETTINGS


def restrict_to_loopback(port: int) -> None:
    """Accept connections to `port`, on which this process listens, only from this machine; end existing connections.

    Raises:
        LoopbackError: the system refuses this; Linux before 5.7 needs the capability NET_RAW.
    """
    ours = [(one, remote) for one, local, remote in _tcp_sockets() if local.port == port]
    for one in [one for one, remote in ours if remote is None]:  # listeners first, or clients would reconnect
        with socket.socket(fileno=os.dup(one)) as duplicate:
            try:
                duplicate.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, _INTERFACE)
            except OSError as error:
                raise LoopbackError(
                    f"port {port}: cannot be restricted to this machine ({error.strerror}). That needs Linux 5.7, or "
                    f'the capability NET_RAW. Otherwise set bind to "{ALL}" and keep others away with a firewall.'
                ) from error
    for one in [one for one, remote in ours if remote is not None]:
        _shut_down(one)


class Drain:
    """Ends the connections of a port of this process later, even if no descriptor is left then.

    It notes the listening sockets, which are shut down without a new descriptor, and reserves descriptors, which are
    released afterwards. So a waiting client cannot take a released descriptor.
    """

    def __init__(self, port: int) -> None:
        """Note the listening sockets of `port`, and reserve descriptors."""
        self._port = port
        self._listeners = [one for one, local, remote in _tcp_sockets() if local.port == port and remote is None]
        self._spare = [os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC) for _ in range(_NUM_SPARE)]

    def end_connections(self, keep: Collection[Endpoint]) -> int:
        """Refuse new connections, end existing ones except those from `keep`; return the number of ended ones."""
        for listener in self._listeners:
            _shut_down(listener)
        while self._spare:
            os.close(self._spare.pop())
        ended = 0
        for one, local, remote in list(_tcp_sockets()):
            if local.port == self._port and remote not in keep:
                _shut_down(one)
                ended += remote is not None
        return ended


def connections_to(port: int) -> set[Endpoint]:
    """Return this process's ends of its connections to `port`."""
    return {local for _, local, remote in _tcp_sockets() if remote is not None and remote.port == port}


def _shut_down(descriptor: int) -> None:
    """Shut down a socket whose descriptor belongs to another owner, without a new descriptor."""
    with contextlib.suppress(OSError):
        borrowed = socket.socket(fileno=descriptor)
        try:
            borrowed.shutdown(socket.SHUT_RDWR)
        finally:
            borrowed.detach()


def _tcp_sockets() -> Iterator[tuple[int, Endpoint, Endpoint | None]]:
    """Yield descriptor, local end and remote end (None for a listener) of each TCP socket of this process."""
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


def _bind(port: int) -> int:
    """Bind a port on all interfaces, as Reverb does but exclusively, close the socket, and return the port."""
    dual = socket.has_dualstack_ipv6()
    with socket.socket(socket.AF_INET6 if dual else socket.AF_INET) as trial:
        # Connections of an ended server in TIME_WAIT are no obstacle.
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if dual:
            trial.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        trial.bind(("", port))
        bound: int = trial.getsockname()[1]
    return bound
