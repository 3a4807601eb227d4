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

from .trajectories import Item, Steps, assert_same, play, take

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
