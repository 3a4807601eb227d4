"""How many items an observer may have in flight, and when they are sent; what it refuses and says; its steps."""

from __future__ import annotations

import contextlib
import functools
import math
import time
from typing import Any

import numpy as np
import pytest
from reading import fifo, read_column
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
        numbers = iter(range(10_000))
        for _ in range(2):  # the table takes one item, perhaps after the first refusal
            with contextlib.suppress(rw.errors.ReplayTimeoutError):
                for number in numbers:
                    observer(step(number), end_of_episode=False)
                    if number % num_steps == num_steps - 1:
                        observer.reset()
            eventually(lambda: observer.stats().acknowledged_items == 1)
        assert observer.stats().pending_items in (100, 101)  # a reset of two windows may be the last call
        with pytest.raises(rw.errors.ReplayTimeoutError):
            observer.close(timeout_s=0.1)


@pytest.mark.parametrize("num_envs", [None, 3])
@pytest.mark.parametrize("mode", ["episode", "pad", "cover", "tile"])
def test_steps_that_complete_no_item_never_wait(mode: str, num_envs: int | None) -> None:
    """Only their sender is asked for room when the limit is reached or the ring is full, and 200 steps fill neither."""
    options: Any = {"max_in_flight_items": 1, "num_envs": num_envs}
    shape = () if num_envs is None else (num_envs,)
    with rw.LocalServer([fifo("a")]) as server:
        observer = (
            rw.EpisodeObserver(server, "a", 300, **options)
            if mode == "episode"
            else rw.TrajectoryObserver(server, "a", 300, 300, end_of_episode=mode, **options)
        )
        with observer:
            for number in range(200):
                observer({"n": np.full(shape, number)}, end_of_episode=np.full(shape, number == 199))
            assert observer.stats().blocked_s == 0
            observer.flush()
            assert observer.stats().acknowledged_items == num_envs or 1


@pytest.mark.parametrize("num_envs", [None, 2])
def test_strings_count_by_their_length_and_are_released_when_they_are_sent(num_envs: int | None) -> None:
    """Strings of 100,000 bytes, of which 64 calls may come before their length is known."""
    bound, length = 4 << 20, 100_000
    with (
        rw.LocalServer([rw.TableConfig("a", 10)]) as server,
        rw.TrajectoryObserver(server, "a", 2, max_in_flight_bytes=bound, num_envs=num_envs) as observer,
    ):

        def held() -> int:
            assert observer._sender is not None
            (column,) = observer._sender.ring.columns
            return sum(len(text) for text in column.copy() if text)

        for number in range(500):
            texts = [f"{number:0{length}}".encode() for _ in range(num_envs or 1)]
            observer(
                {"text": texts[0] if num_envs is None else np.array(texts, object)},
                end_of_episode=False if num_envs is None else np.zeros(num_envs, bool),
            )
            most = 65 * length * (num_envs or 1) if number < 100 else bound + length * (num_envs or 1)
            assert held() <= most
        observer.flush()
        assert observer.stats().acknowledged_items == 499 * (num_envs or 1)
        assert held() == 0


# Refusals, words, numbers and ends that are the client's alone.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chunk_length": 0}, "`chunk_length` must be >= 1, got 0"),
        ({"chunk_length": 16384}, "`chunk_length` must be <= 16383, got 16384"),
        ({"chunk_length": 2.5}, "`chunk_length` must be an integer"),
        ({"max_delay_s": 0}, "`max_delay_s` must be > 0 seconds, got 0"),
        ({"timeout_s": -1}, "`timeout_s` must be > 0 seconds, got -1"),
        ({"timeout_s": math.nan}, "`timeout_s` must be > 0 seconds, got nan"),
        ({"max_in_flight_items": 0}, "`max_in_flight_items` must be >= 1, got 0"),
        ({"max_in_flight_bytes": 0}, "`max_in_flight_bytes` must be >= 1, got 0"),
        ({"on_block": "panic"}, "`on_block` must be 'wait' or 'raise', got 'panic'"),
        ({"last_row": "end"}, "`last_row` must be 'boundary', 'action' or None, got 'end'"),
        ({"end_of_episode": "finish"}, "`end_of_episode` must be one of"),
        ({"patience_s": 0}, "`patience_s` must be > 0 seconds, got 0"),
        ({"until": False}, "`until` must be a function without arguments, got False. Put `lambda:`"),
        *(({"num_envs": number}, "`num_envs` must be") for number in (0, -1, 2.0, True)),
        *(({"priority": one}, "must be a finite number >= 0") for one in (math.nan, math.inf, -0.1, "1", None)),
        ({"priority": "Max"}, "`priority` must be a finite number >= 0, a function or 'max', got 'Max'"),
        ({"table": []}, "`table` must be a name or several different ones, got \\[\\]"),
        *(({"table": ["a", one]}, "`table` must be a name or several different ones") for one in ("a", "")),
        *(({"table": one}, f"`table` must be .* ones, got {one!r}") for one in (8, 2.5)),
        ({"max_sequence_length": 0}, "`max_sequence_length` must be >= 1, got 0"),
        ({"max_sequence_length": 2.0}, "`max_sequence_length` must be an integer"),
        ({"max_sequence_length": 2, "priority": -1.0}, "`priority` must be a finite number >= 0"),
    ],
)
def test_options_that_cannot_work_are_refused_at_construction(options: dict[str, Any], message: str) -> None:
    of_episodes = "max_sequence_length" in options
    kind: Any = rw.EpisodeObserver if of_episodes else functools.partial(rw.TrajectoryObserver, sequence_length=2)
    with rw.LocalServer([fifo("a")]) as server, pytest.raises(rw.errors.SpecError, match=message):
        kind(server, **{"table": "a", **options})


def test_observer_that_waits_for_its_server_says_so_again_and_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("reverb_writer.background.LOG_EVERY_S", 0.05)
    begin = time.monotonic()
    missing = r"no Reverb server at localhost:1 within 1\.5 s.*refused"
    with pytest.raises(rw.errors.ServerUnavailableError, match=missing):
        rw.TrajectoryObserver("localhost:1", "a", 1, timeout_s=1.5)
    assert time.monotonic() - begin < 20
    told = [record.getMessage() for record in caplog.records]
    assert len(told) >= 2
    assert all("an observer waits for the server at localhost:1 (" in each for each in told)
    caplog.clear()
    with pytest.raises(rw.errors.ServerUnavailableError):
        rw.Variables("localhost:1", "weights", timeout_s=0.5)
    assert "table `weights`: waiting for the server at localhost:1 (" in caplog.text


def test_steps_are_numbered_from_the_first_also_in_an_observer_that_is_opened_again() -> None:
    with rw.LocalServer([fifo("a")]) as server, rw.EpisodeObserver(server, "a", 3) as observer:
        for first in (0, 5):
            assert observer.num_steps == first
            observer({"n": np.int64(0)}, end_of_episode=True)
            with pytest.raises(rw.errors.StructureError, match=f"^step {first + 1}, leaf `n`"):
                observer({"n": 0.5})
            with pytest.raises(rw.errors.SpecError, match="longer than max_sequence_length=3"):
                observer.extend({"n": np.arange(7)})  # the fourth step of the episode is the last that is taken
            observer.close()
            assert observer.num_steps == first + 5
            observer.open()


def test_observer_that_is_closed_has_nothing_to_do_at_the_end_of_the_program() -> None:
    with rw.LocalServer([fifo("a")]) as server:
        observer = rw.TrajectoryObserver(server, "a", 1)
        observer({"n": np.int64(0)})
        sender, ended = observer._sender, list[bool]()
        observer.close()
        assert sender is not None
        assert sender.end_soon(lambda: ended.append(True)) is None
    assert ended == [True]


def test_too_long_episodes_of_environments_are_dropped_and_the_others_written(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Environment 0 has episodes of 2 and 4 steps, environment 1 one of 4, one of 1 and one of 1."""
    with rw.LocalServer([fifo("a")]) as server, rw.Client(server) as client:
        ends = [[0, 0], [1, 0], [0, 0], [0, 1], [0, 1], [1, 1]]
        for bypass in (True, False):
            with rw.EpisodeObserver(client, "a", 3, bypass_partial_episodes=bypass, num_envs=2) as observer:
                for t, last in enumerate(ends, 1):
                    # The fourth steps of episodes: of environment 1 at t = 4, of environment 0 at t = 6.
                    refusal = pytest.raises(rw.errors.SpecError, match="longer than max_sequence_length=3")
                    with contextlib.nullcontext() if bypass or t not in (4, 6) else refusal:
                        observer({"n": np.array([t, 100 + t])}, end_of_episode=np.array(last, bool))
                observer.flush()
                stats = observer.stats()
                assert (stats.steps, stats.episodes, stats.dropped_steps) == (12, 5, {"overflow": 8})
            assert sorted(read_column(client, "a")) == [[1, 2], [105], [106]]
        assert len([record for record in caplog.records if "max_sequence_length=3" in record.message]) == 2
        with rw.EpisodeObserver(client, "a", 3, num_envs=2) as observer:  # full, and takes no step
            for t, (env_mask, last) in enumerate([([True, False], [0, 0])] * 3 + [([False, True], [0, 1])], 1):
                observer(
                    {"n": np.array([t, 100 + t])}, end_of_episode=np.array(last, bool), env_mask=np.array(env_mask)
                )
            observer.reset()
        assert sorted(read_column(client, "a")) == [[1, 2, 3], [104]]
