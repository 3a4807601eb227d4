"""`extend`: many steps in one call are what they are one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from episodes import SMALL_GRID, expected, observed
from kinds import contents
from reading import Place, read

import reverb_writer as rw

pytestmark = contents


def feed_at_once(observer: Any, lengths: tuple[int, ...]) -> None:
    first = 1
    for n in lengths:
        middle = n // 2
        for numbers in (range(first, first + middle), range(first + middle, first + n - 1)):
            if numbers:
                observer.extend({"n": np.array(numbers, np.int64)})
        observer({"n": np.int64(first + n - 1)}, end_of_episode=True)
        first += n


def test_windows_are_those_of_single_calls(place: Place) -> None:
    lengths = (3, 1, 45, 4, 90, 2)
    for spec in SMALL_GRID:
        with observed(place, spec) as observer:
            feed_at_once(observer, lengths)
            assert observer.stats().steps == sum(lengths)
        assert place.column() == expected(spec, lengths)


def test_priority_functions_and_strings_and_numbers_go_one_by_one(place: Place) -> None:
    with rw.TrajectoryObserver(place.client, "a", 2, priority=lambda window: float(window["n"].sum())) as observer:
        feed_at_once(observer, (4,))
    assert [item.info.priority for item in read(place.client, "a")] == [3, 5, 7]
    with rw.TrajectoryObserver(place.client, "b", 2) as observer:
        observer.extend({"text": np.array([b"x", b"yz"], object)})
    assert place.column("b") == [[b"x", b"yz"]]


def test_too_long_an_episode_and_other_steps_are_refused_as_by_a_call(place: Place) -> None:
    with rw.EpisodeObserver(place.client, "a", 3, bypass_partial_episodes=True) as observer:
        feed_at_once(observer, (6, 2))
        assert observer.stats().dropped_steps == {"overflow": 6}
    assert place.column("a") == [[7, 8]]
    with rw.TrajectoryObserver(place.client, "b", 2) as observer:
        observer.extend({"n": np.arange(2)})
        with pytest.raises(rw.errors.StructureError, match="step 2, leaf `n`: float32"):
            observer.extend({"n": np.zeros(2, np.float32)})
        observer.extend({"n": np.arange(2, 3)})
    assert place.column("b") == [[0, 1], [1, 2]]


@pytest.mark.parametrize("steps", [{"n": np.arange(3), "x": np.arange(2)}, {"n": np.int64(1), "x": np.arange(2)}, {}])
def test_steps_of_different_lengths_are_refused_before_any_is_written(place: Place, steps: Any) -> None:
    with rw.TrajectoryObserver(place.client, "a", 1) as observer:
        with pytest.raises(rw.errors.StructureError, match=r"leaves must be \[T, ...\] with one T for all, got shapes"):
            observer.extend(steps)
        assert observer.stats().steps == 0
        observer({"n": 1})
    assert place.column() == [[1]]


def test_no_steps_are_written_at_any_time_but_to_a_closed_observer(place: Place) -> None:
    """Also where the layout is known and no writer is there, as after `open`."""
    none = {"n": np.zeros(0, np.int64)}
    observer = rw.TrajectoryObserver(place.client, "a", 1)
    observer.extend(none)
    observer({"n": np.int64(1)}, end_of_episode=True)
    observer.extend(none)
    observer.close()
    with pytest.raises(rw.errors.ClosedError, match=r"the observer is closed. Call `open\(\)`"):
        observer.extend(none)
    observer.open()
    observer.extend(none)
    observer({"n": np.int64(2)}, end_of_episode=True)
    observer.close()
    assert place.column() == [[1], [2]]
