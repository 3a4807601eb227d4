"""Gymnasium's vector environments that record themselves, in every autoreset mode.

    autoreset    the terminal observation is             the last step of the episode is written
    ---------    ------------------------------------    ---------------------------------------------------
    next step    returned by the `step` that ends it     with the next step of the others, which resets that environment
    same step    in `infos["final_obs"]`                 by itself, at once
    disabled     returned by the `step` that ends it     by itself, at once

See `reverb_writer.episodes.episode_batch` for the modes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import tree
from gymnasium.error import ResetNeeded
from gymnasium.vector import VectorEnv, VectorWrapper

from reverb_writer.environments.recorded_steps import PolicyExtras, Recording, recorded_step
from reverb_writer.environments.space_encoding import encoder, space_of, space_spec, zero_element
from reverb_writer.episodes.episode_batch import AutoresetMode, final_observation
from reverb_writer.nests import write_row


class _Episodes(NamedTuple):
    """The episodes under way: arrays [N] that are never changed in place."""

    observations: Any
    num_steps: Any
    terminated: Any  # with `truncated`, of environments whose last step is not yet written
    truncated: Any
    seeds: Any  # None without seeds

    def without(self, env_mask: Any) -> _Episodes:
        """Return the episodes once the last steps of some environments are written."""
        return self._replace(
            num_steps=np.where(env_mask, 0, self.num_steps),
            terminated=self.terminated & ~env_mask,
            truncated=self.truncated & ~env_mask,
            seeds=None if self.seeds is None else np.where(env_mask, -1, self.seeds),
        )


class VectorRecorder(VectorWrapper):
    """A vector environment that passes every step of its environments to an observer.

    `reverb_writer.environments.recorded_steps` draws the steps.

    Used from one thread at a time. The caller closes the observer.
    """

    def __init__(
        self,
        env: VectorEnv[Any, Any, Any],
        observer: Any,
        *,
        seeds: bool = False,
        extras: Callable[[], Any] | None = None,
    ) -> None:
        """Wrap an environment; arguments and errors as for `record`."""
        n = env.num_envs
        mode = AutoresetMode.parse(env.metadata.get("autoreset_mode"))
        observation = space_spec(space_of(env, "single_observation_space"), "observation")
        action = space_spec(space_of(env, "single_action_space"), "action")
        self._extras = None if extras is None else PolicyExtras(extras, n)
        # After the checks: at garbage collection, some versions of Gymnasium close an environment that was half made.
        super().__init__(env)
        self._mode = mode
        self._encode_observations = encoder(observation, n)
        self._encode_observation = encoder(observation)
        self._encode_actions = encoder(action, n)
        self._no_actions = zero_element(action, n)
        self._zeros, self._false, self._true = np.zeros(n, np.float32), np.zeros(n, bool), np.ones(n, bool)
        none = None if not seeds else np.full(n, -1, np.int64)
        self._recording = Recording(observer, _Episodes(None, np.zeros(n, np.int64), self._false, self._false, none))
        self._over = self._false  # environments that wait for a reset
        self._needs_reset = True

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Take a step in every environment and record it, and the terminal observations of episodes that end.

        Raises:
            gymnasium.error.ResetNeeded: before the first `reset`, while an environment waits for a reset, or after an
                interrupt, or because recording failed: steps would be missing.
            StructureError: the actions are not of their space; nothing changed.
            StructureError, ReplayTimeoutError, ClosedError: as the observer raises. Steps that were written stay
                written; the next `reset` of all environments ends their episodes.
        """
        if self._needs_reset or self._over.any():
            which = "before `step`" if self._needs_reset else f"of environments {np.flatnonzero(self._over).tolist()}"
            raise ResetNeeded(f"Call `reset` {which}: no episode is being recorded, or a step of it was not.")
        episodes = self._recording.state
        action = self._encode_actions(actions)
        ending = episodes.terminated | episodes.truncated  # these environments are reset by this step
        extras = None if self._extras is None else self._extras.read(ending)
        self._needs_reset = True  # an interrupt may come when the environments have taken the step
        try:
            result = self.env.step(actions)
        except Exception:
            self._needs_reset = False
            raise
        observations, rewards, terminated, truncated, infos = result
        if ending.any():
            action = tree.map_structure(lambda taken, none: _choose(ending, none, taken), action, self._no_actions)
        step = recorded_step(
            episodes.observations,
            action,
            np.where(ending, self._zeros, rewards).astype(np.float32),
            np.logical_not(ending | terminated).astype(np.float32),
            is_first=episodes.num_steps == 0,
            is_last=ending,
            terminated=episodes.terminated,
            truncated=episodes.truncated,
        )
        encoded = self._encode_observations(observations)
        terminated, truncated = np.array(terminated, bool), np.array(truncated, bool)
        over = terminated | truncated
        ends_now = self._mode is not AutoresetMode.NEXT_STEP and over.any()
        after = episodes.without(ending)
        after = after._replace(
            observations=self._with_final(encoded, infos, over)
            if ends_now and self._mode is AutoresetMode.SAME_STEP
            else encoded,
            num_steps=after.num_steps + ~ending,
            terminated=terminated,
            truncated=truncated,
        )
        self._recording.write(self._completed(step, episodes, extras), after)
        if ends_now:
            if self._mode is AutoresetMode.DISABLED:
                self._over = over
            self._end_episodes(over, encoded)
        self._needs_reset = False
        return result

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin episodes, in the environments of `options["reset_mask"]` or in all.

        Episodes that were not over are recorded as truncated, with their last observation.
        """
        env_mask = (options or {}).get("reset_mask", self._true)  # before the environment removes it
        needs_reset, self._needs_reset = self._needs_reset, True  # as in `step`
        try:
            observations, infos = self.env.reset(seed=seed, options=options)  # type: ignore[arg-type]  # lists are accepted too
        except Exception:
            self._needs_reset = needs_reset
            raise
        encoded = self._encode_observations(observations)
        self._end_episodes(env_mask, encoded)
        episodes = self._recording.state
        if episodes.seeds is not None:
            given = range(seed, seed + self.num_envs) if isinstance(seed, int) else seed or [None] * self.num_envs
            numbers = np.array([-1 if one is None else one for one in given], np.int64)
            episodes = episodes._replace(seeds=np.where(env_mask, numbers, episodes.seeds))
        self._recording.state = episodes._replace(observations=encoded)
        self._over = self._over & ~env_mask
        self._needs_reset = needs_reset and not env_mask.all()
        return observations, infos

    def close(self, **kwargs: Any) -> None:
        """Record the ends of episodes that were not over, as `reset` does, and close the environment."""
        try:
            self._needs_reset = True
            self._end_episodes(self._true, None)
        finally:
            self.env.close(**kwargs)

    def _end_episodes(self, env_mask: Any, observations: Any) -> None:
        """Write the last step of those of some environments that have steps; then `observations` are those of now."""
        self._recording.settle()
        episodes = self._recording.state
        env_mask = env_mask & (episodes.num_steps > 0)
        if not env_mask.any():
            return
        step = recorded_step(
            episodes.observations,
            self._no_actions,
            self._zeros,
            self._zeros,
            is_first=self._false,
            is_last=self._true,
            terminated=episodes.terminated,
            truncated=episodes.truncated | ~episodes.terminated,
        )
        step = self._completed(step, episodes, None if self._extras is None else self._extras.zeros)
        after = episodes.without(env_mask)._replace(observations=observations)
        self._recording.write(step, after, env_mask=env_mask)

    def _completed(self, step: dict[str, Any], episodes: _Episodes, extras: Any) -> dict[str, Any]:
        if episodes.seeds is not None:
            step["seed"] = episodes.seeds.copy()
        if extras is not None:
            step["extras"] = extras
        return step

    def _with_final(self, observations: Any, infos: dict[str, Any], env_mask: Any) -> Any:
        """Return the observations, with the terminal ones in the environments of the mask."""
        replaced = tree.map_structure(np.copy, observations)
        for env_id in np.flatnonzero(env_mask).tolist():
            write_row(replaced, env_id, self._encode_observation(final_observation(infos, env_id)))
        return replaced


def _choose(env_mask: Any, where: Any, elsewhere: Any) -> Any:
    """Return an array with the rows of `where` in the environments of the mask."""
    chosen = elsewhere.copy()
    chosen[env_mask] = where[env_mask]
    return chosen
