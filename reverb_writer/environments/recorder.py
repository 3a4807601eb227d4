"""Gymnasium environments that record themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, SupportsFloat

import gymnasium
import numpy as np
from gymnasium.error import ResetNeeded
from gymnasium.utils import RecordConstructorArgs
from gymnasium.wrappers import Autoreset

from reverb_writer.environments.recorded_steps import FALSE, TRUE, ZERO, PolicyExtras, Recording, recorded_step
from reverb_writer.environments.space_encoding import encoder, space_of, space_spec, zero_element

_ONE = np.float32(1)


class _Episode(NamedTuple):
    """The episode under way."""

    observation: Any = None  # the last one
    seed: Any = np.int64(-1)
    has_steps: bool = False
    ends: tuple[Any, Any] | None = None  # terminated and truncated, before its last step is written


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
        self._recording = Recording(observer, _Episode())
        self._encode_observation = encoder(observation)
        self._encode_action = encoder(action)
        self._no_action = zero_element(action)
        self._seeds = seeds
        self._needs_reset = True

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        """Take a step and record it; with the last step of an episode, also record the final observation.

        Raises:
            gymnasium.error.ResetNeeded: before the first `reset`, after the end of an episode, or after an interrupt,
                or because recording failed: a step would be missing.
            StructureError: the action is not of its space; nothing changed. What `extras` raises goes through likewise.
            StructureError, ReplayTimeoutError, ClosedError: as the observer raises. Steps that were written stay
                written; the next `reset` ends their episode.
        """
        episode = self._recording.state
        if self._needs_reset:
            if self._autoreset is not None and self._autoreset.autoreset and not episode.has_steps:
                result = self.env.step(action)
                self._begin(result[0], seed=None)
                return result
            raise ResetNeeded("Call `reset` before `step`: no episode is being recorded, or a step of it was not.")
        encoded = self._encode_action(action)
        extras = None if self._extras is None else self._extras.read()
        self._needs_reset = True  # an interrupt may come when the environment has taken the step
        try:
            result = self.env.step(action)
        except Exception:
            self._needs_reset = False
            raise
        observation, reward, terminated, truncated, _ = result
        discount = ZERO if terminated else _ONE
        is_first = FALSE if episode.has_steps else TRUE
        step = recorded_step(episode.observation, encoded, np.float32(reward), discount, is_first=is_first)
        if self._seeds:
            step["seed"] = episode.seed
        if extras is not None:
            step["extras"] = extras
        ends = (np.bool_(terminated), np.bool_(truncated)) if terminated or truncated else None
        self._recording.write(step, _Episode(self._encode_observation(observation), episode.seed, True, ends))
        if ends is None:
            self._needs_reset = False
        else:
            self._end_episode()
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
        self._recording.state = _Episode(self._encode_observation(observation), np.int64(-1 if seed is None else seed))
        self._needs_reset = False

    def _end_episode(self) -> None:
        """Write the last step of an episode that has steps."""
        self._needs_reset = True
        self._recording.settle()
        episode = self._recording.state
        if not episode.has_steps:
            return
        terminated, truncated = episode.ends or (FALSE, TRUE)
        step = recorded_step(
            episode.observation, self._no_action, ZERO, ZERO, is_last=TRUE, terminated=terminated, truncated=truncated
        )
        if self._seeds:
            step["seed"] = episode.seed
        if self._extras is not None:
            step["extras"] = self._extras.zeros
        self._recording.write(step, _Episode())


def _layers(env: Any) -> Iterator[Any]:
    """Yield an environment and those that it wraps."""
    while isinstance(env, gymnasium.Wrapper):
        yield env
        env = env.env
    yield env
