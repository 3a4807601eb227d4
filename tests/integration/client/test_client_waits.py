"""What a call of `Client` does when it has to wait: one deadline for all, no other call waits, nothing goes on."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import pytest
from call_forwarder import CallForwarder
from kinds import client_alone, client_by_socket, contents
from reading import fifo, read_column
from server_process import StartServer
from waiting import eventually

import reverb_writer as rw
from reverb_writer.protocol.signatures import ArraySpec

DELAY_S = 2.5
LONG_S = 60.0
ROUNDED_S = 1.5  # gRPC sends so long a deadline in whole seconds, rounded up


def insert(client: rw.Client, number: int, table: str, timeout_s: float | None = None) -> None:
    client.insert(np.array([number]), {table: 1.0}, timeout_s)


def fill(client: rw.Client, table: str) -> None:
    """Fill a queue of one place, and fail to insert one item more."""
    insert(client, 0, table)
    with pytest.raises(rw.errors.ReplayTimeoutError, match=f"The rate limiter of table `{table}` blocks inserts"):
        insert(client, 1, table, 1.0)


# An insert that has failed.


def test_insert_goes_on_although_one_into_another_table_has_timed_out(replay_server: StartServer) -> None:
    server = replay_server(rw.TableConfig.queue("full", 1), fifo("free"))
    with rw.Client(server.address, timeout_s=60) as client:
        fill(client, "full")
        insert(client, 2, "free")
        assert read_column(client, "free") == [[2]]
        assert client.server_info()["full"].current_size == 1


def test_insert_that_waits_does_not_keep_others_waiting(replay_server: StartServer) -> None:
    server = replay_server(rw.TableConfig.queue("full", 1), fifo("free"))
    with rw.Client(server.address, timeout_s=LONG_S) as client:
        insert(client, 0, "full")
        blocked = threading.Thread(target=insert, args=[client, 1, "full"])
        blocked.start()
        for number in range(5):
            insert(client, number, "free")
        assert blocked.is_alive()
        assert read_column(client, "full") == [[0]]
        blocked.join()
        assert read_column(client, "full") == [[1]]


def test_insert_that_has_timed_out_is_not_sent_to_the_next_server(lone_server: StartServer) -> None:
    server = lone_server(rw.TableConfig.queue("full", 1), fifo("free"))
    with rw.Client(server.address, timeout_s=60) as client:
        fill(client, "full")
        server.process.kill()
        server.process.restart()
        insert(client, 2, "free")
        insert(client, 3, "full")
        assert read_column(client, "full") == [[3]]


def test_insert_survives_a_kill_while_it_waits(lone_server: StartServer) -> None:
    server = lone_server(rw.TableConfig.queue("full", 1))
    with rw.Client(server.address, timeout_s=LONG_S) as client:
        insert(client, 0, "full")
        blocked = threading.Thread(target=insert, args=[client, 1, "full"])
        blocked.start()
        waits = "waiting_for_sampling"
        eventually(lambda: client.server_info()["full"].worker_time_ms[waits] > 0)
        server.process.kill()
        server.process.restart()
        blocked.join()
        assert read_column(client, "full") == [[1]]


def test_insert_under_way_when_the_client_is_closed_says_so(replay_server: StartServer) -> None:
    server = replay_server(rw.TableConfig.queue("full", 1))
    with rw.Client(server.address, timeout_s=LONG_S) as client:
        insert(client, 0, "full")
        errors: list[BaseException] = []

        def blocked() -> None:
            try:
                insert(client, 1, "full")
            except rw.errors.ReverbWriterError as error:
                errors.append(error)

        thread = threading.Thread(target=blocked)
        thread.start()
        eventually(lambda: client.server_info()["full"].worker_time_ms["waiting_for_sampling"] > 0)
    thread.join()
    assert [type(error) for error in errors] == [rw.errors.ClosedError]


# Few calls.


class Counted(NamedTuple):
    """A server whose calls are counted, and a client that has its connection: one that connects may ask twice."""

    calls: CallForwarder
    client: rw.Client


@pytest.fixture
def counted(replay_server: StartServer) -> Iterator[Counted]:
    server = replay_server(*map(rw.TableConfig, ("a", "b", "c")))
    with CallForwarder(server.port) as forwarder, rw.Client(forwarder.address) as client:
        client.server_info()
        del forwarder.calls[:]
        yield Counted(forwarder, client)


@client_by_socket
def test_observer_asks_once_when_it_is_opened_and_the_stream_once_more(counted: Counted) -> None:
    with rw.TrajectoryObserver(counted.client, "a", 1) as observer:
        assert counted.calls.verbs == ["ServerInfo"]
        observer({"n": np.int64(1)}, end_of_episode=True)
        observer.flush()
    assert counted.calls.verbs == ["ServerInfo", "ServerInfo", "InsertStream"]


@client_by_socket
def test_insert_takes_two_calls(counted: Counted) -> None:
    insert(counted.client, 1, "a")
    assert counted.calls.verbs == ["ServerInfo", "InsertStream"]


# One deadline.


@pytest.fixture
def slow(replay_server: StartServer) -> Iterator[CallForwarder]:
    server = replay_server(fifo("a"), rw.TableConfig("weights", 1), rw.TableConfig("replay"))
    with CallForwarder(server.port) as forwarder:
        yield forwarder


CALLS: dict[str, Callable[[rw.Client], object]] = {
    "insert": lambda client: client.insert(np.zeros(1), {"a": 1.0}, spec=ArraySpec((), np.dtype(float))),
    "sample": lambda client: list(client.sample("a", timeout_s=LONG_S)),
    "latest": lambda client: rw.Variables(client, "weights").latest(),
}


@client_by_socket
@pytest.mark.parametrize("call", CALLS)
def test_what_a_call_asks_for_in_turn_has_one_deadline(slow: CallForwarder, call: str) -> None:
    with rw.Client(slow.address, timeout_s=LONG_S) as client:
        insert(client, 1, "a")
        rw.Variables(client, "weights").publish([np.zeros(1)])
        rw.Variables(client, "weights")
        del slow.calls[:]
        slow.delay_s = DELAY_S
        CALLS[call](client)
        calls = slow.calls[1:] if call == "latest" else slow.calls  # the constructor's has one of its own
    assert len(calls) >= 2
    # Who reads a stream watches the deadline: the time of its caller does not count.
    given = [left_s for verb, left_s in calls[1:] if not verb.endswith("Stream")]
    assert max(given, default=0.0) <= LONG_S + ROUNDED_S - DELAY_S


@pytest.mark.only_server("reverb", "it asks for checkpoints, which a local server does not write")
def test_servers_of_a_client_are_asked_at_once(replay_server: StartServer) -> None:
    # Each answers only after both were asked.
    both = threading.Barrier(2)

    class Together(CallForwarder):
        def forward(self, method: str, requests: object, context: object) -> Iterator[bytes]:
            both.wait(60)
            return super().forward(method, requests, context)  # type: ignore[arg-type]

    with (
        Together(replay_server(fifo("a")).port) as first,
        Together(replay_server(fifo("a")).port) as second,
        rw.Client([first.address, second.address], timeout_s=60) as client,
    ):
        assert client.server_info()["a"].current_size == 0
        client.mutate_priorities("a", {1: 1.0})
        assert len(client.checkpoint().splitlines()) == 2


def test_time_out_is_told_by_one_traceback(replay_server: StartServer) -> None:
    server = replay_server(rw.TableConfig.queue("full", 1))
    with rw.Client(server.address) as client:
        insert(client, 0, "full")
        list(client.sample("full"))
        with pytest.raises(rw.errors.ReplayTimeoutError) as sampling:
            list(client.sample("full", timeout_s=0.5))
        insert(client, 0, "full")
        with pytest.raises(rw.errors.ReplayTimeoutError) as inserting:
            insert(client, 1, "full", 0.5)
    for caught in (sampling, inserting):
        assert "".join(traceback.format_exception(caught.value)).count("Traceback") == 1


def test_waiting_for_weights_says_that_nobody_has_published_any(replay_server: StartServer) -> None:
    server = replay_server(rw.TableConfig("weights", 1))
    with (
        rw.Variables(server.address, "weights") as actor,
        pytest.raises(
            rw.errors.ReplayTimeoutError, match=r"is empty.*Nothing was published yet: start the learner"
        ) as caught,
    ):
        actor.latest(timeout_s=2)
    assert "actors" not in str(caught.value)
    assert "".join(traceback.format_exception(caught.value)).count("Traceback") == 1


# The consumer's own time.


@contents
@pytest.mark.slow
@pytest.mark.parametrize("num_servers", [1, 2])
def test_time_between_two_samples_is_not_the_servers(replay_server: StartServer, num_servers: int) -> None:
    servers = [replay_server(rw.TableConfig("a")) for _ in range(num_servers)]
    with rw.Client([server.address for server in servers], timeout_s=8.0) as client:
        for number in range(num_servers):
            insert(client, number, "a", LONG_S)
        samples = client.sample("a", 5000)  # more than are requested at once
        time.sleep(8.5)
        next(samples)
        time.sleep(8.5)
        assert len(list(samples)) == 4999


@client_alone
def test_arguments_of_sample_are_checked_by_the_call(replay_server: StartServer) -> None:
    server = replay_server(rw.TableConfig("a"))
    with rw.Client(server.address) as client:
        with pytest.raises(rw.errors.SpecError, match="`num_samples` must be >= 1, got 0"):
            client.sample("a", 0)
        with pytest.raises(rw.errors.SpecError, match="`timeout_s` must be > 0"):
            client.sample("a", timeout_s=-1.0)
    with pytest.raises(rw.errors.ClosedError):
        client.sample("a")
