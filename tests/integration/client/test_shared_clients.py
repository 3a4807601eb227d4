"""What is given an address shares one connection with all others that are given it; what is closed leaves nothing."""

from __future__ import annotations

import contextlib
import gc
import pathlib
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from forwarder import Forwarder
from reading import fifo, read_column
from server_process import StartServer
from threads import at_once, our_threads
from waiting import eventually

import reverb_writer as rw
from reverb_writer.client.client import as_client

MANY = 20
NOISE = np.random.default_rng(0).integers(256, size=1 << 20, dtype=np.uint8)


@pytest.fixture
def forwarder(replay_server: StartServer) -> Iterator[Forwarder]:
    server = replay_server(fifo("free"), rw.TableConfig.queue("full", 1), rw.TableConfig("weights", 1))
    with Forwarder(server.port) as forwarder:
        yield forwarder


def test_observers_and_clients_of_an_address_share_a_connection(forwarder: Forwarder) -> None:
    observers = [rw.TrajectoryObserver(forwarder.address, "free", 1) for _ in range(MANY)]
    with rw.Client(forwarder.address) as client:
        for number, observer in enumerate(observers):
            observer({"n": np.int64(number)})
        client.server_info()
        for observer in observers:
            observer.close()
        assert forwarder.accepted == 1
        assert sorted(read_column(client, "free")) == [[number] for number in range(MANY)]


def test_each_further_observer_costs_three_threads_at_most(forwarder: Forwarder) -> None:
    def observe(number: int) -> list[rw.TrajectoryObserver]:
        observers = [rw.TrajectoryObserver(forwarder.address, "free", 1) for _ in range(number)]
        for observer in observers:
            observer({"n": np.int64(0)})
            observer.flush()
        return observers

    first = observe(1)
    before = threading.active_count()
    others = observe(MANY)
    # There are also threads that carry out the calls of all. They end when they are idle.
    eventually(lambda: threading.active_count() - before <= 3 * MANY)
    for observer in (*first, *others):
        observer.close()


def test_the_others_go_on_when_one_is_closed_or_forgotten(forwarder: Forwarder) -> None:
    closed, forgotten, kept = (rw.TrajectoryObserver(forwarder.address, "free", 1) for _ in range(3))
    closed.close()
    closed.close()
    del forgotten
    gc.collect()
    kept({"n": np.int64(1)})
    kept.close()
    with rw.Client(forwarder.address) as client:
        assert read_column(client, "free") == [[1]]


def test_observer_that_is_forgotten_before_its_first_step_closes_its_own_client(forwarder: Forwarder) -> None:
    observer = rw.TrajectoryObserver(forwarder.address, "free", 1, spec={"n": np.int64(0)})
    assert forwarder.is_connected
    gc.disable()  # the collector would close it, some time later
    try:
        del observer
        eventually(lambda: not forwarder.is_connected)
    finally:
        gc.enable()


def test_connection_is_closed_with_its_last_user_and_made_again(forwarder: Forwarder) -> None:
    for number in (1, 2):
        with rw.TrajectoryObserver(forwarder.address, "free", 1) as observer:
            observer({"n": np.int64(0)})
        assert forwarder.accepted == number
        eventually(lambda: not forwarder.is_connected)


def test_who_has_closed_may_not_use_what_others_hold_open(forwarder: Forwarder) -> None:
    with rw.Variables(forwarder.address, "weights") as learner:
        actor = rw.Variables(forwarder.address, "weights")
        actor.close()
        calls: list[Callable[[], object]] = [actor.latest, actor.poll, lambda: actor.publish([np.zeros(1)])]
        for call in calls:
            with pytest.raises(rw.errors.ClosedError, match=r"is closed. Make a new one"):
                call()
        learner.publish([np.zeros(1)])


def test_address_can_be_had_by_the_name_that_reverb_has_for_it() -> None:
    with rw.Client("localhost:1") as client:
        assert client.server_address == client.address == "localhost:1"


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


# What is left: no thread and no socket.


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
