"""Data of the acting policy is in the steps that are recorded."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import reverb_writer as rw

gymnasium = pytest.importorskip("gymnasium")

from gymnasium.vector import AutoresetMode, SyncVectorEnv  # noqa: E402  # only where gymnasium is
from worlds import Counting, counting  # noqa: E402


class Policy:
    """Acts, and remembers what it thought of the action; reuses its arrays, as a recurrent network may."""

    def __init__(self, num_envs: int | None = None) -> None:
        self.shape = () if num_envs is None else (num_envs,)
        self.hidden = np.zeros((*self.shape, 3), np.float32)
        self.calls = 0

    def act(self) -> Any:
        self.calls += 1
        self.hidden[:] = self.calls
        return np.full(self.shape, self.calls)[()]

    def thoughts(self) -> dict[str, Any]:
        return {"log_prob": np.full(self.shape, -float(self.calls), np.float32), "hidden": self.hidden}


def test_log_probabilities_and_hidden_states_stand_beside_their_action_and_zeros_at_the_end() -> None:
    steps: list[Any] = []
    policy = Policy()
    env = rw.environments.record(Counting([(2, "terminated"), (9, "truncated")]), steps.append, extras=policy.thoughts)
    env.reset()
    env.step(policy.act())
    env.step(policy.act())
    env.reset()
    env.step(policy.act())
    env.close()
    assert [int(step["action"]) for step in steps] == [1, 2, 0, 3, 0]
    assert [float(step["extras"]["log_prob"]) for step in steps] == [-1.0, -2.0, 0.0, -3.0, 0.0]
    assert [step["extras"]["hidden"].tolist() for step in steps] == [[n] * 3 for n in (1, 2, 0, 3, 0)]


# An action is the number of the call. Environment 0 has episodes of two steps and of nine; environment 1 of nine.
@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        (AutoresetMode.SAME_STEP, [[1, 2, 0, 3, 4, 0], [1, 2, 3, 4, 0]]),
        (AutoresetMode.NEXT_STEP, [[1, 2, 0, 4, 0], [1, 2, 3, 4, 0]]),
        (AutoresetMode.DISABLED, [[1, 2, 0, 3, 4, 0], [1, 2, 3, 4, 0]]),
    ],
)
def test_vector_environments_have_extras_in_every_mode(mode: AutoresetMode, expected: list[list[int]]) -> None:
    hidden: list[list[int]] = [[], []]
    actions: list[list[int]] = [[], []]

    def observe(step: Any, *, env_mask: Any = None) -> None:
        for env in range(2) if env_mask is None else np.flatnonzero(env_mask):
            assert len(set(step["extras"]["hidden"][env])) == 1
            hidden[env].append(int(step["extras"]["hidden"][env, 0]))
            actions[env].append(int(step["action"][env]))

    policy = Policy(2)
    envs = SyncVectorEnv(
        [counting([(2, "terminated"), (9, "truncated")]), counting([(9, "truncated")])], autoreset_mode=mode
    )
    env = rw.environments.record(envs, observe, extras=policy.thoughts)
    env.reset()
    for _ in range(4):
        over = env.step(policy.act())[2]
        if mode is AutoresetMode.DISABLED and over.any():
            env.reset(options={"reset_mask": over})
    env.close()
    assert hidden == actions == expected


def ignore(step: Any, *, env_mask: Any = None) -> None:
    """Take a step and do nothing."""


def test_extras_that_cannot_be_are_refused_before_the_environment_moves() -> None:
    with pytest.raises(
        rw.errors.SpecError, match="`extras` must be a function without arguments that returns a nest, got di"
    ):
        rw.environments.record(Counting([(2, "terminated")]), print, extras={})  # type: ignore[arg-type]
    envs = SyncVectorEnv([counting([(2, "terminated")])] * 2)
    env = rw.environments.record(envs, ignore, extras=lambda: {"value": np.zeros(3)})
    env.reset()
    with pytest.raises(rw.errors.StructureError, match=r"leaf `value` has shape \(3,\), expected \(2, \.\.\.\)"):
        env.step(np.zeros(2, np.int64))
