"""How many items an observer may have in flight, and when so many are complete that they are sent."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import numpy as np
import pytest
from reading import column_at, fifo
from waiting import eventually

import reverb_writer as rw
from reverb_writer.writing.outbox import ItemLimit


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time of `time.monotonic`, to be changed."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_limit_follows_the_rate_of_confirmations(now: list[float]) -> None:
    limit = ItemLimit(None, 1)
    now[0] += 0.04
    limit.update(1_000)  # too soon to tell
    assert limit.items == 400
    now[0] += 0.06
    limit.update(1_000)  # 10,000 per second: what comes in 0.1 s
    assert limit.items == pytest.approx(1_000, abs=1)
    now[0] += 0.1
    limit.update(1_001)
    assert limit.items == 400
    now[0] += 0.1
    limit.update(10**6)
    assert limit.items == 16_384


def test_limit_that_was_given_stays(now: list[float]) -> None:
    limit = ItemLimit(7, 1)
    now[0] += 1
    limit.update(10**6)
    assert limit.items == 7


def step(number: int) -> dict[str, Any]:
    return {"n": np.int64(number)}


def test_half_of_the_limit_is_sent_and_one_more_than_the_limit_is_refused() -> None:
    with rw.LocalServer([rw.TableConfig.queue("queue", 3)]) as server:
        options: Any = {"max_in_flight_items": 4, "max_delay_s": 1e4, "chunk_length": 100, "timeout_s": 0.5}
        observer = rw.TrajectoryObserver(server, "queue", 2, **options)
        for number in (0, 1):
            observer(step(number), end_of_episode=False)
        assert (observer.stats().items, observer.stats().acknowledged_items) == (1, 0)
        for number in (2, 3):
            observer(step(number), end_of_episode=False)
        eventually(lambda: observer.stats().acknowledged_items >= 2)
        for number in range(4, 8):  # the table has three, and four are in flight
            observer(step(number), end_of_episode=False)
        with pytest.raises(rw.errors.ReplayTimeoutError):
            observer(step(8), end_of_episode=False)
        assert (observer.stats().acknowledged_items, observer.stats().pending_items) == (3, 4)
        with pytest.raises(rw.errors.ReplayTimeoutError):
            observer.close(timeout_s=0.1)


@pytest.mark.parametrize(
    ("kind", "stride_length", "mode", "num_steps"),
    [
        (rw.TrajectoryObserver, 20, "drop", 21),
        (rw.SequenceObserver, 20, "drop", 21),
        (rw.SequenceObserver, 10, "pad", 1),
    ],
)
def test_episodes_that_resets_end_are_stopped_at_the_limit(
    kind: Any, stride_length: int, mode: str, num_steps: int
) -> None:
    """A reset completes windows, although it is no step."""
    options: Any = {"max_in_flight_items": 100, "max_delay_s": 1e4, "on_block": "raise", "end_of_episode": mode}
    with rw.LocalServer([rw.TableConfig.queue("queue", 1)]) as server:
        observer = kind(server, "queue", 20, stride_length, **options)
        with contextlib.suppress(rw.errors.ReplayTimeoutError):
            for number in range(10_000):
                observer(step(number), end_of_episode=False)
                if number % num_steps == num_steps - 1:
                    observer.reset()
        assert observer.stats().pending_items in (100, 101)  # a reset of two windows may be the last call
        with pytest.raises(rw.errors.ReplayTimeoutError):
            observer.close(timeout_s=0.1)


@pytest.mark.parametrize("bypass", [False, True])
def test_only_the_step_beyond_the_longest_episode_is_refused_or_logged(
    bypass: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with rw.LocalServer([fifo("a")]) as server:
        with rw.EpisodeObserver(server, "a", 2, bypass_partial_episodes=bypass, num_envs=2) as observer:
            for t, last in enumerate([[0, 0], [1, 0], [1, 1]]):  # the episode of the second environment has three steps
                refusal = pytest.raises(rw.errors.SpecError, match="longer than max_sequence_length=2 steps")
                with contextlib.nullcontext() if bypass or t < 2 else refusal:
                    observer({"n": np.array([t, 10 + t])}, end_of_episode=np.array(last, bool))
        assert column_at(server.address, "a") == [[0, 1], [2]]
    assert ("longer than max_sequence_length=2 steps" in caplog.text) is bypass
