"""A rate limiter that lets nothing in: how far an actor runs ahead, who waits, what is said, what becomes of the steps.

`max_in_flight_items` bounds the items that are complete and unconfirmed, to the item. One call is never split, so the
bound may be exceeded by the items that one call completes, minus one.
"""

from __future__ import annotations

import contextlib
import logging
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import pytest
from kinds import contents
from numbered import write_numbers
from reading import Serve
from server_process import HostedServer, StartServer
from threads import soon
from waiting import eventually

import reverb_writer as rw

ADMITTED = 10  # items that each queue of `server` takes
LONG_S = 60.0  # a time-out that no test reaches
FAR_TOO_LONG_S = 30.0
NEVER_S = 10_000.0
PATIENCE_S = 5.0
PACE_S = 0.05
WAITING = 130  # items that a slow learner takes longer for than PATIENCE_S, however fast the machine is
REFUSED_S = 0.2  # for a refusal; who writes goes on until the server has confirmed what it takes
CONFIRMED_S = 1.5  # for the first refusal: longer than the server needs to confirm the first items


@pytest.fixture
def server(replay_server: StartServer) -> HostedServer:
    return replay_server(*(rw.TableConfig.queue(name, ADMITTED) for name in ("queue", "other")))


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
def leaving(observer: Any) -> Iterator[Any]:
    """Close the observer at the end; undelivered items do not matter."""
    try:
        yield observer
    finally:
        with contextlib.suppress(rw.errors.ReverbWriterError):
            observer.close(timeout_s=0.1)


def observed(
    server: HostedServer, length: int = 1, **options: Any
) -> contextlib.AbstractContextManager[rw.TrajectoryObserver]:
    """Observe windows of so many steps, at most 100 in flight."""
    options = {"max_in_flight_items": 100, "max_delay_s": 0.05, **options}
    return leaving(rw.TrajectoryObserver(server.address, "queue", length, **options))


def write(observer: Any, number: int) -> None:
    observer({"n": np.int64(number)}, end_of_episode=False)


def write_until_refused(observer: Any, first: int = 0) -> tuple[int, rw.errors.ReplayTimeoutError, float]:
    """Write steps until one is refused; return its number, the error, and how long that took."""
    for number in range(first, 1_000_000):
        begin = time.monotonic()
        try:
            write(observer, number)
        except rw.errors.ReplayTimeoutError as error:
            return number, error, time.monotonic() - begin
    pytest.fail("nothing blocked")


def write_until_full(
    observer: Any, limit: int, *, episode_length: Any = NEVER_S, admitted: int = ADMITTED, is_masked: bool = False
) -> rw.ObserverStats:
    """Write steps in a tight loop until one is refused at the limit; return the counters.

    Earlier refusals are of steps for which a busy machine has not made room in time: before `admitted` items were
    confirmed, or soon after.
    """
    shape = () if observer.num_envs is None else (observer.num_envs,)
    number, confirmed, give_up_at = 0, 0, time.monotonic() + LONG_S
    chance = np.random.default_rng(0)
    while number < 100_000:
        mask = {"env_mask": chance.random(shape) < 0.5} if is_masked else {}
        try:
            ends = np.broadcast_to((number + 1) % episode_length == 0, shape)
            observer({"n": np.full(shape, number)}, end_of_episode=ends, **mask)
            number += 1
        except rw.errors.ReplayTimeoutError:
            stats: rw.ObserverStats = observer.stats()
            assert is_masked or stats.steps == number * (observer.num_envs or 1)  # no call was split
            if (confirmed >= admitted and stats.pending_items >= limit) or time.monotonic() > give_up_at:
                return stats
            confirmed = stats.acknowledged_items
    raise AssertionError


def check_pending(stats: rw.ObserverStats, limit: int, *, per_call: int = 1, admitted: int = ADMITTED) -> None:
    """Check that the last call was admitted with fewer items than the limit, and that the next one was refused."""
    assert stats.acknowledged_items == admitted
    assert limit <= stats.pending_items <= limit + per_call - 1
    assert stats.items == stats.acknowledged_items + stats.pending_items
    assert stats.dropped_items == 0


def take(server: HostedServer, count: int) -> list[int]:
    """Take so many items out of the queue, as they come."""
    with rw.Client(server.address) as client:
        return [int(sample.data["n"][0]) for sample in client.sample("queue", count)]


def limiter_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    infos = (record.getMessage() for record in caplog.records if record.levelno == logging.INFO)
    return [line for line in infos if "rate limiter" in line]


# Who waits, and what is said.


@pytest.mark.parametrize("on_block", ["wait", "raise"])
def test_refused_step_says_why_and_has_changed_nothing(
    server: HostedServer, caplog: pytest.LogCaptureFixture, on_block: str
) -> None:
    caplog.set_level(logging.INFO, "reverb_writer")
    waits = on_block == "wait"
    with observed(server, timeout_s=3 if waits else LONG_S, on_block=on_block) as observer:
        refused, error, waited_s = write_until_refused(observer)
        assert waited_s < FAR_TOO_LONG_S
        assert "table `queue`" in str(error)
        if not waits:  # it was refused at once: the queue may take more
            eventually(lambda: observer.stats().acknowledged_items == ADMITTED, "the queue is full")
            refused, error, _ = write_until_refused(observer, refused)
        assert refused == ADMITTED + 100  # to the item: those that the queue holds, and those in flight
        stats = observer.stats()
        assert (stats.steps, stats.items, stats.dropped_items) == (refused, refused, 0)
        assert (stats.acknowledged_items, stats.pending_items) == (ADMITTED, 100)
        if waits:
            for part in (
                "items unconfirmed after ",  # more than 3.0 s, if the first are confirmed after the wait has begun
                "samples = 10, max_diff 10",
                "nothing has sampled",
            ):
                assert part in str(error)
            assert stats.blocked_s > 1
        with pytest.raises(rw.errors.ReplayTimeoutError):
            write(observer, refused)
        if waits:  # the first wait is logged, and no other
            (line,) = limiter_lines(caplog)
            for part in ("rate limiter of table `queue` blocks inserts", "samples = 10, max_diff 10", server.address):
                assert part in line
        assert take(server, refused - 10) == list(range(refused - 10))
        if not waits:
            observer.flush(timeout_s=LONG_S)
        write(observer, refused)
        assert take(server, 11) == list(range(refused - 10, refused + 1))
        observer.flush()
        assert observer.stats().acknowledged_items == refused + 1


def test_step_with_until_outlasts_a_rate_limiter_but_no_silent_server(
    lone_server: StartServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = lone_server(rw.TableConfig.queue("queue", ADMITTED))
    monkeypatch.setattr("reverb_writer.background.LOG_EVERY_S", 1.0)
    ended = threading.Event()
    with observed(server, timeout_s=2.0, until=ended.is_set) as observer:
        with soon(lambda: take(server, 10), after_s=9.0):  # the learner pauses for several time-outs
            write_numbers(observer, range(ADMITTED + 101))
        lines = [line for line in caplog.messages if "writing has waited" in line]
        assert 2 <= len(lines) <= 4  # after 1 s, 3 s and 7 s
        assert "samples = 10, max_diff 10" in lines[0]
        assert "until the run has ended" in lines[0]
        with pytest.raises(rw.errors.FinishedError), soon(ended.set, after_s=5.0):
            write_numbers(observer, range(1_000))
        ended.clear()
        server.process.pause()
        try:
            with pytest.raises(rw.errors.ReplayTimeoutError, match="does not answer"):
                write_numbers(observer, range(1_000))
        finally:
            server.process.resume()
    with observed(server, timeout_s=1.0) as observer, pytest.raises(rw.errors.ReplayTimeoutError, match="With `until`"):
        write_numbers(observer, range(1_000))


def test_waiting_step_goes_on_as_soon_as_there_is_room(server: HostedServer) -> None:
    with observed(server, timeout_s=LONG_S) as observer:
        with soon(lambda: take(server, 990)):
            write_numbers(observer, range(1000))
        observer.flush()
    assert take(server, 10) == list(range(990, 1000))


@pytest.mark.slow
@contents
def test_step_waits_longer_than_its_time_out_while_its_items_are_confirmed(server: HostedServer) -> None:
    options: Any = {"num_envs": WAITING, "timeout_s": PATIENCE_S, "max_in_flight_items": 1}
    with leaving(rw.TrajectoryObserver(server.address, "queue", 1, **options)) as observer:
        going_on = np.zeros(WAITING, bool)
        observer({"n": np.arange(WAITING)}, end_of_episode=going_on)  # one call is never split
        with pytest.raises(rw.errors.ReplayTimeoutError):  # sends them all
            observer.flush(timeout_s=0.1)
        eventually(lambda: observer.stats().acknowledged_items == ADMITTED, "the queue is full")
        with slow_learner(server) as taken:
            eventually(lambda: taken, "the learner learns")
            observer({"n": np.arange(WAITING, 2 * WAITING)}, end_of_episode=going_on)
            with contextlib.suppress(rw.errors.ReverbWriterError):  # undelivered items do not matter
                observer.close(timeout_s=0.1)
        assert taken == list(range(len(taken)))
        assert len(taken) >= WAITING - ADMITTED


@pytest.mark.slow
@contents
def test_step_waits_longer_than_its_time_out_while_items_of_others_are_before_its_own(server: HostedServer) -> None:
    with observed(server, chunk_length=WAITING, max_in_flight_items=WAITING + 1) as before:
        before.extend({"n": np.arange(WAITING)})
        eventually(lambda: before.stats().acknowledged_items == ADMITTED, "the queue is full")
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


def test_blocked_table_is_the_one_that_is_named(serve: Serve) -> None:
    client = serve(rw.TableConfig("free"), rw.TableConfig.queue("queue", 10))
    with rw.TrajectoryObserver(client, ["free", "queue"], 1, max_delay_s=0.05) as observer:
        for number in range(12):
            write(observer, number)
        eventually(lambda: observer.stats().acknowledged_items >= 20, "the queue is full")
        for wrong in (0, -1, float("nan"), "soon"):
            for call in (observer.flush, observer.close):
                with pytest.raises(rw.errors.SpecError, match="`timeout_s` must be > 0 seconds"):
                    call(wrong)

        def is_named() -> bool:
            """The server may need more than a second to answer which limiter blocks."""
            with pytest.raises(rw.errors.ReplayTimeoutError) as late:
                observer.flush(timeout_s=1)
            return (
                re.search(r"The rate limiter of table `queue` blocks inserts.*max_diff 10", str(late.value)) is not None
            )

        eventually(is_named, "the full table is named")
        assert [int(sample.data["n"][0]) for sample in client.sample("queue", 12)] == list(range(12))


@pytest.mark.parametrize("call", ["flush", "step"])
def test_wait_in_one_thread_ends_when_another_closes(server: HostedServer, call: str) -> None:
    observer = rw.TrajectoryObserver(server.address, "queue", 1, timeout_s=LONG_S, max_in_flight_items=10)

    for number in range(20):
        observer({"n": np.int64(number)}, end_of_episode=True)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(write, observer, 20) if call == "step" else threads.submit(observer.flush)
        time.sleep(0.3)
        with pytest.raises(rw.errors.ReplayTimeoutError):
            observer.close(0.1)
        with pytest.raises(rw.errors.ClosedError, match="closed by another thread"):
            waiting.result(FAR_TOO_LONG_S)
    assert observer.stats().steps == 20


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


def test_acting_and_learning_in_turns_does_not_wait_for_the_timer(server: HostedServer) -> None:
    with (
        rw.TrajectoryObserver(server.address, "queue", 2, chunk_length=100, max_delay_s=NEVER_S) as observer,
        rw.ReplayDataset(server.address, "queue", 4, timeout_s=LONG_S) as dataset,
    ):
        for number in range(5):
            write(observer, number)
        for number in range(5, 45, 4):
            assert next(dataset).data["n"].tolist() == [[n - 5, n - 4] for n in range(number, number + 4)]
            for step in range(number, number + 4):
                write(observer, step)


# How far an actor runs ahead.


class Case(NamedTuple):
    """How an observer is made, and what one call may complete."""

    options: dict[str, Any]
    kind: Any = rw.TrajectoryObserver
    episode_length: Any = NEVER_S
    per_call: int = 1
    tables: Any = "queue"
    is_masked: bool = False


def windows(length: int, stride: int = 1, **options: Any) -> dict[str, Any]:
    return {"sequence_length": length, "stride_length": stride, **options}


CASES = {
    "steps": Case(windows(1)),
    "windows": Case(windows(6, 4)),
    "windows across episodes": Case(windows(4, 2), rw.SequenceObserver, 7),
    "episodes": Case({"max_sequence_length": 10}, rw.EpisodeObserver, 3),
    "short episodes that tile": Case(windows(4, end_of_episode="tile"), episode_length=2, per_call=2),
    "long episodes that tile": Case(windows(4, end_of_episode="tile"), episode_length=9, per_call=4),
    "an item of each table": Case(windows(2), per_call=2, tables=["queue", "other"]),
    "one environment": Case(windows(1, num_envs=1)),
    "windows of one environment": Case(windows(5, 3, num_envs=1)),
    "four environments": Case(windows(5, num_envs=4), per_call=4),
    "environments whose episodes end at different calls": Case(
        windows(4, 2, num_envs=4, end_of_episode="tile"), episode_length=np.array([3, 7, 8, 30]), per_call=2 * 4
    ),
    "environments of which some have a step": Case(windows(2, num_envs=4), per_call=4, is_masked=True),
}


@contents
@pytest.mark.parametrize("limit", [1, 20])  # the default of 400 has tests of its own
@pytest.mark.parametrize("name", CASES)
def test_tight_loop_is_stopped_at_the_limit(server: HostedServer, name: str, limit: int) -> None:
    case = CASES[name]
    admitted = ADMITTED * (1 if case.tables == "queue" else 2)
    options: Any = {**case.options, "max_in_flight_items": limit, "timeout_s": REFUSED_S}
    # The client's time-out is the one for opening.
    with rw.Client(server.address) as client, leaving(case.kind(client, case.tables, **options)) as observer:
        stats = write_until_full(
            observer, limit, episode_length=case.episode_length, admitted=admitted, is_masked=case.is_masked
        )
        check_pending(stats, limit, per_call=case.per_call, admitted=admitted)
        if name in ("steps", "windows"):  # up to the step that completes the last window
            length, stride = case.options["sequence_length"], case.options["stride_length"]
            assert stats.steps == length + (ADMITTED + limit - 1) * stride
        if name == "episodes":
            assert stats.episodes == ADMITTED + limit


@contents
@pytest.mark.parametrize("limit", [1, 400])
def test_extend_is_as_many_calls(server: HostedServer, limit: int) -> None:
    with observed(server, length=3, max_in_flight_items=limit, timeout_s=CONFIRMED_S) as observer:
        with pytest.raises(rw.errors.ReplayTimeoutError):
            observer.extend({"n": np.arange(5_000)})
        stats = observer.stats()
        check_pending(stats, limit)
        assert stats.steps == 3 + ADMITTED + limit - 1


@contents
def test_actor_without_a_learner_stops_soon_by_default_and_is_told_the_ratio(serve: Serve) -> None:
    limiter = rw.SampleToInsertRatio(samples_per_insert=8, min_size=100, error_buffer=200)  # admits (800 + 200) / 8
    client = serve(rw.TableConfig("replay", 10_000, rate_limiter=limiter))
    with leaving(rw.TrajectoryObserver(client, "replay", 2, timeout_s=REFUSED_S)) as observer:
        stats = write_until_full(observer, 400, admitted=125)
        check_pending(stats, 400, admitted=125)
        assert stats.steps == 125 + 400 + 1  # the first window takes two steps
        assert client.server_info()["replay"].rate_limiter.num_inserts == 125
        told = r"inserts x 8 - samples = 1000, max_diff 1000, and nothing has sampled for"
        with pytest.raises(rw.errors.ReplayTimeoutError, match=told):
            observer.flush(timeout_s=3)


@contents
def test_default_is_32_calls_of_many_environments(server: HostedServer) -> None:
    observer = rw.TrajectoryObserver(server.address, "queue", 1, num_envs=64, timeout_s=CONFIRMED_S)
    with leaving(observer):
        check_pending(write_until_full(observer, 32 * 64), 32 * 64, per_call=64)


@contents
@pytest.mark.parametrize("num_envs", [None, 3])
def test_complete_items_are_sent_before_a_step_waits_and_no_rate_limiter_is_named(
    serve: Serve, caplog: pytest.LogCaptureFixture, num_envs: int | None
) -> None:
    caplog.set_level(logging.INFO, "reverb_writer")
    client, shape = serve(rw.TableConfig("replay", 10_000)), () if num_envs is None else (num_envs,)
    options: Any = {"max_in_flight_items": 5, "max_delay_s": NEVER_S, "chunk_length": 1_000, "timeout_s": LONG_S}
    with leaving(rw.TrajectoryObserver(client, "replay", 2, num_envs=num_envs, **options)) as observer:
        for number in range(200):
            observer({"n": np.full(shape, number)}, end_of_episode=np.zeros(shape, bool))
        assert observer.stats().acknowledged_items >= (199 * (num_envs or 1)) - 5 - (num_envs or 1)
    assert not limiter_lines(caplog)
