"""Gymnasium's vector environments that record themselves, whichever way they reset.

    autoreset    a lane's terminal observation is        so its last step is written
    ---------    ------------------------------------    ---------------------------------------------------
    next step    what `step` returns when it is over     with the others' next step, which resets that lane
    same step    in `infos["final_obs"]`                 by itself, at once
    disabled     what `step` returns when it is over     by itself, at once

Source: Gymnasium 1.4, `vector/sync_vector_env.py` and `AutoresetMode`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tree
from gymnasium.error import ResetNeeded
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper

from reverb_writer.environments.space_encoding import encoder, space_of, space_spec, zero_element
from reverb_writer.errors import SpecError, StructureError

__all__ = ["VectorRecorder"]


class VectorRecorder(VectorWrapper):
    """A vector environment that passes every step of its environments to an observer.

    `reverb_writer.environments.recorded_steps` draws the steps.

    Used from one thread at a time. Whoever made the observer closes it.
    """

    def __init__(self, env: VectorEnv[Any, Any, Any], observer: Any, *, seeds: bool = False) -> None:
        """Wrap an environment; arguments and errors as for `record`."""
        n = env.num_envs
        mode = env.metadata.get("autoreset_mode")
        if mode is None:
            raise SpecError(
                '`env` does not say when its environments are reset. Set `env.metadata["autoreset_mode"]` to a '
                "`gymnasium.vector.AutoresetMode`."
            )
        observation = space_spec(space_of(env, "single_observation_space"), "observation")
        action = space_spec(space_of(env, "single_action_space"), "action")
        # Only now: some versions of Gymnasium close at garbage collection what has begun to exist.
        super().__init__(env)
        self._mode = AutoresetMode(mode)
        self._observer = observer
        self._encode_observations = encoder(observation, n)
        self._encode_observation = encoder(observation)
        self._encode_actions = encoder(action, n)
        self._no_actions = zero_element(action, n)
        self._zeros, self._false, self._true = np.zeros(n, np.float32), np.zeros(n, bool), np.ones(n, bool)
        self._seeds = np.full(n, -1, np.int64) if seeds else None
        self._observations: Any = None
        self._num_steps = np.zeros(n, np.int64)  # of each lane's episode
        # Why lanes ended whose last step is still to be written, and which were not reset since.
        self._terminated, self._truncated, self._over = (self._false.copy() for _ in range(3))
        self._needs_reset = True

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Take a step in every lane and record it; the terminal observations of lanes that end, too.

        Raises:
            gymnasium.error.ResetNeeded: there are no episodes, a lane that is over was not reset, or recording failed:
                steps would be missing.
            StructureError: the actions are not of their space; nothing changed.
            StructureError, ReplayTimeoutError, ClosedError: as the observer raises. What was written of the episodes is
                ended at the next `reset` of all lanes.
        """
        if self._needs_reset or self._over.any():
            which = "before `step`" if self._needs_reset else f"in lanes {np.flatnonzero(self._over).tolist()}"
            raise ResetNeeded(f"Call `reset` {which}: no episode is being recorded, or a step of it was not.")
        action = self._encode_actions(actions)
        result = self.env.step(actions)
        observations, rewards, terminated, truncated, infos = result
        self._needs_reset = True
        ending = self._terminated | self._truncated  # these lanes have just been reset
        if ending.any():
            action = tree.map_structure(lambda taken, none: _choose(ending, none, taken), action, self._no_actions)
        step = {
            "observation": self._observations,
            "action": action,
            "reward": np.where(ending, self._zeros, rewards).astype(np.float32),
            "discount": np.logical_not(ending | terminated).astype(np.float32),
            "is_first": self._num_steps == 0,
            "is_last": ending,
            "terminated": self._terminated,
            "truncated": self._truncated,
        }
        observations = self._encode_observations(observations)
        self._observer(self._with_seeds(step))
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
        """Begin episodes, in the lanes of `options["reset_mask"]` or in all.

        Those that were not over are recorded as truncated, with the last observation there is.
        """
        lanes = (options or {}).get("reset_mask", self._true)  # the environment takes it out
        observations, infos = self.env.reset(seed=seed, options=options)  # type: ignore[arg-type]  # it takes lists
        needs_reset, self._needs_reset = self._needs_reset, True
        self._end_episodes(lanes & (self._num_steps > 0))
        self._observations = self._encode_observations(observations)
        if self._seeds is not None:
            seeds = range(seed, seed + self.num_envs) if isinstance(seed, int) else seed or [None] * self.num_envs
            self._seeds[lanes] = np.array([-1 if one is None else one for one in seeds], np.int64)[lanes]
        self._over = self._over & ~lanes
        self._needs_reset = needs_reset and not lanes.all()
        return observations, infos

    def close(self, **kwargs: Any) -> None:
        """Record the ends of episodes that were not over, as `reset` does, and close the environment."""
        try:
            self._needs_reset = True
            self._end_episodes(self._num_steps > 0)
        finally:
            self.env.close(**kwargs)

    def _end_episodes(self, lanes: Any) -> None:
        """Write the last step of some lanes, with the observations that there are."""
        if not lanes.any():
            return
        step = {
            "observation": self._observations,
            "action": self._no_actions,
            "reward": self._zeros,
            "discount": self._zeros,
            "is_first": self._false,
            "is_last": self._true,
            "terminated": self._terminated,
            "truncated": self._truncated | ~self._terminated,
        }
        self._observer(self._with_seeds(step), lanes=lanes)
        self._forget(lanes)

    def _forget(self, lanes: Any) -> None:
        """Begin new episodes in lanes whose last step is written."""
        self._num_steps[lanes] = 0
        self._terminated, self._truncated = self._terminated & ~lanes, self._truncated & ~lanes
        if self._seeds is not None:
            self._seeds[lanes] = -1

    def _with_seeds(self, step: dict[str, Any]) -> dict[str, Any]:
        if self._seeds is not None:
            step["seed"] = self._seeds.copy()
        return step

    def _with_final(self, observations: Any, infos: dict[str, Any], lanes: Any) -> Any:
        """Return the observations, those of some lanes replaced by their final ones."""
        if "final_obs" not in infos:
            raise StructureError(
                'the environment resets in the same step, but its infos have no "final_obs": terminal observations '
                f"would be lost. They have {sorted(infos)}. Use another autoreset mode."
            )
        final = infos["final_obs"]
        replaced = tree.map_structure(np.copy, observations)
        for lane in np.flatnonzero(lanes):
            for leaf, value in zip(
                tree.flatten(replaced), tree.flatten(self._encode_observation(final[lane])), strict=True
            ):
                leaf[lane] = value
        return replaced


def _choose(lanes: Any, where: Any, elsewhere: Any) -> Any:
    """Return an array with the rows of `where` in some lanes."""
    chosen = elsewhere.copy()
    chosen[lanes] = where[lanes]
    return chosen
