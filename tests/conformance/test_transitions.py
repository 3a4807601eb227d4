"""Transitions equal those of TF-Agents, whose discounts are 0 where an episode terminates."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tf_agents.trajectories import trajectory as tf_agents_trajectory

import reverb_writer as rw
from reverb_writer.steps import FIRST, LAST, MID

N, GAMMA = 3, 0.9


def windows(num_windows: int = 40, length: int = N + 1) -> rw.Trajectory:
    """Return windows [B, T] of one long stream of episodes, with discounts of their own."""
    rng = np.random.default_rng(0)
    types: list[int] = []
    discounts: list[float] = []
    while len(types) < num_windows + length:
        size = int(rng.integers(1, 6))
        types += [FIRST, *[MID] * (size - 1), LAST]
        discounts += [*rng.choice([1.0, 0.5], size - 1), float(rng.integers(2)), 1.0]
    kinds = np.array(types)
    columns: Any = {
        "step_type": kinds[:-1].astype(np.int32),
        "observation": np.arange(len(kinds) - 1, dtype=np.float32),
        "action": np.arange(len(kinds) - 1, dtype=np.int64),
        "policy_info": (),
        "next_step_type": kinds[1:].astype(np.int32),
        "reward": np.where(kinds == LAST, 0, rng.normal(size=len(kinds)))[:-1].astype(np.float32),
        "discount": np.array(discounts, np.float32)[:-1],
    }
    rows = np.arange(num_windows)[:, None] + np.arange(length)
    return rw.Trajectory(**{name: column[rows] if len(column) else () for name, column in columns.items()})


def theirs(steps: rw.Trajectory) -> Any:
    return tf_agents_trajectory.Trajectory(*steps)


def test_transitions_of_one_step_are_those_of_tf_agents() -> None:
    steps = windows()
    found = rw.to_transitions(steps)
    now, action, then = tf_agents_trajectory.to_transition(theirs(steps))
    is_boundary = np.asarray(now.step_type) == LAST
    np.testing.assert_array_equal(found.mask, ~is_boundary)
    assert 0 < is_boundary.sum() < is_boundary.size
    theirs_of_each = (now.observation, action.action, then.reward, then.discount, then.observation)
    for ours, their in zip(found[:5], theirs_of_each, strict=True):
        np.testing.assert_array_equal(ours[found.mask], np.asarray(their)[found.mask])


@pytest.mark.parametrize("n", [1, 2, N])
def test_transitions_over_n_steps_are_those_of_tf_agents_where_the_episode_has_n(n: int) -> None:
    steps = windows(length=n + 1)
    found = rw.n_step(rw.to_transitions(steps), n, GAMMA)
    now, action, then = tf_agents_trajectory.to_n_step_transition(theirs(steps), gamma=GAMMA)
    # Where it has fewer, the sum of TF-Agents may go on into the next episode.
    is_whole = (np.asarray(steps.step_type)[:, :-1] != LAST).all(axis=1)
    assert 0 < is_whole.sum() < len(is_whole)
    theirs_of_each = (now.observation, action.action, then.reward, then.discount, then.observation)
    for ours, their in zip(found[:5], theirs_of_each, strict=True):
        np.testing.assert_allclose(ours[is_whole, 0], np.asarray(their)[is_whole], rtol=1e-5)
