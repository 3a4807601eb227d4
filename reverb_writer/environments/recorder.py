"""Gymnasium environments that record themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, SupportsFloat

import gymnasium
import numpy as np
from gymnasium.error import ResetNeeded
from gymnasium.utils import RecordConstructorArgs
from gymnasium.wrappers import Autoreset

from reverb_writer.environments.recorded_steps import FALSE, TRUE, ZERO, PolicyExtras, recorded_step
from reverb_writer.environments.space_encoding import encoder, space_of, space_spec, zero_element

_ONE = np.float32(1)


class Recorder(gymnasium.Wrapper[Any, Any, Any, Any], RecordConstructorArgs):
    """A Gymnasium environment that passes every step to an observer; see `reverb_writer.environments.recorded_steps`.

    Around Gymnasium's `Autoreset`, the step that resets belongs to no episode and is not recorded; the episode after it
    has no seed. An environment that is made again from its `spec` has the same observer.

    Used from one thread at a time. The caller closes the observer.
    """

    def __init__(
        self,
        env: gymnasium.Env[Any, Any],
        observer: Callable[[Any], Any],
        *,
        seeds: bool = False,
        extras: Callable[[], Any] | None = None,
    ) -> None:
        """Wrap an environment; arguments and errors as for `record`."""
        observation = space_spec(space_of(env, "observation_space"), "observation")
        action = space_spec(space_of(env, "action_space"), "action")
        self._extras = None if extras is None else PolicyExtras(extras)
        RecordConstructorArgs.__init__(self, _disable_deepcopy=True, observer=observer, seeds=seeds, extras=extras)
        gymnasium.Wrapper.__init__(self, env)
        self._autoreset = next((layer for layer in _layers(env) if isinstance(layer, Autoreset)), None)
        self._observer = observer
        self._encode_observation = encoder(observation)
        self._encode_action = encoder(action)
        self._no_action = zero_element(action)
        self._seeds = seeds
        self._seed = np.int64(-1)
        self._is_first = TRUE
        self._ends: tuple[Any, Any] | None = None
        self._observation: Any = None
        self._needs_reset = True

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        """Take a step and record it; with the last step of an episode, also record the final observation.

        Raises:
            gymnasium.error.ResetNeeded: before the first `reset`, after the end of an episode, or after recording
                failed: a step would be missing.
            StructureError: the action is not of its space; nothing changed. What `extras` raises goes through likewise.
            StructureError, ReplayTimeoutError, ClosedError: as the observer raises. Steps that were written stay
                written; the next `reset` ends their episode.
        """
        if self._needs_reset:
            if self._autoreset is not None and self._autoreset.autoreset and self._is_first:
                result = self.env.step(action)
                self._begin(result[0], seed=None)
                return result
            raise ResetNeeded("Call `reset` before `step`: no episode is being recorded, or a step of it was not.")
        encoded = self._encode_action(action)
        extras = None if self._extras is None else self._extras.read()
        result = self.env.step(action)
        observation, reward, terminated, truncated, _ = result
        self._needs_reset = True
        discount = ZERO if terminated else _ONE
        step = recorded_step(self._observation, encoded, np.float32(reward), discount, is_first=self._is_first)
        if self._seeds:
            step["seed"] = self._seed
        if extras is not None:
            step["extras"] = extras
        observation = self._encode_observation(observation)
        self._observer(step)
        self._is_first = FALSE
        self._observation = observation
        if terminated or truncated:
            self._ends = np.bool_(terminated), np.bool_(truncated)
            self._end_episode()
        else:
            self._needs_reset = False
        return result

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode. An episode that was not over is recorded as truncated, with its last observation."""
        self._end_episode()
        observation, info = self.env.reset(seed=seed, options=options)
        self._begin(observation, seed)
        return observation, info

    def close(self) -> None:
        """Record the end of an episode that was not over, as `reset` does, and close the environment."""
        try:
            self._end_episode()
        finally:
            self.env.close()

    def _begin(self, observation: Any, seed: int | None) -> None:
        self._observation = self._encode_observation(observation)
        self._seed = np.int64(-1 if seed is None else seed)
        self._is_first = TRUE
        self._needs_reset = False

    def _end_episode(self) -> None:
        """Write the last step of an episode that has steps."""
        self._needs_reset = True
        if self._is_first:
            return
        terminated, truncated = self._ends or (FALSE, TRUE)
        step = recorded_step(
            self._observation, self._no_action, ZERO, ZERO, is_last=TRUE, terminated=terminated, truncated=truncated
        )
        if self._seeds:
            step["seed"] = self._seed
        if self._extras is not None:
            step["extras"] = self._extras.zeros
        self._observer(step)
        self._is_first = TRUE
        self._ends = None


def _layers(env: Any) -> Iterator[Any]:
    """Yield an environment and those that it wraps."""
    while isinstance(env, gymnasium.Wrapper):
        yield env
        env = env.env
    yield env
