"""What networks do to a connection: it is lost, it falls silent, it goes by other ways. Each item arrives once."""

from __future__ import annotations

import contextlib
import math
import queue
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tree
from call_forwarder import CallForwarder
from forwarder import Forwarder
from kinds import by_socket, client_by_socket
from reading import fifo, pairs, read_column
from server_process import HostedServer
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
def server(replay_server: Callable[..., HostedServer]) -> HostedServer:
    return replay_server(fifo("replay"))


@pytest.fixture
def forwarder(server: HostedServer) -> Iterator[Forwarder]:
    with Forwarder(server.port) as forwarder:
        yield forwarder


def write(observer: rw.TrajectoryObserver, steps: range) -> None:
    for number in steps:
        observer({"n": np.int64(number)}, end_of_episode=False)


def windows(server: HostedServer) -> list[list[int]]:
    with rw.Client(server.address) as client:
        return read_column(client, "replay")


def test_connection_that_is_cut_while_idle_is_made_again(server: HostedServer, forwarder: Forwarder) -> None:
    with rw.TrajectoryObserver(forwarder.address, "replay", 2) as observer:
        for first in (0, 100, 200):
            write(observer, range(first, first + 100))
            observer.flush()
            forwarder.cut()
        write(observer, range(300, 400))
        observer.flush()
        stats = observer.stats()
    assert windows(server) == pairs(range(400))
    assert stats.reconnects >= 3
    assert stats.server_restarts == 0


def test_connection_that_is_cut_in_mid_stream_loses_and_doubles_nothing(
    server: HostedServer, forwarder: Forwarder
) -> None:
    with rw.TrajectoryObserver(forwarder.address, "replay", 2, max_delay_s=0.01) as observer:
        for first in range(0, 5000, 500):
            write(observer, range(first, first + 500))
            time.sleep(0.05)
            forwarder.cut()
        observer.flush()
        assert observer.stats().acknowledged_items == 4999
        assert observer.stats().reconnects >= 1
    assert sorted(windows(server)) == pairs(range(5000))


@pytest.mark.parametrize("max_delay_s", [0.5, 600.0, 1e300, math.inf])
def test_connection_that_falls_silent_is_given_up_for_a_new_one(
    server: HostedServer, forwarder: Forwarder, monkeypatch: pytest.MonkeyPatch, max_delay_s: float
) -> None:
    monkeypatch.setattr(delivery, "_SILENCE_S", 1.0)
    monkeypatch.setattr(channel, "_ANSWER_WITHIN_S", 1.0)
    with rw.TrajectoryObserver(forwarder.address, "replay", 2, max_delay_s=max_delay_s) as observer:
        write(observer, range(100))
        observer.flush()
        forwarder.mute()
        write(observer, range(100, 200))
        observer.flush()
        assert observer.stats().reconnects == 1
    assert windows(server) == pairs(range(200))


@client_by_socket
def test_client_finds_a_new_connection_after_a_silent_one(forwarder: Forwarder) -> None:
    with rw.Client(forwarder.address) as client:
        client.server_info()
        forwarder.mute()
        with pytest.raises(rw.errors.ReplayTimeoutError, match=r"did not answer within 1\.0 s"):
            client.server_info(timeout_s=1)
        assert client.server_info(timeout_s=60).keys() == {"replay"}


@client_by_socket
def test_calls_that_are_late_take_no_stream_with_them(server: HostedServer) -> None:
    with rw.Client(server.address, timeout_s=60) as client:
        with rw.TrajectoryObserver(client, "replay", 1, max_delay_s=0.01) as observer:
            dataset = rw.ReplayDataset(client, "replay", 10, timeout_s=60)
            numbers = []
            for first in range(0, 2000, 10):
                write(observer, range(first, first + 10))
                with contextlib.suppress(rw.errors.ReplayTimeoutError):
                    client.server_info(timeout_s=0.0003)
                numbers += next(dataset).data["n"].ravel().tolist()
            observer.flush()
            assert observer.stats().reconnects == 0
        assert sorted(numbers) == list(range(2000))
        assert dataset.stats().reconnects == dataset.stats().lost_samples == 0
        dataset.close()


@client_by_socket
def test_late_call_does_not_end_another_that_is_under_way(lone_server: Callable[..., HostedServer]) -> None:
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


@client_by_socket
def test_connection_of_a_learner_that_falls_silent_is_given_up_after_a_late_call(
    server: HostedServer, forwarder: Forwarder
) -> None:
    with (
        rw.Client(forwarder.address, timeout_s=60) as client,
        rw.ReplayDataset(client, "replay", 1, timeout_s=60) as dataset,
    ):
        dataset.take()  # begins to fetch
        forwarder.mute()
        with pytest.raises(rw.errors.ReplayTimeoutError):
            client.server_info(timeout_s=0.5)
        with rw.TrajectoryObserver(server.address, "replay", 1) as observer:
            write(observer, range(1))
        assert next(dataset).data["n"].ravel().tolist() == [0]
        assert dataset.stats().reconnects == 1


def test_blocked_writer_stays_connected_over_many_heartbeats(
    replay_server: Callable[..., HostedServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery, "_SILENCE_S", 0.2)
    monkeypatch.setattr(channel, "_NOT_BEFORE_S", 0.2)
    server = replay_server(rw.TableConfig.queue("replay", 10))
    with (
        rw.TrajectoryObserver(server.address, "replay", 1, max_delay_s=0.1) as observer,
        rw.Client(server.address) as c,
    ):
        write(observer, range(20))
        time.sleep(3)
        assert [int(tree.flatten(sample.data)[0][0]) for sample in c.sample("replay", 20)] == list(range(20))
        observer.flush()
        assert observer.stats().reconnects == 0


@client_by_socket
def test_stream_that_a_gateway_ends_with_deadline_exceeded_is_a_lost_connection(server: HostedServer) -> None:
    with rw.TrajectoryObserver(server.address, "replay", 1) as observer:
        write(observer, range(1))
    with CallForwarder(server.port) as gateway, Channel(gateway.address) as channel:
        info = channel.server_info(60.0)
        stream = SampleStream(channel, "replay", info, changed=lambda: None, removes_items=False)
        gateway.lose = gateway.refuse = lambda _: grpc.StatusCode.DEADLINE_EXCEEDED
        stream.proceed(time.monotonic(), 0, 1)
        eventually(lambda: stream.has_unread)
        assert not stream.read()
        assert stream.loss is not None
        assert "DEADLINE_EXCEEDED" in str(stream.loss.error)
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
@pytest.mark.parametrize("form", ["localhost:{}", "127.0.0.1:{}", "dns:localhost:{}", "dns:///localhost:{}"])
def test_address_may_have_any_form_that_grpc_knows(server: HostedServer, form: str) -> None:
    with rw.TrajectoryObserver(form.format(server.port), "replay", 2) as observer:
        write(observer, range(3))
    assert windows(server) == pairs(range(3))


@client_by_socket
def test_address_may_be_a_unix_socket(server: HostedServer, tmp_path: Path) -> None:
    path = tmp_path / "replay.sock"
    with Forwarder(server.port, path=path), rw.TrajectoryObserver(f"unix:{path}", "replay", 2) as observer:
        write(observer, range(3))
    assert windows(server) == pairs(range(3))


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
