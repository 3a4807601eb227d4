"""Steps of environments as their writers have them, for tests of rollout files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import reverb_writer as rw
from reverb_writer.steps import FIRST, LAST, MID


def transition(episode: int, t: int) -> dict[str, Any]:
    """Return step `t` of an episode as the storages of legged robots have it: what was done, and what it brought."""
    return {
        "observation": np.array([episode, t], np.float32),
        "action": np.array([10 * t], np.float32),
        "reward": np.float32(episode + t / 10),
    }


def write_transitions(data_dir: Path, lengths: list[int], *, truncated: tuple[int, ...] = (), **options: Any) -> None:
    """Write episodes of so many steps; those in `truncated` end by a limit."""
    with rw.files.RolloutWriter(data_dir, **options) as writer:
        for episode, length in enumerate(lengths):
            for t in range(length):
                last, is_cut = t == length - 1, episode in truncated
                step = transition(episode, t)
                final = step["observation"]  # so that it is known which one comes
                writer(step, terminated=last and not is_cut, truncated=last and is_cut, final_observation=final)


def tf_agents_steps(episode: int, num_env_steps: int, *, terminal: bool = True) -> list[rw.Trajectory]:
    """Return an episode in TF-Agents' form, its boundary step at the end."""
    steps = []
    for t in range(num_env_steps + 1):
        kind = FIRST if t == 0 else LAST if t == num_env_steps else MID
        following = FIRST if kind == LAST else LAST if t == num_env_steps - 1 else MID
        steps.append(
            rw.Trajectory(
                step_type=np.int32(kind),
                observation=np.array([episode, t], np.float32),
                action=np.int64(t),
                policy_info=(),
                next_step_type=np.int32(following),
                reward=np.float32(0 if kind == LAST else t + 1),
                discount=np.float32(0 if following == LAST and terminal else 1),
            )
        )
    return steps
