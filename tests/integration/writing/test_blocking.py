"""A rate limiter that lets nothing in: who waits for how long, what is said, and what becomes of the steps."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from kinds import client_alone
from server_process import HostedServer
from waiting import eventually

import reverb_writer as rw

LONG_S = 60.0  # a time-out that no test reaches
FAR_TOO_LONG_S = 30.0
PATIENCE_S = 5.0
PACE_S = 0.05
WAITING = 130  # items that a slow learner takes longer for than PATIENCE_S, however fast the machine is


@pytest.fixture
def server(replay_server: Callable[..., HostedServer]) -> HostedServer:
    return replay_server(rw.TableConfig.queue("queue", 10))


@contextlib.contextmanager
def slow_learner(server: HostedServer) -> Iterator[list[int]]:
    """Take an item out of the queue every `PACE_S` seconds; give what was taken so far."""
    taken: list[int] = []
    enough = threading.Event()

    def learn() -> None:
        with rw.Client(server.address) as client:
            while not enough.wait(PACE_S):
                taken.extend(int(sample.data["n"][0]) for sample in client.sample("queue", 1))

    learner = threading.Thread(target=learn)
    learner.start()
    try:
        yield taken
    finally:
        enough.set()
        learner.join()


@contextlib.contextmanager
def observed(server: HostedServer, **options: Any) -> Iterator[rw.TrajectoryObserver]:
    """Observe single steps, at most 100 in flight; what cannot be delivered in the end does not matter."""
    observer = rw.TrajectoryObserver(
        server.address, "queue", 1, **{"max_in_flight_items": 100, "max_delay_s": 0.05, **options}
    )
    try:
        yield observer
    finally:
        with contextlib.suppress(rw.errors.ReverbWriterError):
            observer.close(timeout_s=0.1)


def write(observer: rw.TrajectoryObserver, number: int) -> None:
    observer({"n": np.int64(number)}, end_of_episode=False)


def write_until_refused(observer: rw.TrajectoryObserver) -> tuple[int, rw.errors.ReplayTimeoutError, float]:
    """Write steps 0, 1, 2 ... until one is refused; return its number, the error, and how long that took."""
    for number in range(1_000_000):
        begin = time.monotonic()
        try:
            write(observer, number)
        except rw.errors.ReplayTimeoutError as error:
            return number, error, time.monotonic() - begin
    pytest.fail("nothing blocked")


def take(server: HostedServer, count: int) -> list[int]:
    """Take so many items out of the queue, as they come."""
    with rw.Client(server.address) as client:
        return [int(sample.data["n"][0]) for sample in client.sample("queue", count)]


def test_full_window_makes_a_step_wait_and_then_says_why(server: HostedServer) -> None:
    with observed(server, timeout_s=3) as observer:
        refused, error, waited_s = write_until_refused(observer)
        assert waited_s < FAR_TOO_LONG_S
        assert refused == 10 + 100  # to the item: those that the queue holds, and those in flight
        for part in (
            "table `queue`",
            "items unconfirmed after ",  # more than 3.0 s, if the first items are confirmed after the wait has begun
            "samples = 10, max_diff 10",
            "nothing has sampled",
        ):
            assert part in str(error)
        stats = observer.stats()
        assert (stats.steps, stats.items, stats.dropped_items) == (refused, refused, 0)
        assert stats.acknowledged_items == 10
        assert stats.pending_items == 100
        assert stats.blocked_s > 1


def test_refused_step_has_changed_nothing(server: HostedServer) -> None:
    with observed(server, timeout_s=0.5) as observer:
        refused, _, _ = write_until_refused(observer)
        with pytest.raises(rw.errors.ReplayTimeoutError):
            write(observer, refused)
        assert take(server, refused - 10) == list(range(refused - 10))
        write(observer, refused)
        assert take(server, 11) == list(range(refused - 10, refused + 1))
        observer.flush()
        assert observer.stats().acknowledged_items == refused + 1


def test_waiting_step_goes_on_as_soon_as_there_is_room(server: HostedServer) -> None:
    with observed(server, timeout_s=LONG_S) as observer:
        learner = threading.Timer(0.3, take, args=[server, 990])
        learner.start()
        for number in range(1000):
            write(observer, number)
        learner.join()
        observer.flush()
    assert take(server, 10) == list(range(990, 1000))


@pytest.mark.slow
def test_step_waits_longer_than_its_time_out_while_its_items_are_confirmed(server: HostedServer) -> None:
    options: Any = {"num_envs": WAITING, "timeout_s": PATIENCE_S, "max_in_flight_items": 1}
    with rw.TrajectoryObserver(server.address, "queue", 1, **options) as observer:
        going_on = np.zeros(WAITING, bool)
        observer({"n": np.arange(WAITING)}, end_of_episode=going_on)  # one call is never split
        with pytest.raises(rw.errors.ReplayTimeoutError):  # sends them all
            observer.flush(timeout_s=0.1)
        eventually(lambda: observer.stats().acknowledged_items == 10, "the queue is full")
        with slow_learner(server) as taken:
            eventually(lambda: taken, "the learner learns")
            observer({"n": np.arange(WAITING, 2 * WAITING)}, end_of_episode=going_on)
            with contextlib.suppress(rw.errors.ReverbWriterError):  # undelivered items do not matter
                observer.close(timeout_s=0.1)
        assert taken == list(range(len(taken)))
        assert len(taken) >= WAITING - 10


@pytest.mark.slow
def test_step_waits_longer_than_its_time_out_while_items_of_others_are_before_its_own(server: HostedServer) -> None:
    with observed(server, chunk_length=WAITING, max_in_flight_items=WAITING + 1) as before:
        before.extend({"n": np.arange(WAITING)})
        eventually(lambda: before.stats().acknowledged_items == 10, "the queue is full")
        with observed(server, timeout_s=PATIENCE_S, max_in_flight_items=1) as observer:
            observer({"n": np.int64(WAITING)}, end_of_episode=True)
            with slow_learner(server) as taken:
                eventually(lambda: taken, "the learner learns")
                observer({"n": np.int64(WAITING + 1)}, end_of_episode=True)
                observer.flush()
            assert before.stats().acknowledged_items == WAITING
            assert taken == list(range(len(taken)))


def test_time_out_of_a_flush_is_kept_although_items_are_confirmed(server: HostedServer) -> None:
    with observed(server, timeout_s=LONG_S, max_in_flight_items=WAITING) as observer:
        for number in range(WAITING):
            write(observer, number)
        with slow_learner(server) as taken:
            eventually(lambda: taken, "the learner learns")
            with pytest.raises(rw.errors.ReplayTimeoutError, match=r"it let \d+ in during the last"):
                observer.flush(timeout_s=2.5)


def test_flush_says_why_it_did_not_come_to_an_end(server: HostedServer) -> None:
    with observed(server, timeout_s=LONG_S) as observer:
        for number in range(15):
            write(observer, number)
        eventually(lambda: observer.stats().acknowledged_items == 10, "the queue is full")
        with pytest.raises(rw.errors.ReplayTimeoutError, match=r"5 items unconfirmed after 1\.5 s.*max_diff 10"):
            observer.flush(timeout_s=1.5)
        assert take(server, 15) == list(range(15))
        observer.flush()


def test_ratio_without_a_learner_is_named_with_its_numbers(replay_server: Callable[..., HostedServer]) -> None:
    # From 20 items on, each lets 8 samples be taken, and the balance may be 160 + 80: 30 items, 8 x 30 = 240.
    limiter = rw.SampleToInsertRatio(samples_per_insert=8, min_size=20, error_buffer=80)
    server = replay_server(rw.TableConfig("queue", 1000, rate_limiter=limiter))
    with observed(server, timeout_s=3) as observer:
        _, error, _ = write_until_refused(observer)
        assert "inserts x 8 - samples = 240, max_diff 240, and nothing has sampled for" in str(error)
        assert observer.stats().acknowledged_items == 30


def test_raise_refuses_a_step_at_once(server: HostedServer) -> None:
    with observed(server, timeout_s=LONG_S, on_block="raise") as observer:
        refused, error, waited_s = write_until_refused(observer)
        assert waited_s < FAR_TOO_LONG_S
        assert "table `queue`" in str(error)
        assert observer.stats().steps == refused
        assert take(server, refused - 10) == list(range(refused - 10))
        observer.flush(timeout_s=60)
        write(observer, refused)
        assert take(server, 11) == list(range(refused - 10, refused + 1))


def test_drop_oldest_never_waits_and_delivers_the_newest(server: HostedServer) -> None:
    with observed(server, timeout_s=LONG_S, on_block="drop_oldest") as observer:
        for number in range(10):
            write(observer, number)
        eventually(lambda: observer.stats().acknowledged_items == 10, "the queue is full")
        for number in range(10, 5000):
            write(observer, number)
            if number % 50 == 0:
                time.sleep(0.001)
        with pytest.raises(rw.errors.ReplayTimeoutError):
            observer.flush(timeout_s=0.5)
        stats = observer.stats()
        assert stats.items == 5000 == stats.acknowledged_items + stats.pending_items + stats.dropped_items
        assert stats.acknowledged_items == 10
        assert stats.blocked_s < FAR_TOO_LONG_S
        delivered = take(server, 5000 - stats.dropped_items)
        observer.flush()
        assert observer.stats().dropped_items == stats.dropped_items
    assert delivered == sorted(set(delivered))
    assert delivered[:10] == list(range(10))
    assert delivered[-10:] == list(range(4990, 5000))


def test_blocked_table_is_the_one_that_is_named(replay_server: Callable[..., HostedServer]) -> None:
    server = replay_server(rw.TableConfig("free"), rw.TableConfig.queue("queue", 10))
    windows: dict[str, Any] = {"free": rw.WindowSpec(1), "queue": rw.WindowSpec(1)}
    with rw.TrajectoryObserver(server.address, windows=windows, max_delay_s=0.05) as observer:
        for number in range(12):
            write(observer, number)
        eventually(lambda: observer.stats().acknowledged_items >= 20, "the queue is full")
        with pytest.raises(rw.errors.ReplayTimeoutError, match="The rate limiter of table `queue` blocks inserts"):
            observer.flush(timeout_s=1)
        assert take(server, 12) == list(range(12))


@pytest.mark.parametrize("call", ["flush", "step"])
def test_wait_in_one_thread_ends_when_another_closes(server: HostedServer, call: str) -> None:
    errors: list[Exception] = []
    observer = rw.TrajectoryObserver(server.address, "queue", 1, timeout_s=LONG_S, max_in_flight_items=10)

    def wait() -> None:
        try:
            if call == "step":
                write(observer, 20)
            else:
                observer.flush()
        except rw.errors.ClosedError as error:
            errors.append(error)

    for number in range(20):
        observer({"n": np.int64(number)}, end_of_episode=True)
    waiting = threading.Thread(target=wait)
    waiting.start()
    time.sleep(0.3)
    with pytest.raises(rw.errors.ReplayTimeoutError):
        observer.close(0.1)
    waiting.join(FAR_TOO_LONG_S)
    assert not waiting.is_alive()
    assert "closed by another thread" in str(errors)
    assert observer.stats().steps == 20


@client_alone
@pytest.mark.parametrize("timeout_s", [0, -1, float("nan"), "soon"])
def test_time_out_that_is_none_is_refused(server: HostedServer, timeout_s: Any) -> None:
    with observed(server) as observer:
        with pytest.raises(rw.errors.SpecError, match="`timeout_s` must be > 0 seconds"):
            observer.flush(timeout_s)
        with pytest.raises(rw.errors.SpecError, match="`timeout_s` must be > 0 seconds"):
            observer.close(timeout_s)
        write(observer, 0)  # it is open still


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_block_that_is_left_by_an_error_does_not_wait_for_a_learner(
    server: HostedServer, error: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    observer = rw.TrajectoryObserver(server.address, "queue", 1, timeout_s=LONG_S)
    began_at = time.monotonic()

    def act() -> None:
        with observer:
            for number in range(50):
                write(observer, number)
            raise error

    with pytest.raises(error):
        act()
    assert time.monotonic() - began_at < LONG_S / 2
    stats = observer.stats()
    assert (stats.items, stats.acknowledged_items, stats.dropped_items, stats.pending_items) == (50, 10, 40, 0)
    assert "could not deliver all items: table `queue`: 40 items unconfirmed" in caplog.text
    with pytest.raises(rw.errors.ClosedError):
        write(observer, 0)


def test_acting_and_learning_in_turns_does_not_wait_for_the_timer(replay_server: Callable[..., HostedServer]) -> None:
    server = replay_server(rw.TableConfig("queue", 10, "fifo", "fifo", rw.Queue(10), max_times_sampled=1))
    with (
        rw.TrajectoryObserver(server.address, "queue", 2, chunk_length=100, max_delay_s=10_000) as observer,
        rw.ReplayDataset(server.address, "queue", 4, timeout_s=LONG_S) as dataset,
    ):
        for number in range(5):
            write(observer, number)
        for number in range(5, 45, 4):
            assert next(dataset).data["n"].tolist() == [[n - 5, n - 4] for n in range(number, number + 4)]
            for step in range(number, number + 4):
                write(observer, step)
