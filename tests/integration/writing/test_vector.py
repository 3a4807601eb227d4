"""`TrajectoryObserver` on a real server: each environment is what an observer of its own would have written.

Steps are (environment, number), both from 1 on, so that zeros are padding.
"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest
from episodes import SMALL_GRID, cut, observed
from kinds import contents
from reading import Place, read
from waiting import eventually

import reverb_writer as rw

pytestmark = [contents, pytest.mark.filterwarnings("ignore:`stride_length`")]

# When the episodes of each environment end, by the number of the step.
ENDS = [{3, 4, 10}, {10}, set[int](), {1, 2, 3, 4, 5, 6, 7, 8, 9, 10}, {6, 9}]
NUM_STEPS = 12


def windows_by_env(place: Place, table: str = "a") -> dict[int, list[list[int]]]:
    """Take out all items; return the numbers in the windows of each environment, in their order."""
    found: dict[int, list[list[int]]] = {}
    for item in read(place.client, table):
        envs, numbers = (column.tolist() for column in item.data[:2])
        assert set(envs) <= {envs[0], 0}
        found.setdefault(envs[0], []).append(numbers)
    return found


def step_of(number: int, num_envs: int) -> dict[str, Any]:
    return {"env": np.arange(1, num_envs + 1), "n": np.full(num_envs, number)}


def test_environment_holds_the_windows_of_its_own_episodes(place: Place) -> None:
    """The last episode of each has no end: it keeps the windows that are complete."""
    for spec in SMALL_GRID:
        with observed(place, spec, num_envs=len(ENDS)) as observer:
            for number in range(1, NUM_STEPS + 1):
                observer(step_of(number, len(ENDS)), end_of_episode=[number in ends for ends in ENDS])
        windows: dict[int, list[list[int]]] = {}
        dropped: Counter[str] = Counter()
        for env, ends in enumerate(ENDS, 1):
            stops = sorted({*ends, NUM_STEPS})
            for start, stop in itertools.pairwise([0, *stops]):
                of_end = spec if stop in ends else rw.WindowSpec(spec.sequence_length, spec.stride_length)
                found = of_end.windows(stop - start)
                windows.setdefault(env, []).extend(cut(range(start + 1, stop + 1), found))
                covered = set(itertools.chain(*(range(*window) for window in found)))
                unfinished = {"reset": stop - start - len(covered)}
                dropped.update(spec.num_dropped(stop - start) if stop in ends else unfinished)
        assert +Counter(observer.stats().dropped_steps) == +dropped
        assert windows_by_env(place) == {env: numbers for env, numbers in windows.items() if numbers}, spec


def test_frames_strings_and_numbers_are_copied_to_their_environments(place: Place) -> None:
    rng = np.random.default_rng(0)
    frames = rng.integers(256, size=(9, 4, 84, 84), dtype=np.uint8)
    names = np.array([[f"{t}/{env}" for env in range(4)] for t in range(9)])
    with rw.TrajectoryObserver(place.client, "a", 3, 3, num_envs=4) as observer:
        for t in range(9):
            step = {"frame": frames[t].copy(), "half": frames[t, :, 0, :2].astype(">f2"), "name": names[t].copy()}
            observer(step)
            for leaf in step.values():
                leaf[:] = 0
    items = read(place.client, "a")
    assert len(items) == 12
    for item in items:
        frame, half, name = item.data
        t, env = map(int, name[0].decode().split("/"))
        assert name.tolist() == [f"{t + i}/{env}".encode() for i in range(3)]
        np.testing.assert_array_equal(frame, frames[t : t + 3, env], strict=True)
        assert half.dtype == np.float16
        assert half.tolist() == frames[t : t + 3, env, 0, :2].astype(float).tolist()


@pytest.mark.parametrize(
    ("step", "end_of_episode", "message"),
    [
        ({"env": np.arange(3)}, None, "step 2: .* Missing: `n`"),
        (step_of(9, 2), None, r"step 2, leaf `env`: int64 \(2,\), expected int64 \(3,\)"),
        ({**step_of(9, 3), "n": 5}, None, r"step 2, leaf `n`: int64 \(\)"),
        (step_of(9, 3), True, r"`end_of_episode` has shape \(\), expected \(3,\): one flag per environment"),
        (step_of(9, 3), [True], r"`end_of_episode` has shape \(1,\)"),
        (step_of(9, 3), [[True] * 3], r"`end_of_episode` has shape \(1, 3\)"),
    ],
)
def test_refused_step_changes_nothing(place: Place, step: Any, end_of_episode: Any, message: str) -> None:
    with rw.TrajectoryObserver(place.client, "a", 3, num_envs=3) as observer:
        for number in (1, 2, 3):
            if number == 3:
                with pytest.raises(rw.errors.StructureError, match=message):
                    observer(step, end_of_episode=end_of_episode)
            observer(step_of(number, 3))
    assert windows_by_env(place) == {env: [[1, 2, 3]] for env in (1, 2, 3)}


def test_nothing_is_learned_of_a_refused_first_step(place: Place) -> None:
    with rw.TrajectoryObserver(place.client, "a", 1, num_envs=2) as observer:
        with pytest.raises(rw.errors.StructureError, match="`end_of_episode` has shape"):
            observer({"x": np.zeros(2)}, end_of_episode=True)
        first_step = r"first step, leaf `x`: shape \(3,\), expected \(2, \.\.\.\)"
        with pytest.raises(rw.errors.StructureError, match=first_step):
            observer({"x": np.zeros(3)})
        with pytest.raises(rw.errors.StructureError, match=r"`env_mask` has shape \(1,\), expected \(2,\)"):
            observer(step_of(1, 2), env_mask=[True])
        with pytest.raises(rw.errors.StructureError, match="leaf `x`: dtype datetime64"):
            observer({"x": np.zeros(2, "M8[s]")})
        observer(step_of(1, 2))
    assert windows_by_env(place) == {1: [[1]], 2: [[1]]}


@pytest.mark.parametrize("priority", [1.0, lambda _: 1.0], ids=["together", "one by one"])
def test_reset_ends_the_episodes_of_some_environments(place: Place, priority: Any) -> None:
    with rw.TrajectoryObserver(place.client, "a", 3, 2, priority, num_envs=4) as observer:
        observer.reset()  # before the first step
        for number in range(1, 8):
            observer(step_of(number, 4))
            if number == 4:
                observer.reset(env_ids=[0])
                observer.reset(discard=True, env_ids=(1,))
                observer.reset(env_ids=np.array([], int))
                observer.reset(env_ids=np.array([0]))  # of nothing
        observer.reset(env_ids=[3, 2])
        assert observer.stats().dropped_steps == {"reset": 1}
        assert observer.stats().episodes == 4
    assert windows_by_env(place) == {
        1: [[1, 2, 3], [2, 3, 4], [5, 6, 7]],
        2: [[1, 2, 3], [5, 6, 7]],
        3: [[1, 2, 3], [3, 4, 5], [5, 6, 7]],
        4: [[1, 2, 3], [3, 4, 5], [5, 6, 7]],
    }


def test_end_of_an_episode_cuts_no_chunk_of_other_environments(place: Place) -> None:
    """Their complete windows wait for the chunk to be full: many environments would send twice as many chunks else."""
    with rw.TrajectoryObserver(place.client, "a", 2, num_envs=3, max_delay_s=float("inf")) as observer:
        observer(step_of(1, 3))
        observer(step_of(2, 3), end_of_episode=[True, False, False])
        eventually(lambda: observer.stats().acknowledged_items > 0)
        assert (observer.stats().acknowledged_items, observer.stats().pending_items) == (1, 2)
    assert windows_by_env(place) == {env: [[1, 2]] for env in (1, 2, 3)}


def test_reset_of_all_environments_drops_and_counts_those_that_are_too_short(place: Place) -> None:
    with rw.TrajectoryObserver(place.client, "a", 3, num_envs=2) as observer:
        observer(step_of(1, 2), end_of_episode=[True, False])
        observer(step_of(2, 2))
        observer(step_of(3, 2))
        observer.reset()
        assert observer.stats().dropped_steps == {"short_episode": 1 + 2}
    assert windows_by_env(place) == {2: [[1, 2, 3]]}


@pytest.mark.parametrize("env_ids", [[2], [-1], [0, 5], [True, False], [0.0], np.array([True, False])])
def test_environment_numbers_out_of_range_are_refused(place: Place, env_ids: Any) -> None:
    with rw.TrajectoryObserver(place.client, "a", 2, end_of_episode="pad", num_envs=2) as observer:
        observer(step_of(1, 2))
        with pytest.raises(rw.errors.SpecError, match="`env_ids` must be"):
            observer.reset(env_ids=env_ids)
        observer(step_of(2, 2))
    assert windows_by_env(place) == {1: [[1, 2]], 2: [[1, 2]]}
