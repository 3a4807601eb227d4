"""Environments of `worlds` as dm_env has them."""

from __future__ import annotations

from typing import Any

import dm_env
import numpy as np


class OfTimeSteps(dm_env.Environment):  # type: ignore[misc]  # dm_env has no types
    """An environment of Gymnasium with dm_env's calls, and a discount of 0.5 between steps."""

    def __init__(self, env: Any) -> None:
        self._env = env
        self._over = True
        self.closed = False

    def reset(self) -> Any:
        self._over = False
        return dm_env.restart(self._env.reset()[0])

    def step(self, action: Any) -> Any:
        if self._over:
            return self.reset()
        observation, reward, terminated, self._over, _ = self._env.step(action)
        self._over |= terminated
        kind = dm_env.StepType.LAST if self._over else dm_env.StepType.MID
        return dm_env.TimeStep(kind, reward, 0.0 if terminated else 1.0 if self._over else 0.5, observation)

    def observation_spec(self) -> Any:
        return dm_env.specs.Array((2,), np.float32)

    def action_spec(self) -> Any:
        return dm_env.specs.DiscreteArray(1000)

    def close(self) -> None:
        self.closed = True
