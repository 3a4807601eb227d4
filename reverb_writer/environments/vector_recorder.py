"""Gymnasium's vector environments that record themselves, in every autoreset mode (see `episodes.episode_batch`).

In the mode "NextStep" the last step of an episode is written with the next step of the others, which resets that
environment; in the other modes by itself, at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tree
from gymnasium.error import ResetNeeded
from gymnasium.vector import VectorEnv, VectorWrapper

from reverb_writer.environments.recorded_steps import Recording, extras_reader
from reverb_writer.environments.space_leaves import encoder, space_of, space_spec
from reverb_writer.episodes.episode_batch import final_observation, mode_name
from reverb_writer.nests import write_row


class VectorRecorder(VectorWrapper):
    """A vector environment that passes every step of its environments to an observer.

    `reverb_writer.environments.recorded_steps` draws the steps.
    """

    def __init__(
        self,
        env: VectorEnv[Any, Any, Any],
        observer: Any,
        *,
        extras: Callable[[], Any] | None = None,
    ) -> None:
        """Wrap an environment; arguments and errors as for `record`."""
        n = env.num_envs
        mode = mode_name(env.metadata.get("autoreset_mode"))
        observation = space_spec(space_of(env, "single_observation_space"), "observation")
        action = space_spec(space_of(env, "single_action_space"), "action")
        self._read_extras = extras_reader(extras, n)
        # After the checks: at garbage collection, some versions of Gymnasium close an environment that was half made.
        super().__init__(env)
        self._mode = mode
        self._encode_observations = encoder(observation, n)
        self._encode_observation = encoder(observation)
        self._encode_actions = encoder(action, n)
        self._recording = Recording(observer, n, mode)

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Take a step in every environment and record it, and the terminal observations of episodes that end."""
        recording = self._recording
        if recording.needs_reset.any():
            missing = np.flatnonzero(recording.needs_reset).tolist()
            which = "before `step`" if len(missing) == self.num_envs else f"of environments {missing}"
            raise ResetNeeded(f"Call `reset` {which}: no episode is being recorded, or a step of it was not.")
        encoded, extras = self._encode_actions(actions), self._read_extras()
        result = recording.call(self.env.step, actions)
        observations, rewards, terminated, truncated, infos = result
        terminated, truncated = np.array(terminated, bool), np.array(truncated, bool)
        fields = {
            "action": encoded,
            "reward": np.asarray(rewards).astype(np.float32),
            "discount": (~terminated).astype(np.float32),
            **extras,
        }
        following = final = self._encode_observations(observations)
        over = terminated | truncated
        if self._mode == "SameStep" and over.any():
            final = self._with_final(following, infos, over)
        recording.observe(fields, final, (terminated, truncated) if over.any() else None, following)
        return result

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin episodes, in the environments of `options["reset_mask"]` or in all."""
        env_mask = (options or {}).get("reset_mask")  # before the environment removes it
        observations, infos = self._recording.call(self.env.reset, env_mask=env_mask, seed=seed, options=options)
        self._recording.first(self._encode_observations(observations), env_mask=env_mask)
        return observations, infos

    def close(self, **kwargs: Any) -> None:
        """Record the ends of episodes that were not over, and close the environment."""
        try:
            self._recording.end()
        finally:
            self.env.close(**kwargs)

    def _with_final(self, observations: Any, infos: dict[str, Any], env_mask: Any) -> Any:
        """Return the observations, with the terminal ones in the environments of the mask."""
        replaced = tree.map_structure(np.copy, observations)
        for env_id in np.flatnonzero(env_mask).tolist():
            write_row(replaced, env_id, self._encode_observation(final_observation(infos, env_id)))
        return replaced
