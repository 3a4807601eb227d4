"""A wrapper that records a dm_env environment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import dm_env

from reverb_writer.environments.extras import Extras
from reverb_writer.environments.recorded_steps import Recording
from reverb_writer.environments.time_steps import begin, take
from reverb_writer.errors import StructureError


class RecordedEnvironment(dm_env.Environment):  # type: ignore[misc]  # dm_env has no types
    """A dm_env environment that passes every step to an observer, and otherwise behaves like the wrapped one."""

    def __init__(
        self,
        env: dm_env.Environment,
        observer: Any,
        *,
        extras: Callable[[], Any] | None = None,
        final_extras: Callable[[Any], Any] | None = None,
    ) -> None:
        """Wrap an environment; arguments as for `record`."""
        self._env = env
        self._extras = Extras(extras, final_extras, has_info=False)
        self._recording = Recording(observer, final_fields=self._extras.final_fields)

    def reset(self) -> dm_env.TimeStep:
        """Begin an episode."""
        timestep = self._recording.call(self._env.reset)
        begin(self._recording, timestep)
        return timestep

    def step(self, action: Any) -> dm_env.TimeStep:
        """Take a step and record it; before the first step or after the last one, begin an episode."""
        recording = self._recording
        if recording.needs_reset and recording.state.observation is not None:
            raise StructureError("call `reset` before `step`: no episode is being recorded; a step is missing.")
        extras = self._extras.before().get("extras", ())
        timestep = recording.call(self._env.step, action)
        if timestep.first():
            begin(recording, timestep)
        else:
            take(recording, action, timestep, extras)
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
        """Record an unfinished episode as truncated, and close the environment."""
        try:
            self._recording.end()
        finally:
            self._env.close()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # `__init__` may not have run, as in a copy
            raise AttributeError(name)
        return getattr(self._env, name)
