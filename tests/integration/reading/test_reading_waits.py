"""Batches that do not come: time-outs name their cause; servers that go and come back, and several of them."""

from __future__ import annotations

import contextlib
import functools
import time
import traceback
from collections.abc import Sequence
from typing import Any

import grpc
import numpy as np
import pytest
from call_forwarder import CallForwarder
from kinds import client_by_socket
from numbered import QUEUE, first_numbers, insert_numbers
from reading import Serve
from server_process import StartServer
from threads import soon
from waiting import eventually

import reverb_writer as rw
from reverb_writer import background
from reverb_writer.transport import sample_stream


def test_empty_table_is_named(serve: Serve) -> None:
    client = serve(rw.TableConfig("replay", rate_limiter=rw.MinSize(5)))
    with rw.ReplayDataset(client, "replay", 2, timeout_s=1.0) as dataset:
        with pytest.raises(rw.errors.ReplayTimeoutError, match=r"no batch within 1.0 s.*is empty.*waits for 5 more"):
            next(dataset)
        insert_numbers(client.address, "replay", range(3))
        with pytest.raises(rw.errors.ReplayTimeoutError, match=r"has 3 items.*waits for 2 more"):
            next(dataset)
        insert_numbers(client.address, "replay", range(2))
        dataset.timeout_s = 30.0
        assert len(first_numbers(next(dataset))) == 2
    client.reset("replay")
    with pytest.raises(rw.errors.ReplayTimeoutError, match=r"1 of 1 samples.*is empty"):
        next(client.sample("replay", 1, timeout_s=1.0))


def test_rate_limiter_that_waits_for_inserts_is_named(serve: Serve) -> None:
    client = serve(rw.TableConfig("replay", rate_limiter=rw.SampleToInsertRatio(2.0, 2, (-1, 100))))
    insert_numbers(client.address, "replay", range(2))
    with rw.ReplayDataset(client, "replay", 4, max_in_flight_batches=1) as dataset:
        next(dataset)
        eventually(lambda: dataset.stats().ready_samples == 1)
        dataset.timeout_s = 1.0
        # 2 x 2 - 5 = -1: the fifth sample was let out, each two more need one more insert.
        told = r"1 of 4 samples have arrived.*waits for 1 more insert:.*min_diff -1"
        with pytest.raises(rw.errors.ReplayTimeoutError, match=told):
            next(dataset)


def test_actors_are_to_be_started_if_they_have_not_written_lately(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = serve(rw.TableConfig("replay", rate_limiter=rw.MinSize(5)))
    with rw.ReplayDataset(client, "replay", 2, timeout_s=3.0) as dataset:
        insert_numbers(client.address, "replay", range(2))
        with pytest.raises(rw.errors.ReplayTimeoutError, match=r"2 items were inserted") as caught:
            next(dataset)
        assert "Start the actors" not in str(caught.value)
        assert dataset.stats().wait_s >= 3.0, "the learner has waited, although no batch came"
        monkeypatch.setattr(sample_stream, "_RECENT_S", 2.0)
        with pytest.raises(rw.errors.ReplayTimeoutError, match=r"no items were inserted. Start the actors"):
            next(dataset)


def test_time_out_starts_again_with_each_item_that_the_rate_limiter_waits_for(serve: Serve) -> None:
    client = serve(rw.TableConfig("replay", rate_limiter=rw.MinSize(3)))

    def insert_slowly() -> None:
        for number in range(3):
            time.sleep(1.5)
            insert_numbers(client.address, "replay", [number])

    with rw.ReplayDataset(client, "replay", 2, timeout_s=3.0) as dataset, soon(insert_slowly):
        assert len(first_numbers(next(dataset))) == 2


def test_what_is_waited_for_is_logged_again_and_again(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(background, "LOG_EVERY_S", 0.5)
    with rw.ReplayDataset(serve(rw.TableConfig("replay")), "replay", 2, timeout_s=2.5) as dataset:
        with pytest.raises(rw.errors.ReplayTimeoutError):
            next(dataset)
        logged = [record.getMessage() for record in caplog.records if "no batch for" in record.getMessage()]
    assert len(logged) >= 2
    assert all("table `replay`: no batch for" in line and "is empty" in line for line in logged[1:])


@client_by_socket
@pytest.mark.parametrize("kind", [rw.ReplayDataset, functools.partial(rw.SliceDataset, slice_len=1)])
def test_constructor_logs_that_it_waits_for_the_server_and_its_time_out_is_one_traceback(
    lone_server: StartServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: Any
) -> None:
    monkeypatch.setattr(background, "LOG_EVERY_S", 0.3)
    server = lone_server(QUEUE)
    server.process.pause()
    with pytest.raises((rw.errors.ReplayTimeoutError, rw.errors.ServerUnavailableError)) as caught:
        kind(server.address, "queue", 2, timeout_s=1.5)
    server.process.resume()
    logged = [record.getMessage() for record in caplog.records]
    assert any(f"table `queue`: waiting for the server at {server.address} (" in line for line in logged)
    assert "".join(traceback.format_exception(caught.value)).count("Traceback") == 1


@client_by_socket
@pytest.mark.parametrize("what", ["next", "close"])
def test_servers_that_are_paused_share_one_deadline(lone_server: StartServer, what: str) -> None:
    server = lone_server(QUEUE)
    addresses = [f"{name}:{server.port}" for name in ("localhost", "127.0.0.1", "dns:localhost", "ipv4:127.0.0.1")]

    def spent_s(addresses: list[str]) -> float:
        dataset = rw.ReplayDataset(addresses, "queue", 2, timeout_s=2.0, max_in_flight_batches=1)
        server.process.pause()
        start = time.monotonic()
        if what == "next":
            with pytest.raises(rw.errors.ReplayTimeoutError, match="did not answer") as caught:
                next(dataset)
            assert "".join(traceback.format_exception(caught.value)).count("Traceback") == 1
        else:
            dataset.close()
        spent_s = time.monotonic() - start
        server.process.resume()
        dataset.close()
        return spent_s

    assert spent_s(addresses) < spent_s(addresses[:1]) + 4.0


def test_dataset_whose_table_no_longer_exists_raises_at_each_call(lone_server: StartServer) -> None:
    server = lone_server(rw.TableConfig("replay"))
    insert_numbers(server.address, "replay", [1])
    with rw.ReplayDataset(server.address, "replay", 2, max_in_flight_batches=1) as dataset:
        next(dataset)
        server.process.kill()
        lone_server(QUEUE, port=server.port)
        for _ in range(2):  # the batches that have arrived
            with contextlib.suppress(rw.errors.StructureError):
                next(dataset)
        for _ in range(2):
            with pytest.raises(rw.errors.StructureError, match="table `replay` is not on the server"):
                next(dataset)


def test_server_that_is_gone_is_named_when_it_is_needed_and_its_restart_survived(lone_server: StartServer) -> None:
    server = lone_server(QUEUE)
    insert_numbers(server.address, "queue", range(4))
    with rw.ReplayDataset(server.address, "queue", 2) as dataset:
        assert first_numbers(next(dataset)) == [0, 1]
        eventually(lambda: dataset.stats().ready_samples == 2)
        server.process.kill()
        assert first_numbers(next(dataset)) == [2, 3]
        dataset.timeout_s = 1.0
        with pytest.raises(rw.errors.ServerUnavailableError, match=r"is gone, last heard of .* Start it again"):
            next(dataset)
        server.process.restart()
        insert_numbers(server.address, "queue", [4, 5])
        dataset.timeout_s = float("inf")
        assert first_numbers(next(dataset)) == [4, 5]
        stats = dataset.stats()
        assert stats.reconnects >= 1
        assert stats.server_restarts == 1
        server.process.kill()
    assert list(dataset) == []  # `close` has waited for nothing that cannot come


def test_error_that_ends_the_thread_is_raised_and_is_no_end_of_the_samples(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    client = serve(rw.TableConfig("replay"))
    client.insert({"frame": np.zeros((1, 1 << 18), np.float32)}, {"replay": 1.0})
    # 2**27 rows of 1 MiB are more than an address space has.
    options: dict[str, Any] = {"max_cache_bytes": 1 << 60, "max_in_flight_batches": 1, "timeout_s": 60.0}
    with rw.ReplayDataset(client, "replay", 1, **options) as dataset, pytest.raises(MemoryError):
        next(dataset)
    assert "The thread that fetches samples of `replay` has ended." in caplog.messages


def num_asked(servers: Sequence[CallForwarder]) -> int:
    return sum(server.verbs.count("ServerInfo") for server in servers)


@client_by_socket
def test_servers_whose_samples_tell_their_size_are_not_asked(replay_server: StartServer) -> None:
    table = rw.TableConfig("replay", 100, rw.Prioritized(1.0))
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(CallForwarder(replay_server(table).port)) for _ in range(2)]
        addresses = [server.address for server in servers]
        for address in addresses:
            insert_numbers(address, "replay", range(5))
        dataset = stack.enter_context(rw.ReplayDataset(addresses, "replay", 8))
        next(dataset)
        before, end = num_asked(servers), time.monotonic() + 3.0
        while time.monotonic() < end:
            next(dataset)
        assert num_asked(servers) - before < 6  # 12 if each were asked every half second


@client_by_socket
def test_empty_queue_is_asked_less_and_less_often_by_a_dataset_that_waits_for_ever(replay_server: StartServer) -> None:
    with (
        CallForwarder(replay_server(QUEUE).port) as server,
        rw.ReplayDataset(server.address, "queue", 4, timeout_s=float("inf")) as dataset,
    ):
        assert dataset.poll(6.0) is None
        before = num_asked([server])
        assert dataset.poll(2.0) is None
        assert num_asked([server]) - before < 20  # 40 if it were asked 20 times a second
        with soon(lambda: insert_numbers(server.address, "queue", range(4))):
            assert first_numbers(next(dataset)) == list(range(4))


@client_by_socket
@pytest.mark.parametrize("num_servers", [1, 2])
def test_reader_outlives_a_gateway_that_refuses_for_a_while(replay_server: StartServer, num_servers: int) -> None:
    states = [grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL, grpc.StatusCode.RESOURCE_EXHAUSTED]
    broken: list[str] = []

    def refuse(verb: str) -> grpc.StatusCode | None:
        """Break the first stream, and then refuse some questions."""
        if verb == "SampleStream" and not broken:
            broken.append(verb)
            return grpc.StatusCode.UNAVAILABLE
        return states.pop() if states and broken and verb == "ServerInfo" else None

    servers = [replay_server(rw.TableConfig("replay")) for _ in range(num_servers)]
    for server in servers:
        insert_numbers(server.address, "replay", range(2))
    with CallForwarder(servers[0].port) as gateway:
        gateway.refuse = refuse
        addresses = [gateway.address, *(server.address for server in servers[1:])]
        with rw.ReplayDataset(addresses, "replay", 2, timeout_s=60) as dataset:
            next(dataset)
            eventually(lambda: dataset.stats().reconnects == 1)
            for _ in range(10):
                next(dataset)
            assert not states
