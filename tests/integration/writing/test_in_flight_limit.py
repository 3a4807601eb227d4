"""How far an actor runs ahead: `max_in_flight_items` bounds the items that are complete and unconfirmed, to the item.

One call is never split, so the bound may be exceeded by the items that one call completes, minus one.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
from kinds import contents
from server_process import HostedServer, StartServer
from waiting import eventually

import reverb_writer as rw

pytestmark = contents

ADMITTED = 10  # items that each queue of `server` takes
LIMITS = [1, 20]  # the default of 400 has tests of its own
TIMEOUT_S = 0.2  # for a refusal; who writes goes on until the server has confirmed what it takes
CONFIRMED_S = 1.5  # for the first refusal: longer than the server needs to confirm the first items
LONG_S = 60.0  # a time-out that no test reaches
NEVER_S = 10_000.0


@pytest.fixture
def server(replay_server: StartServer) -> HostedServer:
    return replay_server(*(rw.TableConfig.queue(name, ADMITTED) for name in ("queue", "other")))


@contextlib.contextmanager
def leaving(observer: Any) -> Iterator[Any]:
    """Close the observer at the end; undelivered items do not matter."""
    try:
        yield observer
    finally:
        with contextlib.suppress(rw.errors.ReverbWriterError):
            observer.close(timeout_s=0.1)


def step(number: int) -> dict[str, Any]:
    return {"n": np.int64(number)}


def write_until_refused(observer: Any, *, episode_length: Any = NEVER_S, admitted: int = ADMITTED) -> rw.ObserverStats:
    """Write steps in a tight loop until one is refused after so many items were confirmed; return the counters."""
    shape = () if observer.num_envs is None else (observer.num_envs,)
    number, confirmed, give_up_at = 0, 0, time.monotonic() + LONG_S
    while number < 100_000:
        ends = np.broadcast_to((number + 1) % episode_length == 0, shape)
        try:
            observer({"n": np.full(shape, number)}, end_of_episode=ends)
            number += 1
        except rw.errors.ReplayTimeoutError:
            stats: rw.ObserverStats = observer.stats()
            assert stats.steps == number * (observer.num_envs or 1)  # no call was split
            if confirmed >= admitted or time.monotonic() > give_up_at:
                return stats
            confirmed = stats.acknowledged_items
    raise AssertionError


def check_pending(stats: rw.ObserverStats, limit: int, *, per_call: int = 1, admitted: int = ADMITTED) -> None:
    """Check that the last call was admitted with fewer items than the limit, and that the next one was refused."""
    assert stats.acknowledged_items == admitted
    assert limit <= stats.pending_items <= limit + per_call - 1
    assert stats.items == stats.acknowledged_items + stats.pending_items
    assert stats.dropped_items == 0


# ------------------------------------------------------------------------------------------ one environment


class Case(NamedTuple):
    """How an observer is made, and what one call may complete."""

    options: dict[str, Any]
    kind: Any = rw.TrajectoryObserver
    episode_length: Any = NEVER_S
    per_call: int = 1
    tables: Any = "queue"


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
}


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("name", CASES)
def test_tight_loop_is_stopped_at_the_limit(server: HostedServer, name: str, limit: int) -> None:
    case = CASES[name]
    admitted = ADMITTED * (1 if case.tables == "queue" else 2)
    observer = case.kind(server.address, case.tables, **case.options, max_in_flight_items=limit, timeout_s=TIMEOUT_S)
    with leaving(observer):
        stats = write_until_refused(observer, episode_length=case.episode_length, admitted=admitted)
        check_pending(stats, limit, per_call=case.per_call, admitted=admitted)
        if name in ("steps", "windows"):  # up to the step that completes the last window
            length, stride = case.options["sequence_length"], case.options["stride_length"]
            assert stats.steps == length + (ADMITTED + limit - 1) * stride
        if name == "episodes":
            assert stats.episodes == ADMITTED + limit


@pytest.mark.parametrize("limit", [20, 400])
def test_windows_of_each_kind_count(server: HostedServer, limit: int) -> None:
    windows: Any = {"queue": rw.WindowSpec(2, 1), "other": rw.WindowSpec(5, 3)}
    observer = rw.TrajectoryObserver(
        server.address, windows=windows, max_in_flight_items=limit, timeout_s=CONFIRMED_S, chunk_length=7
    )
    with leaving(observer):
        stats = write_until_refused(observer)
        assert (
            ADMITTED <= stats.acknowledged_items <= 2 * ADMITTED
        )  # Reverb stops a stream at the first table that is full
        assert limit <= stats.pending_items <= limit + 1


@pytest.mark.parametrize("limit", [1, 400])
def test_extend_is_as_many_calls(server: HostedServer, limit: int) -> None:
    observer = rw.TrajectoryObserver(server.address, "queue", 3, max_in_flight_items=limit, timeout_s=CONFIRMED_S)
    with leaving(observer):
        with pytest.raises(rw.errors.ReplayTimeoutError):
            observer.extend({"n": np.arange(5_000)})
        stats = observer.stats()
        check_pending(stats, limit)
        assert stats.steps == 3 + ADMITTED + limit - 1


def test_raise_refuses_at_the_limit(server: HostedServer) -> None:
    limit = 20
    observer = rw.TrajectoryObserver(
        server.address, "queue", 2, max_in_flight_items=limit, on_block="raise", timeout_s=LONG_S
    )
    with leaving(observer):
        refused = write_until_refused(observer, admitted=1).steps  # at once: items may be unconfirmed
        eventually(lambda: observer.stats().acknowledged_items == ADMITTED, "the queue is full")
        with contextlib.suppress(rw.errors.ReplayTimeoutError):
            for number in range(refused, refused + 2 * limit):
                observer(step(number), end_of_episode=False)
        check_pending(observer.stats(), limit)


# --------------------------------------------------------------------------------------- several environments


def test_masked_environments_are_stopped_at_the_limit(server: HostedServer) -> None:
    observer = rw.TrajectoryObserver(
        server.address, "queue", 2, num_envs=4, max_in_flight_items=20, timeout_s=CONFIRMED_S
    )
    with leaving(observer):
        rng = np.random.default_rng(0)
        with contextlib.suppress(rw.errors.ReplayTimeoutError):
            for number in range(1_000):
                mask = rng.random(4) < 0.5
                observer({"n": np.full(4, number)}, end_of_episode=np.zeros(4, bool), env_mask=mask)
        check_pending(observer.stats(), 20, per_call=4)


# ------------------------------------------------------------------------------------------------ the default


def test_actor_without_a_learner_stops_soon_by_default(replay_server: StartServer) -> None:
    limiter = rw.SampleToInsertRatio(samples_per_insert=8, min_size=100, error_buffer=200)  # admits (800 + 200) / 8
    server = replay_server(rw.TableConfig("replay", 10_000, rate_limiter=limiter))
    observer = rw.TrajectoryObserver(server.address, "replay", 2, timeout_s=TIMEOUT_S)
    with leaving(observer), rw.Client(server.address) as client:
        stats = write_until_refused(observer, admitted=125)
        check_pending(stats, 400, admitted=125)
        assert stats.steps == 125 + 400 + 1  # the first window takes two steps
        assert client.server_info()["replay"].rate_limiter.num_inserts == 125


def test_default_is_32_calls_of_many_environments(server: HostedServer) -> None:
    observer = rw.TrajectoryObserver(server.address, "queue", 1, num_envs=64, timeout_s=CONFIRMED_S)
    with leaving(observer):
        check_pending(write_until_refused(observer), 32 * 64, per_call=64)


# ------------------------------------------------------------------------------- while it waits, and who hears


@pytest.mark.parametrize("num_envs", [None, 3])
def test_complete_items_are_sent_before_a_step_waits(replay_server: StartServer, num_envs: int | None) -> None:
    server = replay_server(rw.TableConfig("replay", 10_000))
    options: Any = {"max_in_flight_items": 5, "max_delay_s": NEVER_S, "chunk_length": 1_000, "timeout_s": LONG_S}
    observer = rw.TrajectoryObserver(server.address, "replay", 2, num_envs=num_envs, **options)
    with leaving(observer):
        for number in range(200):
            shape = () if num_envs is None else (num_envs,)
            observer({"n": np.full(shape, number)}, end_of_episode=np.zeros(shape, bool))
        assert observer.stats().acknowledged_items >= (199 * (num_envs or 1)) - 5 - (num_envs or 1)


def test_first_wait_for_a_rate_limiter_is_logged_once(server: HostedServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "reverb_writer")
    observer = rw.TrajectoryObserver(server.address, "queue", 1, max_in_flight_items=20, timeout_s=CONFIRMED_S)
    with leaving(observer):
        refused = write_until_refused(observer).steps
        lines = limiter_lines(caplog)
        assert len(lines) == 1
        for part in ("rate limiter of table `queue` blocks inserts", "samples = 10, max_diff 10", server.address):
            assert part in lines[0]
        with pytest.raises(rw.errors.ReplayTimeoutError):
            observer(step(refused), end_of_episode=False)
        assert limiter_lines(caplog) == lines


def test_wait_without_a_rate_limiter_is_not_logged(
    replay_server: StartServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "reverb_writer")
    server = replay_server(rw.TableConfig("replay", 10_000))
    options: Any = {"max_in_flight_items": 1, "timeout_s": LONG_S}
    with rw.TrajectoryObserver(server.address, "replay", 1, **options) as observer:
        for number in range(500):
            observer(step(number), end_of_episode=False)
    assert not limiter_lines(caplog)


def limiter_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelno == logging.INFO and "rate limiter" in record.getMessage()
    ]
