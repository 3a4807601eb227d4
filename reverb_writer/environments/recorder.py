"""Gymnasium environments that record themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, SupportsFloat

import gymnasium
import numpy as np
from gymnasium.error import ResetNeeded
from gymnasium.utils import RecordConstructorArgs
from gymnasium.wrappers import Autoreset

from reverb_writer.environments.recorded_steps import Recording, extras_reader
from reverb_writer.environments.space_leaves import encoder, space_of, space_spec

_ZERO, _ONE = np.float32(0), np.float32(1)


class Recorder(gymnasium.Wrapper[Any, Any, Any, Any], RecordConstructorArgs):
    """A Gymnasium environment that passes every step to an observer; see `reverb_writer.environments.recorded_steps`.

    Around Gymnasium's `Autoreset`, the step that resets belongs to no episode and is not recorded. An environment that
    is made again from its `spec` has the same observer.
    """

    def __init__(
        self,
        env: gymnasium.Env[Any, Any],
        observer: Callable[[Any], Any],
        *,
        extras: Callable[[], Any] | None = None,
    ) -> None:
        """Wrap an environment; arguments and errors as for `record`."""
        observation = space_spec(space_of(env, "observation_space"), "observation")
        action = space_spec(space_of(env, "action_space"), "action")
        self._read_extras = extras_reader(extras)
        RecordConstructorArgs.__init__(self, _disable_deepcopy=True, observer=observer, extras=extras)
        gymnasium.Wrapper.__init__(self, env)
        self._autoreset = next((layer for layer in _layers(env) if isinstance(layer, Autoreset)), None)
        self._recording = Recording(observer)
        self._encode_observation = encoder(observation)
        self._encode_action = encoder(action)

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        """Take a step and record it; with the last step of an episode, also record the final observation."""
        recording = self._recording
        if recording.needs_reset:
            if recording.state.observation is None and self._autoreset is not None and self._autoreset.autoreset:
                result = recording.call(self.env.step, action)
                self._begin(result[0])
                return result
            raise ResetNeeded("Call `reset` before `step`: no episode is being recorded, or a step of it was not.")
        encoded, extras = self._encode_action(action), self._read_extras()
        result = recording.call(self.env.step, action)
        observation, reward, terminated, truncated, _ = result
        fields = {"action": encoded, "reward": np.float32(reward), "discount": _ZERO if terminated else _ONE, **extras}
        ends = (np.bool_(terminated), np.bool_(truncated)) if terminated or truncated else None
        recording.observe(fields, self._encode_observation(observation), ends)
        return result

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode."""
        self._recording.end()
        observation, info = self.env.reset(seed=seed, options=options)
        self._begin(observation)
        return observation, info

    def close(self) -> None:
        """Record the end of an episode that was not over, and close the environment."""
        try:
            self._recording.end()
        finally:
            self.env.close()

    def _begin(self, observation: Any) -> None:
        self._recording.first(self._encode_observation(observation))


def _layers(env: Any) -> Iterator[Any]:
    """Yield an environment and those that it wraps."""
    while isinstance(env, gymnasium.Wrapper):
        yield env
        env = env.env
    yield env
