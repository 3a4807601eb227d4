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
from typing import Any

import numpy as np
import tree
from gymnasium.error import ResetNeeded
from gymnasium.vector import VectorEnv, VectorWrapper

from reverb_writer.environments.recorded_steps import PolicyExtras, recorded_step
from reverb_writer.environments.space_encoding import encoder, space_of, space_spec, zero_element
from reverb_writer.episodes.episode_batch import AutoresetMode, final_observation
from reverb_writer.nests import write_row


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
        self._observer = observer
        self._encode_observations = encoder(observation, n)
        self._encode_observation = encoder(observation)
        self._encode_actions = encoder(action, n)
        self._no_actions = zero_element(action, n)
        self._zeros, self._false, self._true = np.zeros(n, np.float32), np.zeros(n, bool), np.ones(n, bool)
        self._seeds = np.full(n, -1, np.int64) if seeds else None
        self._observations: Any = None
        self._num_steps = np.zeros(n, np.int64)  # of the ongoing episode of each environment
        # Environments whose last step is not yet written, by how they ended; and those that wait for a reset.
        self._terminated, self._truncated, self._over = (self._false.copy() for _ in range(3))
        self._needs_reset = True

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Take a step in every environment and record it, and the terminal observations of episodes that end.

        Raises:
            gymnasium.error.ResetNeeded: before the first `reset`, while an environment waits for a reset, or after
                recording failed: steps would be missing.
            StructureError: the actions are not of their space; nothing changed.
            StructureError, ReplayTimeoutError, ClosedError: as the observer raises. Steps that were written stay
                written; the next `reset` of all environments ends their episodes.
        """
        if self._needs_reset or self._over.any():
            which = "before `step`" if self._needs_reset else f"of environments {np.flatnonzero(self._over).tolist()}"
            raise ResetNeeded(f"Call `reset` {which}: no episode is being recorded, or a step of it was not.")
        action = self._encode_actions(actions)
        ending = self._terminated | self._truncated  # these environments are reset by this step
        extras = None if self._extras is None else self._extras.read(ending)
        result = self.env.step(actions)
        observations, rewards, terminated, truncated, infos = result
        self._needs_reset = True
        if ending.any():
            action = tree.map_structure(lambda taken, none: _choose(ending, none, taken), action, self._no_actions)
        step = recorded_step(
            self._observations,
            action,
            np.where(ending, self._zeros, rewards).astype(np.float32),
            np.logical_not(ending | terminated).astype(np.float32),
            is_first=self._num_steps == 0,
            is_last=ending,
            terminated=self._terminated,
            truncated=self._truncated,
        )
        observations = self._encode_observations(observations)
        self._observer(self._completed(step, extras))
        self._forget(ending)
        self._num_steps += ~ending
        self._observations = observations
        self._terminated, self._truncated = np.array(terminated, bool), np.array(truncated, bool)
        over = self._terminated | self._truncated
        if self._mode is not AutoresetMode.NEXT_STEP and over.any():
            if self._mode is AutoresetMode.SAME_STEP:
                self._observations = self._with_final(observations, infos, over)
            else:
                self._over = over
            self._end_episodes(over)
            self._observations = observations
        self._needs_reset = False
        return result

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin episodes, in the environments of `options["reset_mask"]` or in all.

        Episodes that were not over are recorded as truncated, with their last observation.
        """
        env_mask = (options or {}).get("reset_mask", self._true)  # before the environment removes it
        observations, infos = self.env.reset(seed=seed, options=options)  # type: ignore[arg-type]  # lists are accepted too
        needs_reset, self._needs_reset = self._needs_reset, True
        self._end_episodes(env_mask & (self._num_steps > 0))
        self._observations = self._encode_observations(observations)
        if self._seeds is not None:
            seeds = range(seed, seed + self.num_envs) if isinstance(seed, int) else seed or [None] * self.num_envs
            self._seeds[env_mask] = np.array([-1 if one is None else one for one in seeds], np.int64)[env_mask]
        self._over = self._over & ~env_mask
        self._needs_reset = needs_reset and not env_mask.all()
        return observations, infos

    def close(self, **kwargs: Any) -> None:
        """Record the ends of episodes that were not over, as `reset` does, and close the environment."""
        try:
            self._needs_reset = True
            self._end_episodes(self._num_steps > 0)
        finally:
            self.env.close(**kwargs)

    def _end_episodes(self, env_mask: Any) -> None:
        """Write the last step of some environments, with the observations of now."""
        if not env_mask.any():
            return
        step = recorded_step(
            self._observations,
            self._no_actions,
            self._zeros,
            self._zeros,
            is_first=self._false,
            is_last=self._true,
            terminated=self._terminated,
            truncated=self._truncated | ~self._terminated,
        )
        self._observer(self._completed(step, None if self._extras is None else self._extras.zeros), env_mask=env_mask)
        self._forget(env_mask)

    def _forget(self, env_mask: Any) -> None:
        """Begin new episodes in environments whose last step is written."""
        self._num_steps[env_mask] = 0
        self._terminated, self._truncated = self._terminated & ~env_mask, self._truncated & ~env_mask
        if self._seeds is not None:
            self._seeds[env_mask] = -1

    def _completed(self, step: dict[str, Any], extras: Any) -> dict[str, Any]:
        if self._seeds is not None:
            step["seed"] = self._seeds.copy()
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
