"""dm_env environments that record themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import dm_env

from reverb_writer.environments.recorded_steps import PolicyExtras
from reverb_writer.environments.time_steps import TimeStepRecorder
from reverb_writer.errors import StructureError


class RecordedEnvironment(dm_env.Environment):  # type: ignore[misc]  # dm_env has no types
    """A dm_env environment that passes every step to an observer, and otherwise behaves like the one it wraps."""

    def __init__(
        self, env: dm_env.Environment, observer: Callable[[Any], Any], *, extras: Callable[[], Any] | None = None
    ) -> None:
        """Wrap an environment; arguments as for `record`."""
        self._env = env
        self._extras = None if extras is None else PolicyExtras(extras)
        self._recorder = TimeStepRecorder(observer)
        self._needs_reset = False

    def reset(self) -> dm_env.TimeStep:
        """Begin an episode. An episode that was not over is recorded as truncated."""
        self._needs_reset = True
        timestep = self._env.reset()
        self._recorder.observe_first(timestep)
        self._needs_reset = False
        return timestep

    def step(self, action: Any) -> dm_env.TimeStep:
        """Take a step and record it; after the last step of an episode, or before the first, begin a new episode.

        Raises:
            StructureError: after an interrupt, or because recording failed: a step would be missing.
            StructureError, ReplayTimeoutError, ClosedError: as `TimeStepRecorder.observe`.
        """
        if self._needs_reset:
            raise StructureError("call `reset` before `step`: no episode is being recorded; a step is missing.")
        extras = () if self._extras is None else self._extras.read()
        self._needs_reset = True  # an interrupt may come when the environment has taken the step
        try:
            timestep = self._env.step(action)
        except Exception:
            self._needs_reset = False
            raise
        if timestep.first():
            self._recorder.observe_first(timestep)
        else:
            self._recorder.observe(action, timestep, extras)
        self._needs_reset = False
        return timestep

    def observation_spec(self) -> Any:
        """Return the spec of the wrapped environment."""
        return self._env.observation_spec()

    def action_spec(self) -> Any:
        """Return the spec of the wrapped environment."""
        return self._env.action_spec()

    def reward_spec(self) -> Any:
        """Return the spec of the wrapped environment."""
        return self._env.reward_spec()

    def discount_spec(self) -> Any:
        """Return the spec of the wrapped environment."""
        return self._env.discount_spec()

    def close(self) -> None:
        """Record the end of an episode that was not over, and close the environment."""
        try:
            self._recorder.end_episode()
        finally:
            self._env.close()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # `__init__` may not have run, as in a copy
            raise AttributeError(name)
        return getattr(self._env, name)
