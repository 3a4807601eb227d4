"""The sidecar, HAProxy with the configuration that ships: a gateway that is not there yet, names of /etc/hosts."""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest
from certificates import OPENSSL, Identity, make_identity, server_context
from gateway import FOLDER, HAPROXY, listening
from ports import free_port
from waiting import eventually

pytestmark = [
    pytest.mark.skipif(HAPROXY is None, reason="haproxy is not installed"),
    pytest.mark.skipif(OPENSSL is None, reason="openssl is not installed"),
]


@pytest.fixture
def identity(tmp_path: Path) -> Identity:
    """The same one for the gateway and for the client."""
    identity = make_identity(tmp_path, "localhost")
    (tmp_path / "client.pem").write_text(identity.private_key.read_text() + identity.certificate.read_text())
    (tmp_path / "ca.crt").write_text(identity.certificate.read_text())
    return identity


@contextlib.contextmanager
def sidecar(folder: Path, name: str, gateway_port: int) -> Iterator[int]:
    """Run it until the end of the block; yield its port."""
    assert HAPROXY is not None  # else this is skipped
    port = free_port()
    with listening(
        [HAPROXY, "-db", "-f", str(FOLDER / "sidecar.cfg")],
        port,
        folder / "log",
        SIDECAR_PORT=str(port),
        GATEWAY_ADDRESS=f"{name}:{gateway_port}",
        GATEWAY_NAME=name,
        CERTIFICATES=str(folder),
    ):
        yield port


def received(gateway: socket.socket, identity: Identity) -> bytes:
    """Return what comes first over a connection of the sidecar; that which found it there ends without a word."""
    content, context = b"", server_context(identity, identity)
    while not content:
        plain, _ = gateway.accept()
        with (
            plain,
            contextlib.suppress(ssl.SSLError, ConnectionError),
            context.wrap_socket(plain, server_side=True) as connection,
        ):
            content = connection.recv(100)
    return content


@pytest.mark.usefixtures("identity")
def test_sidecar_starts_before_the_name_of_its_gateway_is_known(tmp_path: Path) -> None:
    with sidecar(tmp_path, "gateway.invalid", 8443):
        pass  # it listens


def test_name_that_no_name_server_knows_is_that_of_etc_hosts_for_good(tmp_path: Path, identity: Identity) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as gateway,
        sidecar(tmp_path, "localhost", gateway.getsockname()[1]) as port,
    ):
        gateway.settimeout(60)
        # HAProxy has asked the name servers. Where they know localhost, it says nothing.
        with contextlib.suppress(AssertionError):
            eventually(lambda: "for maintenance" in (tmp_path / "log").read_text(), patience_s=8)
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(b"through")
            assert received(gateway, identity) == b"through"
