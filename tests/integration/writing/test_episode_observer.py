"""`EpisodeObserver` on a real server: an episode is an item, unless it is too long."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import numpy as np
import pytest
from episodes import feed
from kinds import contents
from reading import Place, read

import reverb_writer as rw

pytestmark = contents


@pytest.mark.parametrize("chunk_length", [None, 1, 3])
def test_episode_is_one_item_of_its_own_length(place: Place, chunk_length: int | None) -> None:
    lengths = [1, 5, 1000, 99, 100, 101]
    with rw.EpisodeObserver(place.client, ["a", "b"], 1000, priority=3, chunk_length=chunk_length) as observer:
        feed(observer, lengths)
    firsts = itertools.accumulate(lengths, initial=1)
    episodes = [list(range(first, first + n)) for first, n in zip(firsts, lengths, strict=False)]
    assert place.column("b") == episodes
    items = read(place.client, "a")
    assert [item.data[0].tolist() for item in items] == episodes
    assert {item.info.priority for item in items} == {3}
    stats = observer.stats()
    assert (stats.steps, stats.episodes, stats.items, stats.dropped_steps) == (sum(lengths), 6, 12, {})


def test_overflow_is_refused_once_and_the_next_episode_is_written(place: Place) -> None:
    with rw.EpisodeObserver(place.client, "a", 3) as observer:
        for numbers in (range(1, 6), range(6, 10)):
            for i, number in enumerate(numbers):
                overflow = pytest.raises(ValueError, match="longer than max_sequence_length=3 steps, boundary step")
                with overflow if i == 3 else contextlib.nullcontext():
                    observer({"n": np.int64(number)}, end_of_episode=number == numbers[-1])
        feed(observer, [3], first=10)
        stats = observer.stats()
        assert (stats.steps, stats.episodes, stats.dropped_steps) == (12, 3, {"overflow": 9})
    assert place.column() == [[10, 11, 12]]


def test_overflow_is_bypassed_counted_and_logged(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    with rw.EpisodeObserver(place.client, "a", 3, bypass_partial_episodes=True) as observer:
        feed(observer, [5, 3, 4, 1])
        assert observer.stats().dropped_steps == {"overflow": 9}
    assert place.column() == [[6, 7, 8], [13]]
    assert len([record for record in caplog.records if "max_sequence_length=3" in record.message]) == 2


@pytest.mark.parametrize("end", ["reset", "discard", "close"])
def test_overflow_ends_with_a_reset_and_with_the_observer(place: Place, end: str) -> None:
    observer = rw.EpisodeObserver(place.client, "a", 2, bypass_partial_episodes=True)
    for number in range(1, 5):
        observer({"n": np.int64(number)})
    if end == "close":
        observer.close()
        observer.open()
    else:
        observer.reset(discard=end == "discard")
    assert observer.stats().dropped_steps == {"overflow": 4}
    feed(observer, [2], first=5)
    observer.close()
    assert place.column() == [[5, 6]]


def test_step_of_an_overflow_is_checked_too(place: Place) -> None:
    with rw.EpisodeObserver(place.client, "a", 1, bypass_partial_episodes=True) as observer:
        observer({"n": np.int64(1)})
        for _ in range(2):
            with pytest.raises(rw.errors.StructureError, match="step 1, leaf `n`"):
                observer({"n": 0.5})
        observer({"n": np.int64(2)})
        with pytest.raises(rw.errors.StructureError, match="step 2, leaf `n`"):
            observer({"n": 0.5}, end_of_episode=True)
        observer({"n": np.int64(3)}, end_of_episode=True)
        assert observer.stats().dropped_steps == {"overflow": 3}


def test_part_of_an_episode_is_written_or_dropped_at_a_reset(place: Place) -> None:
    with rw.EpisodeObserver(place.client, "a", 5) as observer:
        for write in (True, False):
            for number in range(1, 4):
                observer({"n": np.int64(number)})
            observer.reset(discard=not write)
            observer.reset(discard=not write)
        assert observer.stats().dropped_steps == {"reset": 3}
    assert place.column() == [[1, 2, 3]]


def test_too_long_episodes_of_environments_are_dropped_and_the_others_written(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    """Environment 0 has episodes of 2 and 4 steps, environment 1 one of 4, one of 1 and one of 1."""
    ends = [[0, 0], [1, 0], [0, 0], [0, 1], [0, 1], [1, 1]]
    for bypass in (True, False):
        with rw.EpisodeObserver(place.client, "a", 3, bypass_partial_episodes=bypass, num_envs=2) as observer:
            for t, last in enumerate(ends, 1):
                # The fourth steps of episodes: of environment 1 at t = 4, of environment 0 at t = 6.
                refusal = pytest.raises(rw.errors.SpecError, match="longer than max_sequence_length=3")
                with contextlib.nullcontext() if bypass or t not in (4, 6) else refusal:
                    observer({"n": np.array([t, 100 + t])}, end_of_episode=np.array(last, bool))
            observer.flush()
            stats = observer.stats()
            assert (stats.steps, stats.episodes, stats.dropped_steps) == (12, 5, {"overflow": 8})
        assert sorted(place.column()) == [[1, 2], [105], [106]]
    assert len([record for record in caplog.records if "max_sequence_length=3" in record.message]) == 2


def test_full_episode_of_an_environment_that_takes_no_step_is_not_too_long(place: Place) -> None:
    with rw.EpisodeObserver(place.client, "a", 3, num_envs=2) as observer:
        for t, (env_mask, last) in enumerate([([1, 0], [0, 0])] * 3 + [([0, 1], [0, 1])], 1):
            step = {"n": np.array([t, 100 + t])}
            observer(step, end_of_episode=np.array(last, bool), env_mask=np.array(env_mask, bool))
        observer.reset()
    assert sorted(place.column()) == [[1, 2, 3], [104]]


def test_priority_of_episodes_can_be_changed(place: Place) -> None:
    with rw.EpisodeObserver(place.client, "a", 5, priority=1) as observer:
        observer.update_priority(2)
        feed(observer, [1])
        observer({"n": np.int64(2)})
        observer.update_priority(3.5)
        for bad in (-1, float("nan"), lambda episode: episode["n"].sum()):
            with pytest.raises(rw.errors.SpecError, match="`priority` must be a finite number >= 0"):
                observer.update_priority(bad)
        observer({"n": np.int64(3)}, end_of_episode=True)
        observer.update_priority(9)
        feed(observer, [2], first=4)
        observer.update_priority(7)
        feed(observer, [1], first=6)
        observer.close()
        observer.open()
        feed(observer, [1], first=7)
    assert [(item.data[0].tolist(), item.info.priority) for item in read(place.client, "a")] == [
        ([1], 2),
        ([2, 3], 3.5),
        ([4, 5], 9),
        ([6], 7),
        ([7], 7),
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("a", 0), "`max_sequence_length` must be >= 1, got 0"),
        (("a", 2.0), "`max_sequence_length` must be an integer"),
        (([], 2), "`table` must be a name or several different ones, got none"),
        ((["a", "a"], 2), "`table` must be a name or several different ones"),
        (("a", 2, -1.0), "`priority` must be a finite number >= 0"),
    ],
)
def test_episode_arguments_that_cannot_work_are_refused(place: Place, arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(rw.errors.SpecError, match=message):
        rw.EpisodeObserver(place.client, *arguments)
