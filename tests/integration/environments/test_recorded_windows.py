"""Environments that record themselves, to a real server: what an actor saw is what a learner gets."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kinds import contents
from reading import Place, read, read_column

import reverb_writer as rw

gymnasium = pytest.importorskip("gymnasium")

from gymnasium import spaces  # noqa: E402  # as the next two: only where gymnasium is
from gymnasium.vector import AutoresetMode, SyncVectorEnv  # noqa: E402
from worlds import Counting, Sampling  # noqa: E402

pytestmark = contents

# The columns of a step, in the order of dm-tree.
COLUMNS = ["action", "discount", "is_first", "is_last", "observation", "reward", "terminated", "truncated"]
OBSERVATION = COLUMNS.index("observation")


def test_windows_of_an_environment_hold_its_terminal_observations(place: Place) -> None:
    with rw.TrajectoryObserver(
        place.client, "a", sequence_length=3, stride_length=3, end_of_episode="cover"
    ) as observer:
        env = rw.environments.record(Counting([(3, "terminated"), (1, "truncated")]), observer)
        for _ in range(2):
            env.reset()
            over = False
            while not over:
                _, _, terminated, truncated, _ = env.step(7)
                over = terminated or truncated
        env.close()
        assert observer.stats().steps == 4 + 2
        assert observer.stats().episodes == 2
    windows = [dict(zip(COLUMNS, sample.data, strict=True)) for sample in read(place.client, "a")]
    assert [window["observation"][:, 0].tolist() for window in windows] == [[0, 1, 2], [3, 0, 0], [100, 101, 0]]
    assert [window["terminated"].tolist() for window in windows] == [[False] * 3, [True, False, False], [False] * 3]
    assert [window["truncated"].tolist() for window in windows] == [[False] * 3, [False] * 3, [False, True, False]]
    assert [window["discount"].tolist() for window in windows] == [[1, 1, 0], [0, 0, 0], [1, 0, 0]]
    assert [window["action"].tolist() for window in windows] == [[7, 7, 7], [0, 0, 0], [7, 0, 0]]
    assert [window["reward"].tolist() for window in windows] == [[1, 2, 3], [0, 0, 0], [1, 0, 0]]


def test_environments_that_take_no_step_stay_as_they_are(place: Place) -> None:
    def step(number: int) -> dict[str, Any]:
        return {"n": np.array([number, 10 + number, 20 + number])}

    with rw.TrajectoryObserver(place.client, "a", sequence_length=2, stride_length=2, num_envs=3) as observer:
        observer(step(1))
        observer(step(2), env_mask=[True, False, True], end_of_episode=[False, True, True])
        observer(step(3), env_mask=[False, True, False], end_of_episode=[True, True, True])
        observer(step(4), env_mask=[False, False, False])
        observer(step(5))
        observer(step(6), end_of_episode=[True, True, True])
        with pytest.raises(rw.errors.StructureError, match=r"`env_mask` has shape \(2,\), expected \(3,\)"):
            observer(step(7), env_mask=[True, False])
        assert observer.stats().steps == 3 + 2 + 1 + 0 + 3 + 3
    windows = sorted(read_column(place.client, "a"))
    assert windows == [[1, 2], [5, 6], [11, 13], [15, 16], [21, 22], [25, 26]]


@pytest.mark.parametrize("num_envs", [None, 2])
def test_text_comes_back_as_it_was_said(place: Place, num_envs: int | None) -> None:
    space = spaces.Dict(words=spaces.Text(20, charset="äöü abc"), number=spaces.Discrete(9))
    if num_envs is None:
        single = Sampling(space, spaces.Discrete(2))
        with rw.TrajectoryObserver(place.client, "a", sequence_length=4) as observer:
            env = rw.environments.record(single, observer)
            env.reset()
            for _ in range(3):
                env.step(0)
        seen = [[one["words"].encode() for one in single.observed]]
    else:
        envs = [Sampling(space, spaces.Discrete(2)) for _ in range(2)]
        vector = SyncVectorEnv([lambda: envs[0], lambda: envs[1]], autoreset_mode=AutoresetMode.SAME_STEP)
        with rw.TrajectoryObserver(place.client, "a", sequence_length=4, num_envs=2) as observer:
            env = rw.environments.record(vector, observer)
            env.reset()
            for _ in range(3):
                env.step(np.zeros(2, np.int64))
        seen = [[one["words"].encode() for one in env.observed[:4]] for env in envs]
    found = [sample.data[OBSERVATION + 1].tolist() for sample in read(place.client, "a")]
    assert sorted(found) == sorted(seen)
