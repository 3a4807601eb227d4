"""Calls that wait have one deadline and hold up no other; connections are shared by all, and leave nothing behind."""

from __future__ import annotations

import contextlib
import gc
import pathlib
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from call_forwarder import CallForwarder
from forwarder import Forwarder
from kinds import client_by_socket, contents
from reading import Serve, fifo, read_column
from server_process import StartServer
from threads import at_once, our_threads, soon
from waiting import eventually

import reverb_writer as rw
from reverb_writer.replay.client import as_client

DELAY_S = 2.0
LONG_S = 60.0
ROUNDED_S = 1.5  # gRPC sends so long a deadline in whole seconds, rounded up


def insert(client: rw.Client, number: int, table: str, timeout_s: float | None = None) -> None:
    client.insert(np.array([number]), {table: 1.0}, timeout_s)


def fill(client: rw.Client, table: str) -> None:
    """Fill a queue of one place, and fail to insert one item more."""
    insert(client, 0, table)
    with pytest.raises(rw.errors.ReplayTimeoutError, match=f"The rate limiter of table `{table}` blocks inserts"):
        insert(client, 1, table, 1.0)


def test_insert_that_has_timed_out_or_waits_does_not_keep_others_waiting(serve: Serve) -> None:
    client = serve(rw.TableConfig.queue("late", 1), rw.TableConfig.queue("full", 1), fifo("free"))
    fill(client, "late")
    insert(client, 2, "free")
    assert read_column(client, "free") == [[2]]
    assert client.server_info()["late"].current_size == 1
    insert(client, 0, "full")
    with soon(lambda: insert(client, 1, "full"), after_s=0):
        eventually(lambda: inserts_wait(client))
        for number in range(5):
            insert(client, number, "free")
        assert read_column(client, "full") == [[0]]
    assert read_column(client, "full") == [[1]]


def test_insert_survives_a_kill_while_it_waits_but_not_after_it_has_timed_out(lone_server: StartServer) -> None:
    server = lone_server(rw.TableConfig.queue("full", 1), fifo("free"))
    with rw.Client(server.address, timeout_s=LONG_S) as client:
        fill(client, "full")
        server.process.kill()
        server.process.restart()
        insert(client, 2, "free")
        insert(client, 3, "full")
        assert read_column(client, "full") == [[3]]
        insert(client, 4, "full")
        with soon(lambda: insert(client, 5, "full"), after_s=0):
            eventually(lambda: inserts_wait(client))
            server.process.kill()
            server.process.restart()
        assert read_column(client, "full") == [[5]]


def inserts_wait(client: rw.Client) -> bool:
    return client.server_info()["full"].worker_time_ms["waiting_for_sampling"] > 0


def test_insert_under_way_when_the_client_is_closed_says_so(serve: Serve) -> None:
    client = serve(rw.TableConfig.queue("full", 1))
    insert(client, 0, "full")
    with ThreadPoolExecutor(1) as threads:
        blocked = threads.submit(insert, client, 1, "full")
        eventually(lambda: inserts_wait(client))
        client.close()
        with pytest.raises(rw.errors.ClosedError):
            blocked.result()


@client_by_socket
def test_inserts_take_two_calls_together_and_an_observer_asks_once_and_its_stream_once_more(
    replay_server: StartServer,
) -> None:
    server = replay_server(rw.TableConfig("a"))
    with CallForwarder(server.port) as forwarder, rw.Client(forwarder.address) as client:
        client.server_info()  # a client that connects may ask twice
        del forwarder.calls[:]
        for number in range(3):
            insert(client, number, "a")
        assert forwarder.verbs == ["ServerInfo", "InsertStream"]
        del forwarder.calls[:]
        with rw.TrajectoryObserver(client, "a", 1) as observer:
            assert forwarder.verbs == ["ServerInfo"]
            observer({"n": np.int64(1)}, end_of_episode=True)
            observer.flush()
        # A question for checkpoints that have the confirmed item may follow.
        assert forwarder.verbs[:3] == ["ServerInfo", "ServerInfo", "InsertStream"]


@client_by_socket
def test_insert_after_a_restart_knows_the_tables_of_the_new_server() -> None:
    with rw.LocalServer([fifo("a")]) as server, rw.Client(server.address) as client:
        insert(client, 1, "a")
        port = server.port
        server.close()
        with rw.LocalServer([fifo("b")], port):
            with pytest.raises(rw.errors.StructureError, match="`b`"):
                insert(client, 2, "a")
            insert(client, 3, "b")
            assert client.server_info()["b"].current_size == 1


@pytest.fixture
def slow(replay_server: StartServer) -> Iterator[CallForwarder]:
    server = replay_server(fifo("a"), rw.TableConfig("weights", 1), rw.TableConfig("replay"))
    with CallForwarder(server.port) as forwarder:
        yield forwarder


CALLS: dict[str, Callable[[rw.Client], object]] = {
    "insert": lambda client: client.insert(np.zeros(1), {"a": 1.0}),  # the first one; others have a stream
    "sample": lambda client: list(client.sample("a", timeout_s=LONG_S)),
    "latest": lambda client: rw.Variables(client, "weights").latest(),
}


@client_by_socket
@pytest.mark.parametrize("call", CALLS)
def test_what_a_call_asks_for_in_turn_has_one_deadline(slow: CallForwarder, call: str) -> None:
    with rw.Client(slow.address) as other:
        insert(other, 1, "a")
        rw.Variables(other, "weights").publish([np.zeros(1)])
    with rw.Client(slow.address, timeout_s=LONG_S) as client:
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


def test_time_out_is_told_by_one_traceback(serve: Serve) -> None:
    client = serve(rw.TableConfig.queue("full", 1))
    with pytest.raises(rw.errors.ReplayTimeoutError) as sampling:
        list(client.sample("full", timeout_s=0.5))
    insert(client, 0, "full")
    with pytest.raises(rw.errors.ReplayTimeoutError) as inserting:
        insert(client, 1, "full", 0.5)
    for caught in (sampling, inserting):
        assert "".join(traceback.format_exception(caught.value)).count("Traceback") == 1


@contents
@pytest.mark.slow
@pytest.mark.parametrize("num_servers", [1, 2])
def test_time_between_two_samples_is_not_the_servers(replay_server: StartServer, num_servers: int) -> None:
    servers = [replay_server(rw.TableConfig("a")) for _ in range(num_servers)]
    with rw.Client([server.address for server in servers], timeout_s=5.0) as client:
        for number in range(num_servers):
            insert(client, number, "a", LONG_S)
        samples = client.sample("a", 5000)  # more than are requested at once
        time.sleep(5.5)
        next(samples)
        time.sleep(5.5)
        assert len(list(samples)) == 4999


MANY = 20
NOISE = np.random.default_rng(0).integers(256, size=1 << 20, dtype=np.uint8)


@pytest.fixture
def forwarder(replay_server: StartServer) -> Iterator[Forwarder]:
    server = replay_server(fifo("free"), rw.TableConfig.queue("full", 1), rw.TableConfig("weights", 1))
    with Forwarder(server.port) as forwarder:
        yield forwarder


def test_observers_and_clients_share_a_connection_and_cost_three_threads_each(forwarder: Forwarder) -> None:
    with rw.Client(forwarder.address) as client, contextlib.ExitStack() as stack:
        for number in range(MANY + 1):
            # With kept items, an observer asks the server about its saves, which a thread of a server here answers.
            observer = stack.enter_context(rw.TrajectoryObserver(forwarder.address, "free", 1, max_kept_bytes=0))
            observer({"n": np.int64(number)})
            observer.flush()
            if number == 0:
                before = threading.active_count()
        assert forwarder.accepted == 1
        # There are also threads that carry out the calls of all. They end when they are idle.
        eventually(lambda: threading.active_count() - before <= 3 * MANY)
        assert sorted(read_column(client, "free")) == [[number] for number in range(MANY + 1)]


def test_others_go_on_when_one_is_closed_or_forgotten_and_the_last_disconnects(forwarder: Forwarder) -> None:
    for accepted in (1, 2):
        closed, forgotten, kept = (rw.TrajectoryObserver(forwarder.address, "free", 1) for _ in range(3))
        closed.close()
        closed.close()
        del forgotten
        gc.collect()
        kept({"n": np.int64(1)})
        kept.close()
        assert forwarder.accepted == accepted
        eventually(lambda: not forwarder.is_connected)
    with rw.Client(forwarder.address) as client:
        assert read_column(client, "free") == [[1]] * 2


def test_observer_that_is_forgotten_before_its_first_step_closes_its_own_client(forwarder: Forwarder) -> None:
    observer = rw.TrajectoryObserver(forwarder.address, "free", 1, spec={"n": np.int64(0)})
    assert forwarder.is_connected
    gc.disable()  # the collector would close it, some time later
    try:
        del observer
        eventually(lambda: not forwarder.is_connected)
    finally:
        gc.enable()


def test_who_has_closed_may_not_use_what_others_hold_open(forwarder: Forwarder) -> None:
    with rw.Variables(forwarder.address, "weights") as learner:
        actor = rw.Variables(forwarder.address, "weights")
        actor.close()
        calls: list[Callable[[], object]] = [actor.latest, actor.poll, lambda: actor.publish([np.zeros(1)])]
        for call in calls:
            with pytest.raises(rw.errors.ClosedError, match=r"is closed. Make a new one"):
                call()
        learner.publish([np.zeros(1)])


def test_stream_that_is_blocked_by_megabytes_blocks_no_other(forwarder: Forwarder) -> None:
    blocked = rw.TrajectoryObserver(forwarder.address, "full", 1, chunk_length=1, max_in_flight_bytes=64 << 20)
    with rw.TrajectoryObserver(forwarder.address, "free", 1, chunk_length=1) as free:
        for _ in range(32):
            blocked({"frame": NOISE})
        eventually(lambda: blocked.stats().acknowledged_items == 1)
        for _ in range(8):
            free({"frame": NOISE})
            free.flush()
        assert free.stats().acknowledged_items == 8
        assert blocked.stats().acknowledged_items == 1
        with pytest.raises(rw.errors.ReplayTimeoutError):
            blocked.close(timeout_s=0.5)


def test_many_threads_come_and_go(forwarder: Forwarder) -> None:
    def come_and_go() -> None:
        for _ in range(50):
            client, owned = as_client(forwarder.address)
            assert owned
            client.server_info()
            client.close()

    at_once(*[come_and_go] * 8)


def num_sockets() -> int:
    """Return how many sockets are open; gRPC keeps other files for up to a minute after its last channel."""
    count = 0
    for path in pathlib.Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            count += path.readlink().name.startswith("socket:")
    return count


def test_closed_observers_leave_no_thread_and_no_file(replay_server: StartServer) -> None:
    server = replay_server(fifo("replay"))

    def cycle() -> None:
        with rw.TrajectoryObserver(server.address, "replay", 1) as observer, rw.Client(server.address) as client:
            observer({"n": np.int64(0)}, end_of_episode=True)
            observer.flush()
            client.insert(np.zeros((1, 1)), {"replay": 1.0})
            assert len(list(client.sample("replay", 2))) == 2

    cycle()
    eventually(lambda: not our_threads())
    sockets, threads = num_sockets(), threading.active_count()
    for _ in range(30):
        cycle()
    eventually(lambda: not our_threads())
    eventually(lambda: threading.active_count() <= threads)
    eventually(lambda: num_sockets() <= sockets)


def test_observers_that_are_closed_without_a_server_leave_nothing_either(lone_server: StartServer) -> None:
    server = lone_server(fifo("replay"))
    with rw.Client(server.address) as client:
        client.server_info()  # the process's loop lasts
    sockets = num_sockets()
    observers = [rw.TrajectoryObserver(server.address, "replay", 1, max_delay_s=0.05) for _ in range(5)]
    for observer in observers:
        observer({"n": np.int64(0)}, end_of_episode=True)
        observer.flush()
    server.process.kill()
    for observer in observers:
        observer({"n": np.int64(1)}, end_of_episode=True)
        with pytest.raises(rw.errors.ServerUnavailableError):
            observer.close(timeout_s=0.5)
    eventually(lambda: not our_threads())
    eventually(lambda: num_sockets() <= sockets)
