"""Observers on a real server: what is read back are the windows that `windowing` says, and nothing else."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from episodes import cut, expected, feed, observed, specs
from kinds import contents
from reading import Place, read

import reverb_writer as rw

MODES = tuple(rw.EndOfEpisode)

pytestmark = [contents, pytest.mark.filterwarnings("ignore:`stride_length`")]


# All windows of every mode.

GRID = specs(range(1, 6), range(1, 7))
EPISODES = range(1, 10)


@pytest.mark.parametrize("mode", MODES)
def test_what_is_read_back_are_the_windows_of_every_episode(place: Place, mode: rw.EndOfEpisode) -> None:
    for spec in GRID:
        if spec.end_of_episode is mode:
            with observed(place, spec) as observer:
                feed(observer, EPISODES)
            windows = place.column()
            assert windows == expected(spec, EPISODES), spec
            # Every step is in a window, or counted with a reason.
            stats = observer.stats()
            dropped: dict[str, int] = {}
            for n in EPISODES:
                for reason, count in spec.num_dropped(n).items():
                    dropped[reason] = dropped.get(reason, 0) + count
            assert stats.dropped_steps == dropped
            covered = set(itertools.chain.from_iterable(windows)) - {0}
            assert stats.steps == len(covered) + sum(dropped.values())
            assert stats.steps == sum(EPISODES)
            assert stats.episodes == len(EPISODES)
            assert (stats.items, stats.acknowledged_items) == (len(windows), len(windows))
            assert (stats.pending_items, stats.pending_bytes, stats.dropped_items) == (0, 0, 0)


def test_large_steps_are_sent_in_time(place: Place) -> None:
    with rw.TrajectoryObserver(place.client, "a", 4, 2) as observer:
        for number in range(40):
            observer({"frame": np.full((300, 1000), number, np.int32)}, end_of_episode=number == 39)
    items = read(place.client, "a")
    assert [item.data[0][:, 7, 7].tolist() for item in items] == cut(range(40), rw.WindowSpec(4, 2).windows(40))
    assert all((item.data[0] == item.data[0][:, :1, :1]).all() for item in items)


# Boundaries.


def boundary_steps(kind: str, numbers: Sequence[int]) -> list[Any]:
    last = [False] * (len(numbers) - 1) + [True]
    if kind == "is_last":
        return [{"n": np.int64(n), "is_last": end} for n, end in zip(numbers, last, strict=True)]
    if kind == "dm_env":
        types = [0, *[1] * (len(numbers) - 2), 2]
        return [{"n": np.int64(n), "step_type": np.int32(kind)} for n, kind in zip(numbers, types, strict=True)]
    return [
        rw.Trajectory(np.int32(2 if end else 1), np.int64(n), (), (), np.int32(0), np.float32(0), np.float32(1))
        for n, end in zip(numbers, last, strict=True)
    ]


@pytest.mark.parametrize(("kind", "column"), [("is_last", 1), ("dm_env", 0), ("trajectory", 1)])
def test_steps_tell_the_end_of_their_episode(place: Place, kind: str, column: int) -> None:
    with rw.TrajectoryObserver(place.client, "a", 2) as observer:
        for step in [*boundary_steps(kind, [1, 2, 3]), *boundary_steps(kind, [4, 5])]:
            observer(step)
        assert observer.stats().episodes == 2
    assert place.column("a", column) == [[1, 2], [2, 3], [4, 5]]


def test_caller_knows_better_than_the_step(place: Place) -> None:
    steps = boundary_steps("is_last", [1, 2, 3])
    with rw.TrajectoryObserver(place.client, "a", 2) as observer:
        observer(steps[0], end_of_episode=True)
        observer(steps[2], end_of_episode=False)
        observer(steps[1])
    assert place.column("a", 1) == [[3, 2]]


# Reset in mid-episode.


def test_refused_reset_lets_the_episode_go_on(place: Place) -> None:
    with observed(place, rw.WindowSpec(3)) as observer:
        feed(observer, [0])
        observer({"n": np.int64(1)})
        observer({"n": np.int64(2)})
        with pytest.raises(rw.errors.SpecError, match="has 2 steps, expected at least"):
            observer.reset()
        observer({"n": np.int64(3)}, end_of_episode=True)
        assert observer.stats().dropped_steps == {}
    assert place.column() == [[1, 2, 3]]


@pytest.mark.parametrize("mode", MODES)
def test_reset_without_writing_and_close_leave_the_complete_windows(place: Place, mode: rw.EndOfEpisode) -> None:
    with observed(place, rw.WindowSpec(3, 2, mode)) as observer:
        for n in (2, 3, 6):
            for number in range(1, n + 1):
                observer({"n": np.int64(number)})
            if n < 6:
                observer.reset(discard=True)
    assert observer.stats().dropped_steps == {"reset": 2 + 0 + 1}
    assert observer.stats().episodes == 3
    assert place.column() == [[1, 2, 3], [1, 2, 3], [3, 4, 5]]


# Several kinds of windows.


def test_targets_have_tables_and_priorities_of_their_own(place: Place) -> None:
    windows = {
        "a": rw.WindowTarget(rw.WindowSpec(3), priority=2.5),
        "long": rw.WindowTarget(rw.WindowSpec(4, 4, "cover"), ("a", "b"), lambda window: window["n"].sum()),
    }
    with rw.TrajectoryObserver(place.client, "b", 2, priority=0.5, windows=windows) as observer:
        feed(observer, [5])
    found = {
        table: sorted((sample.data[0].tolist(), sample.info.priority) for sample in read(place.client, table))
        for table in ("a", "b")
    }
    long = [([1, 2, 3, 4], 10.0), ([5, 0, 0, 0], 5.0)]
    assert found["a"] == sorted([([1, 2, 3], 2.5), ([2, 3, 4], 2.5), ([3, 4, 5], 2.5), *long])
    assert found["b"] == sorted([([1, 2], 0.5), ([2, 3], 0.5), ([3, 4], 0.5), ([4, 5], 0.5), *long])


def test_episodes_that_are_too_short_for_any_window_are_a_warning_once_and_summed_up_at_the_end(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "reverb_writer"), observed(place, rw.WindowSpec(20)) as observer:
        feed(observer, [7] * 30)
    told = [(record.levelname, record.getMessage()) for record in caplog.records]
    first, last = told
    assert first[0] == last[0] == "WARNING"
    assert "An episode of 7 steps is shorter than a window (`sequence_length` 20): nothing of it is written" in first[1]
    assert last[1] == "Observer closed: of 210 steps some are in no window (short_episode 210)."
