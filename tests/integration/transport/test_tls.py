"""TLS, mutual TLS and tokens. Reverb speaks neither, so a forwarder in front of it does, as a gateway would."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from certificates import OPENSSL, Identity, make_identity, server_context
from forwarder import Forwarder
from kinds import client_by_socket
from reading import fifo, pairs, read_column
from server_process import HostedServer

import reverb_writer as rw
from reverb_writer.protocol import messages

pytestmark = [
    client_by_socket,
    pytest.mark.skipif(OPENSSL is None, reason="the openssl command, which makes the certificates, is missing"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("certificates")


@pytest.fixture(scope="module")
def gateway(folder: Path) -> Identity:
    return make_identity(folder, "gateway")


@pytest.fixture(scope="module")
def actor(folder: Path) -> Identity:
    return make_identity(folder, "actor")


@pytest.fixture(scope="module")
def stranger(folder: Path) -> Identity:
    return make_identity(folder, "stranger")


@pytest.fixture
def server(replay_server: Callable[..., HostedServer]) -> HostedServer:
    return replay_server(fifo("replay"))


def windows(server: HostedServer) -> list[list[int]]:
    with rw.Client(server.address) as client:
        return read_column(client, "replay")


def write(client: rw.Client, steps: range) -> None:
    with rw.TrajectoryObserver(client, "replay", 2) as observer:
        for number in steps:
            observer({"n": np.int64(number)}, end_of_episode=False)


# TLS.


def test_items_go_through_mutual_tls(server: HostedServer, gateway: Identity, actor: Identity) -> None:
    tls = rw.TLS(gateway.certificate, actor.certificate, actor.private_key)
    with Forwarder(server.port, tls=server_context(gateway, actor)) as forwarder:
        with rw.Client(forwarder.address, tls=tls, timeout_s=60) as client:
            write(client, range(1000))
        assert windows(server) == pairs(range(1000))


def test_server_of_an_unknown_authority_is_refused_by_name(
    server: HostedServer, gateway: Identity, stranger: Identity
) -> None:
    tls = rw.TLS(root_certificates=stranger.certificate)
    with (
        Forwarder(server.port, tls=server_context(gateway)) as forwarder,
        rw.Client(forwarder.address, tls=tls, timeout_s=2) as client,
        pytest.raises(rw.errors.ServerUnavailableError, match="CERTIFICATE_VERIFY_FAILED"),
    ):
        client.server_info()


def test_server_of_another_name_is_refused_unless_that_name_is_expected(server: HostedServer, folder: Path) -> None:
    elsewhere = make_identity(folder, "elsewhere", host="replay.example")
    with Forwarder(server.port, tls=server_context(elsewhere)) as forwarder:
        tls = rw.TLS(root_certificates=elsewhere.certificate)
        with (
            rw.Client(forwarder.address, tls=tls, timeout_s=2) as client,
            pytest.raises(rw.errors.ServerUnavailableError, match=r"(?i)host ?name|peer name"),
        ):
            client.server_info()
        tls = rw.TLS(root_certificates=elsewhere.certificate, server_name="replay.example")
        with rw.Client(forwarder.address, tls=tls, timeout_s=60) as client:
            assert client.server_info().keys() == {"replay"}


@pytest.mark.parametrize("who", ["nobody", "stranger"])
def test_client_that_may_not_connect_hears_of_it(
    server: HostedServer, gateway: Identity, actor: Identity, stranger: Identity, who: str
) -> None:
    tls = rw.TLS(gateway.certificate)
    if who == "stranger":
        tls = rw.TLS(gateway.certificate, stranger.certificate, stranger.private_key)
    with (
        Forwarder(server.port, tls=server_context(gateway, actor)) as forwarder,
        rw.Client(forwarder.address, tls=tls, timeout_s=2) as client,
        pytest.raises(rw.errors.ServerUnavailableError, match="may ask for one of the client"),
    ):
        client.server_info()


def test_plain_text_to_a_server_of_tls_and_the_reverse_are_named(server: HostedServer, gateway: Identity) -> None:
    with (
        Forwarder(server.port, tls=server_context(gateway)) as forwarder,
        rw.Client(forwarder.address, timeout_s=2) as client,
        pytest.raises(rw.errors.ServerUnavailableError, match=r"check .* whether it expects `tls`"),
    ):
        client.server_info()
    with (
        rw.Client(server.address, tls=rw.TLS(gateway.certificate), timeout_s=2) as client,
        pytest.raises(rw.errors.ServerUnavailableError, match=r"(?i)ssl"),
    ):
        client.server_info()


@pytest.mark.parametrize("which", ["garbage", "mixed up"])
def test_certificates_that_cannot_be_used_are_refused_at_once(
    folder: Path, actor: Identity, stranger: Identity, which: str
) -> None:
    garbage = folder / "garbage.pem"
    garbage.write_text("no certificate")
    tls = {
        "garbage": rw.TLS(root_certificates=garbage),
        "mixed up": rw.TLS(certificate=actor.certificate, private_key=stranger.private_key),
    }[which]
    with pytest.raises(rw.errors.SpecError, match="cannot use the PEM files"):
        rw.Client("localhost:1", tls=tls)


# Tokens.

SESAME = "open"


class TokenServer:
    """A gRPC server that lets in who has the token, and has one table that is empty."""

    def __init__(self, gateway: Identity, path: Path) -> None:
        self.seen: list[str | None] = []
        self._server = grpc.server(concurrent.futures.ThreadPoolExecutor(2))
        handlers: dict[str, Any] = {"ServerInfo": grpc.unary_unary_rpc_method_handler(self._server_info)}
        service = messages.SERVER_INFO.split("/")[1]
        self._server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service, handlers)])
        pair = (gateway.private_key.read_bytes(), gateway.certificate.read_bytes())
        self.address = f"localhost:{self._server.add_secure_port('localhost:0', grpc.ssl_server_credentials([pair]))}"
        self.path = f"unix:{path}"
        self._server.add_insecure_port(self.path)
        self._server.start()

    def close(self) -> None:
        self._server.stop(0).wait(10)

    def _server_info(self, _: bytes, context: Any) -> bytes:
        self.seen.append(dict(context.invocation_metadata()).get("authorization"))
        if self.seen[-1] != f"Bearer {SESAME}":
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "wrong token")
        return b""


@pytest.fixture
def token_server(gateway: Identity, tmp_path: Path) -> Iterator[TokenServer]:
    server = TokenServer(gateway, tmp_path / "token.sock")
    yield server
    server.close()


def test_token_goes_with_every_call(token_server: TokenServer, gateway: Identity) -> None:
    with rw.Client(token_server.address, tls=rw.TLS(gateway.certificate), token=SESAME, timeout_s=60) as client:
        assert client.server_info() == {}
        assert client.server_info() == {}
    with rw.Client(token_server.path, token=SESAME, timeout_s=60) as client:
        assert client.server_info() == {}
    assert token_server.seen == [f"Bearer {SESAME}"] * 3


@pytest.mark.parametrize("token", [None, "guessed"])
def test_wrong_token_is_refused_at_once_and_named(
    token_server: TokenServer, gateway: Identity, token: str | None
) -> None:
    with (
        rw.Client(token_server.address, tls=rw.TLS(gateway.certificate), token=token, timeout_s=60) as client,
        pytest.raises(rw.errors.ReverbWriterError, match="refused: UNAUTHENTICATED: wrong token"),
    ):
        rw.TrajectoryObserver(client, "replay", 2)
    assert len(token_server.seen) == 1


def test_token_never_goes_in_plain_text() -> None:
    with pytest.raises(rw.errors.SpecError, match="`token` would travel to localhost:1 in plain text"):
        rw.Client("localhost:1", token=SESAME)


@pytest.mark.parametrize("token", ["", "two words", "secret\n", "sécret"])
def test_token_that_no_header_can_hold_is_refused(token: str) -> None:
    with pytest.raises(rw.errors.SpecError, match="`token` must be visible ASCII"):
        rw.Client("localhost:1", tls=True, token=token)
