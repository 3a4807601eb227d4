"""One `TrajectoryObserver` for many environments writes for each what an observer of TF-Agents writes.

TF-Agents has no batched observer: users call one observer for each environment (tensorflow/agents#772). The thousands
of its step numbers tell which environment a window is from; the order within an environment is the order of the table.
"""

from __future__ import annotations

from contextlib import closing
from typing import Any

import numpy as np
import pytest
import tree
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tf_agents.replay_buffers import reverb_utils as theirs

import reverb_writer as rw

from .trajectories import Item, Steps, assert_same, labels, play, take

pytestmark = pytest.mark.filterwarnings("ignore:`stride_length`")

MODES = {"drop": (False, False), "pad": (True, False), "tile": (True, True)}
ENV = 1000


def streams(lengths: list[list[int]]) -> list[list[Any]]:
    """Make one stream of episodes an environment, all as long as the shortest one."""
    envs = []
    for env_id, episodes in enumerate(lengths):
        steps = Steps(first=ENV * env_id + 1)
        envs.append([step for n in episodes for step in steps.episode(n)])
    num_steps = min(map(len, envs))
    return [env_id[:num_steps] for env_id in envs]


def by_env(items: list[Item]) -> dict[int, list[Item]]:
    envs: dict[int, list[Item]] = {}
    for item in items:
        envs.setdefault(int(item.window.observation["number"].max()) // ENV, []).append(item)
    return envs


def expected_items(peer: Any, envs: list[list[Any]], *arguments: Any) -> dict[int, list[Item]]:
    for env_id in envs:
        with closing(theirs.ReverbAddTrajectoryObserver(peer, "theirs", *arguments)) as observer:
            play(observer, env_id)
    return by_env(take(peer, "theirs"))


def assert_same_envs(items: list[Item], expected: dict[int, list[Item]]) -> None:
    found = by_env(items)
    assert found.keys() == expected.keys()
    for env_id, env_items in found.items():
        assert_same(env_items, expected[env_id])


@settings(
    max_examples=100, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    numbers=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    mode=st.sampled_from(list(MODES)),
    lengths=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=6), min_size=1, max_size=4),
    chunk_length=st.none() | st.integers(1, 9),
)
def test_each_env_gives_the_windows_of_an_observer_of_its_own(
    peer: Any, numbers: tuple[int, int], mode: str, lengths: list[list[int]], chunk_length: int | None
) -> None:
    envs = streams(lengths)
    expected = expected_items(peer, envs, *numbers, 1.0, *MODES[mode])
    observer = rw.TrajectoryObserver(
        peer, "ours", *numbers, num_envs=len(envs), end_of_episode=mode, chunk_length=chunk_length
    )
    with closing(observer):
        for steps in zip(*envs, strict=True):
            observer(tree.map_structure(lambda *leaves: np.stack(leaves), *steps))
    assert_same_envs(take(peer, "ours"), expected)


def test_envs_are_reset_one_by_one(peer: Any) -> None:
    first, second = streams([[9], [9]])
    observer = rw.TrajectoryObserver(peer, "ours", 3, 2, num_envs=2, end_of_episode="pad")
    with closing(observer):
        for t, steps in enumerate(zip(first, second, strict=True)):
            if t == 2:
                observer.reset(env_ids=[1])
            if t == 6:
                observer.reset(discard=True, env_ids=[0])
            observer(tree.map_structure(lambda *leaves: np.stack(leaves), *steps))
    found = {env_id: labels(items) for env_id, items in by_env(take(peer, "ours")).items()}
    assert found == {
        0: ["1 2 3", "3 4 5", "7 8 9B"],
        1: ["1001 1002 P", "1003 1004 1005", "1005 1006 1007", "1007 1008 1009B"],
    }


def test_envs_of_sixty_four_environments_are_the_same(peer: Any) -> None:
    rng = np.random.default_rng(0)
    envs = streams([rng.integers(1, 60, 8).tolist() for _ in range(64)])
    expected = expected_items(peer, envs, 20, 10, 1.0, True, True)
    with closing(rw.TrajectoryObserver(peer, "ours", 20, 10, num_envs=64, end_of_episode="tile")) as observer:
        for steps in zip(*envs, strict=True):
            observer(tree.map_structure(lambda *leaves: np.stack(leaves), *steps))
    assert_same_envs(take(peer, "ours"), expected)
