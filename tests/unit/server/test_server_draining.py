"""Draining ends the connections of a port, by the address and the port of their other end. Real sockets."""

from __future__ import annotations

import contextlib
import resource
import socket
from collections.abc import Iterator

import pytest

pytest.importorskip("reverb_writer_server", reason="the server is not installed on this interpreter")

from reverb_writer_server.reverb.sockets import Drain, Endpoint, connections_to


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """A server's socket on all addresses of the machine."""
    with socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True) as one:
        yield one


def connect(listener: socket.socket, source: tuple[str, int]) -> tuple[socket.socket, socket.socket]:
    """Return the client's and the server's end of a connection from that address."""
    port = listener.getsockname()[1]
    client = socket.create_connection(("127.0.0.1", port), 60, source_address=source)
    client.settimeout(60)
    server, _ = listener.accept()
    return client, server


def test_connection_is_kept_by_its_address_and_not_by_its_port_alone(listener: socket.socket) -> None:
    with contextlib.ExitStack() as ends:
        ours, served = map(ends.enter_context, connect(listener, ("127.0.0.1", 0)))
        own_port = ours.getsockname()[1]
        other, _ = map(ends.enter_context, connect(listener, ("127.0.0.2", own_port)))
        port = listener.getsockname()[1]
        assert connections_to(port) == {Endpoint("127.0.0.1", own_port), Endpoint("127.0.0.2", own_port)}
        assert Drain(port).end_connections({Endpoint("127.0.0.1", own_port)}) == 1
        assert other.recv(1) == b""  # its end
        served.sendall(b"x")
        assert ours.recv(1) == b"x"
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.1", port), 60)


def test_draining_needs_no_descriptor(listener: socket.socket) -> None:
    with contextlib.ExitStack() as ends:
        client, _ = map(ends.enter_context, connect(listener, ("127.0.0.1", 0)))
        drain = Drain(listener.getsockname()[1])
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        used = ends.enter_context(socket.socket()).fileno()  # the lowest that is free
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 1, hard))
        try:
            with contextlib.suppress(OSError):
                while True:
                    ends.enter_context(socket.socket())
            ended = drain.end_connections(())
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert ended == 1
        assert client.recv(1) == b""
