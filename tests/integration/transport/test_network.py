"""What networks do to a connection: it is lost, it falls silent, it goes by other ways, TLS and tokens among them."""

from __future__ import annotations

import concurrent.futures
import contextlib
import math
import queue
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from call_forwarder import CallForwarder
from certificates import OPENSSL, Identity, make_identity, server_context
from forwarder import Forwarder
from kinds import by_socket, client_by_socket
from numbered import write_numbers
from reading import Serve, column_at, fifo, pairs
from server_process import HostedServer, StartServer
from waiting import eventually

import reverb_writer as rw
from reverb_writer.protocol import messages
from reverb_writer.transport import channel, delivery
from reverb_writer.transport.channel import Channel
from reverb_writer.transport.pipes import Pipe
from reverb_writer.transport.sample_stream import SampleStream

pytestmark = by_socket

PROXY_VARIABLES = ("grpc_proxy", "https_proxy", "http_proxy", "no_grpc_proxy", "no_proxy", "NO_PROXY")


@pytest.fixture
def server(replay_server: StartServer) -> HostedServer:
    return replay_server(fifo("replay"))


@pytest.fixture
def forwarder(server: HostedServer) -> Iterator[Forwarder]:
    with Forwarder(server.port) as forwarder:
        yield forwarder


def test_cut_connection_loses_and_doubles_nothing_idle_or_not(server: HostedServer, forwarder: Forwarder) -> None:
    with rw.TrajectoryObserver(forwarder.address, "replay", 2, max_delay_s=0.01) as observer:
        for first in range(0, 5000, 500):
            write_numbers(observer, range(first, first + 500))
            observer.flush() if first < 1000 else time.sleep(0.05)  # it is idle at first
            forwarder.cut()
        observer.flush()
        stats = observer.stats()
        assert (stats.acknowledged_items, stats.server_restarts) == (4999, 0)
        assert stats.reconnects >= 2
    assert sorted(column_at(server.address)) == pairs(range(5000))


@client_by_socket
@pytest.mark.parametrize("max_delay_s", [0.5, 600.0, 1e300, math.inf])
def test_connection_that_falls_silent_is_given_up_for_a_new_one(
    server: HostedServer, forwarder: Forwarder, monkeypatch: pytest.MonkeyPatch, max_delay_s: float
) -> None:
    monkeypatch.setattr(delivery, "_SILENCE_S", 1.0)
    monkeypatch.setattr(channel, "_ANSWER_WITHIN_S", 1.0)
    with rw.TrajectoryObserver(forwarder.address, "replay", 2, max_delay_s=max_delay_s) as observer:
        write_numbers(observer, range(100))
        observer.flush()
        forwarder.mute()
        write_numbers(observer, range(100, 200))
        observer.flush()
        assert observer.stats().reconnects == 1
    assert column_at(server.address) == pairs(range(200))


@client_by_socket
def test_connection_that_falls_silent_before_the_first_item_is_given_up_for_a_new_one(
    server: HostedServer, forwarder: Forwarder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No insert stream is open yet, so only the call before it can find out."""
    monkeypatch.setattr(channel, "_ANSWER_WITHIN_S", 1.0)
    with rw.TrajectoryObserver(forwarder.address, "replay", 2, timeout_s=60) as observer:
        forwarder.mute()
        write_numbers(observer, range(100))
        observer.flush()
    assert column_at(server.address) == pairs(range(100))


@client_by_socket
def test_connection_that_was_given_up_is_not_shared_with_a_later_client(
    server: HostedServer, forwarder: Forwarder
) -> None:
    with rw.Client(forwarder.address, timeout_s=60) as client:
        client.server_info()
        forwarder.mute()
        with pytest.raises(rw.errors.ReplayTimeoutError):
            client.server_info(timeout_s=1)
        assert client.server_info(timeout_s=60).keys() == {"replay"}  # over a new connection
        with rw.Client(forwarder.address) as later:
            assert later.server_info(timeout_s=20).keys() == {"replay"}


@client_by_socket
def test_silent_connection_is_given_up_by_client_and_dataset_after_a_late_call(
    server: HostedServer, forwarder: Forwarder
) -> None:
    with (
        rw.Client(forwarder.address, timeout_s=60) as client,
        rw.ReplayDataset(client, "replay", 1, timeout_s=60) as dataset,
    ):
        dataset.poll()  # begins to fetch
        forwarder.mute()
        with pytest.raises(rw.errors.ReplayTimeoutError, match=r"did not answer within 1\.0 s"):
            client.server_info(timeout_s=1)
        assert client.server_info(timeout_s=60).keys() == {"replay"}
        with rw.TrajectoryObserver(server.address, "replay", 1) as observer:
            write_numbers(observer, range(1))
        assert next(dataset).data["n"].ravel().tolist() == [0]
        assert dataset.stats().reconnects == 1


@client_by_socket
def test_calls_that_are_late_take_no_stream_with_them(server: HostedServer) -> None:
    numbers = []
    with (
        rw.Client(server.address, timeout_s=60) as client,
        rw.TrajectoryObserver(client, "replay", 1, max_delay_s=0.01) as observer,
        rw.ReplayDataset(client, "replay", 10, timeout_s=60) as dataset,
    ):
        for first in range(0, 2000, 10):
            write_numbers(observer, range(first, first + 10))
            with contextlib.suppress(rw.errors.ReplayTimeoutError):
                client.server_info(timeout_s=0.0003)
            numbers += next(dataset).data["n"].ravel().tolist()
        observer.flush()
        assert sorted(numbers) == list(range(2000))
        assert observer.stats().reconnects == dataset.stats().reconnects == dataset.stats().lost_samples == 0


@client_by_socket
def test_late_call_does_not_end_another_that_is_under_way(lone_server: StartServer) -> None:
    server = lone_server(fifo("replay"))
    with rw.Client(server.address) as client:
        client.server_info()
        server.process.pause()
        slow = client.shards[0].channel.start(messages.SERVER_INFO, b"", 60.0)
        for _ in range(4):
            with pytest.raises(rw.errors.ReplayTimeoutError):
                client.server_info(timeout_s=0.6)
        server.process.resume()
        assert slow.result()


def test_blocked_writer_stays_connected_over_many_heartbeats(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "_SILENCE_S", 0.2)
    monkeypatch.setattr(channel, "_NOT_BEFORE_S", 0.2)
    client = serve(rw.TableConfig.queue("replay", 10))
    with rw.TrajectoryObserver(client.address, "replay", 1, max_delay_s=0.1) as observer:
        write_numbers(observer, range(20))
        time.sleep(3)
        assert [int(sample.data["n"][0]) for sample in client.sample("replay", 20)] == list(range(20))
        observer.flush()
        assert observer.stats().reconnects == 0


@client_by_socket
def test_stream_that_a_gateway_ends_with_deadline_exceeded_is_a_lost_connection(server: HostedServer) -> None:
    with rw.TrajectoryObserver(server.address, "replay", 1) as observer:
        write_numbers(observer, range(1))
    with CallForwarder(server.port) as gateway, Channel(gateway.address) as channel:
        info = channel.server_info(60.0)
        stream = SampleStream(channel, "replay", info, changed=lambda: None, removes_items=False)
        gateway.lose = gateway.refuse = lambda _: grpc.StatusCode.DEADLINE_EXCEEDED
        stream.proceed(time.monotonic(), 0, 1)
        eventually(lambda: stream.has_unread)
        assert not stream.read()
        assert stream.loss is not None
        assert "DEADLINE_EXCEEDED" in str(stream.loss)
        events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        Pipe(channel, messages.INSERT_STREAM, events.put)
        assert isinstance(events.get(timeout=60.0), rw.errors.ServerUnavailableError)


@client_by_socket
def test_refusal_of_a_stream_is_told_though_a_message_is_being_written(server: HostedServer) -> None:
    request = messages.SampleStreamRequest(table="replay", num_samples=1).SerializeToString()
    with CallForwarder(server.port) as gateway, Channel(gateway.address) as channel:
        gateway.refuse = lambda _: grpc.StatusCode.PERMISSION_DENIED
        for _ in range(200):
            events: queue.SimpleQueue[Any] = queue.SimpleQueue()
            pipe = Pipe(channel, messages.SAMPLE_STREAM, events.put)
            while events.empty():
                pipe.send(request)
                time.sleep(0.0005)
            assert isinstance(events.get(), rw.errors.PermissionDeniedError)


@client_by_socket
@pytest.mark.parametrize("end", [lambda channel: channel.redirect("localhost:1"), Channel.close])
def test_channel_that_is_redirected_or_closed_gives_its_connection_back(
    forwarder: Forwarder, end: Callable[[Channel], None]
) -> None:
    kept = []
    for _ in range(3):
        kept.append(Channel(forwarder.address))
        kept[-1].call(messages.SERVER_INFO, b"", 60.0)
        end(kept[-1])
    eventually(lambda: not forwarder.num_open)


@client_by_socket
def test_address_may_have_any_form_that_grpc_knows(server: HostedServer, tmp_path: Path) -> None:
    path = tmp_path / "replay.sock"
    with Forwarder(server.port, path=path):
        for form in ("localhost:{}", "127.0.0.1:{}", "dns:localhost:{}", "dns:///localhost:{}", f"unix:{path}"):
            with rw.TrajectoryObserver(form.format(server.port), "replay", 2) as observer:
                write_numbers(observer, range(3))
            assert column_at(server.address) == pairs(range(3)), form


def connect_tunnel(client: socket.socket) -> None:
    """Answer an HTTP CONNECT request, as a proxy does."""
    request = b""
    while not request.endswith(b"\r\n\r\n"):
        request += client.recv(1)
    assert request.startswith(b"CONNECT ")
    client.sendall(b"HTTP/1.1 200 OK\r\n\r\n")


@client_by_socket
@pytest.mark.parametrize("use_proxy", [False, True])
def test_proxy_of_the_environment_is_used_only_if_asked(
    server: HostedServer, monkeypatch: pytest.MonkeyPatch, use_proxy: bool
) -> None:
    for variable in PROXY_VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    with Forwarder(server.port, greet=connect_tunnel) as proxy:
        monkeypatch.setenv("http_proxy", f"http://{proxy.address}")
        with rw.Client(server.address, use_proxy=use_proxy, timeout_s=60) as client:
            assert client.server_info().keys() == {"replay"}
        assert (proxy.accepted > 0) == use_proxy


# TLS and tokens. Reverb speaks neither, so a forwarder in front of it does, as a gateway would.


@pytest.fixture(scope="module")
def identities(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Identity]:
    if OPENSSL is None:
        pytest.skip("the openssl command, which makes the certificates, is missing")
    folder = tmp_path_factory.mktemp("certificates")
    hosts = {"gateway": "localhost", "actor": "localhost", "stranger": "localhost", "elsewhere": "replay.example"}
    return {name: make_identity(folder, name, host) for name, host in hosts.items()}


@client_by_socket
@pytest.mark.parametrize("name", ["gateway", "elsewhere"])
def test_items_go_through_mutual_tls_to_the_name_that_is_expected(
    server: HostedServer, identities: dict[str, Identity], name: str
) -> None:
    gateway, actor = identities[name], identities["actor"]
    server_name = "replay.example" if name == "elsewhere" else None
    tls = rw.TLS(gateway.certificate, actor.certificate, actor.private_key, server_name=server_name)
    with (
        Forwarder(server.port, tls=server_context(gateway, actor)) as forwarder,
        rw.Client(forwarder.address, tls=tls, timeout_s=60) as client,
        rw.TrajectoryObserver(client, "replay", 2) as observer,
    ):
        write_numbers(observer, range(1000))
    assert column_at(server.address) == pairs(range(1000))


REFUSALS: dict[str, tuple[list[str], tuple[str, str], str]] = {
    # The server's identity and that of its clients; the authority that a client knows, and its own identity.
    "unknown authority": (["gateway"], ("stranger", ""), "CERTIFICATE_VERIFY_FAILED"),
    "another name": (["elsewhere"], ("elsewhere", ""), r"(?i)host ?name|peer name"),
    "no certificate": (["gateway", "actor"], ("gateway", ""), "may ask for one of the client"),
    "unknown certificate": (["gateway", "actor"], ("gateway", "stranger"), "may ask for one of the client"),
    "plain text to TLS": (["gateway"], ("", ""), r"check .* whether it expects `tls`"),
    "TLS to plain text": ([], ("gateway", ""), r"(?i)ssl"),
}


@client_by_socket
@pytest.mark.parametrize("case", REFUSALS)
def test_connection_that_cannot_be_trusted_is_refused_by_name(
    server: HostedServer, identities: dict[str, Identity], case: str
) -> None:
    of_server, of_client, message = REFUSALS[case]
    context = server_context(*(identities[name] for name in of_server)) if of_server else None
    root, own = map(identities.get, of_client)
    files = (own.certificate, own.private_key) if own else (None, None)
    tls = rw.TLS(root.certificate, *files) if root else None
    with (
        Forwarder(server.port, tls=context) as forwarder,
        rw.Client(forwarder.address, tls=tls, timeout_s=2) as client,
        pytest.raises(rw.errors.ServerUnavailableError, match=message),
    ):
        client.server_info()


def test_certificates_that_cannot_be_used_are_refused_at_once(identities: dict[str, Identity], tmp_path: Path) -> None:
    garbage = tmp_path / "garbage.pem"
    garbage.write_text("no certificate")
    mixed_up = rw.TLS(certificate=identities["actor"].certificate, private_key=identities["stranger"].private_key)
    for tls in (rw.TLS(root_certificates=garbage), mixed_up):
        with pytest.raises(rw.errors.SpecError, match="cannot use the PEM files"):
            rw.Client("localhost:1", tls=tls)


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
def token_server(identities: dict[str, Identity], tmp_path: Path) -> Iterator[TokenServer]:
    server = TokenServer(identities["gateway"], tmp_path / "token.sock")
    yield server
    server.close()


def test_token_goes_with_every_call_and_a_wrong_one_is_refused_at_once_and_named(
    token_server: TokenServer, identities: dict[str, Identity]
) -> None:
    tls = rw.TLS(identities["gateway"].certificate)
    for address, encryption in ((token_server.address, tls), (token_server.path, None)):
        with rw.Client(address, encryption, token=SESAME, timeout_s=60) as client:
            assert client.server_info() == client.server_info() == {}
    assert token_server.seen == [f"Bearer {SESAME}"] * 4
    for number, token in enumerate((None, "guessed"), 5):
        with (
            rw.Client(token_server.address, tls=tls, token=token, timeout_s=60) as client,
            pytest.raises(rw.errors.ReverbWriterError, match="refused: UNAUTHENTICATED: wrong token"),
        ):
            rw.TrajectoryObserver(client, "replay", 2)
        assert len(token_server.seen) == number


def test_token_never_goes_in_plain_text_nor_where_no_header_can_hold_it() -> None:
    with pytest.raises(rw.errors.SpecError, match="`token` would travel to localhost:1 in plain text"):
        rw.Client("localhost:1", token=SESAME)
    for token in ("", "two words", "secret\n", "sécret"):
        with pytest.raises(rw.errors.SpecError, match="`token` must be visible ASCII"):
            rw.Client("localhost:1", tls=True, token=token)
