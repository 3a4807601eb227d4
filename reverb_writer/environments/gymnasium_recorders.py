"""Wrappers that record Gymnasium environments and vector environments.

A vector environment resets itself in one of three modes. `o5` is the terminal observation of an episode,
`o0` the first observation of the next episode:

    mode       call   observation  terminated  infos           the last step is written
    ---------  -----  -----------  ----------  --------------  ------------------------------------
    NEXT_STEP  step   o5           True
               step   o0           False                       with this step, whose action has no effect
    SAME_STEP  step   o0           True        final_obs: o5   at once
    DISABLED   step   o5           True                        at once
               reset  o0                                       in the environments of the mask

Source: Gymnasium 1.x, `gymnasium.vector.AutoresetMode` and `vector/sync_vector_env.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, SupportsFloat

import gymnasium
import numpy as np
import tree
from gymnasium.error import ResetNeeded
from gymnasium.utils import RecordConstructorArgs
from gymnasium.vector import VectorEnv, VectorWrapper
from gymnasium.wrappers import Autoreset

from reverb_writer.environments.recorded_steps import Recording, extras_reader
from reverb_writer.episodes.spaces import encoder
from reverb_writer.errors import SpecError, StructureError
from reverb_writer.nests import write_row

_ZERO, _ONE = np.float32(0), np.float32(1)
_MODES = ("NextStep", "SameStep", "Disabled")


class Recorder(gymnasium.Wrapper[Any, Any, Any, Any], RecordConstructorArgs):
    """A Gymnasium environment that passes every step to an observer; see `reverb_writer.environments.recorded_steps`.

    Around Gymnasium's `Autoreset`, the resetting step belongs to no episode and is not recorded. An environment made
    again from its `spec` has the same observer.
    """

    def __init__(
        self, env: gymnasium.Env[Any, Any], observer: Callable[[Any], Any], *, extras: Callable[[], Any] | None = None
    ) -> None:
        """Wrap an environment; arguments and errors as for `record`."""
        self._encode_observation = encoder(env, "observation_space")
        self._encode_action = encoder(env, "action_space")
        self._read_extras = extras_reader(extras)
        RecordConstructorArgs.__init__(self, _disable_deepcopy=True, observer=observer, extras=extras)
        gymnasium.Wrapper.__init__(self, env)
        layer: Any = env
        while isinstance(layer, gymnasium.Wrapper) and not isinstance(layer, Autoreset):
            layer = layer.env
        self._autoreset = layer if isinstance(layer, Autoreset) else None
        self._recording = Recording(observer)

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        """Take a step and record it; at the end of an episode, also record the final observation."""
        recording = self._recording
        if recording.needs_reset:
            if recording.state.observation is None and self._autoreset is not None and self._autoreset.autoreset:
                result = recording.call(self.env.step, action)
                recording.first(self._encode_observation(result[0]))
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
        self._recording.first(self._encode_observation(observation))
        return observation, info

    def close(self) -> None:
        """Record an unfinished episode as truncated, and close the environment."""
        try:
            self._recording.end()
        finally:
            self.env.close()


class VectorRecorder(VectorWrapper):
    """A vector environment that passes every step to an observer; the module's docstring draws the modes."""

    def __init__(
        self, env: VectorEnv[Any, Any, Any], observer: Any, *, extras: Callable[[], Any] | None = None
    ) -> None:
        """Wrap an environment; arguments and errors as for `record`."""
        n = env.num_envs
        given = env.metadata.get("autoreset_mode")
        mode = getattr(given, "value", given)  # a member of `AutoresetMode`, or its name
        if mode not in _MODES:
            raise SpecError(
                f"`env` must have one of {', '.join(map(repr, _MODES))} as its autoreset mode, got {given!r}. Set "
                '`env.metadata["autoreset_mode"]`.'
            )
        self._encode_observations = encoder(env, "single_observation_space", n)
        self._encode_observation = encoder(env, "single_observation_space")
        self._encode_actions = encoder(env, "single_action_space", n)
        self._read_extras = extras_reader(extras, n)
        # After the checks: some versions of Gymnasium close a half-made environment at garbage collection.
        super().__init__(env)
        self._mode = mode
        self._recording = Recording(observer, n, mode)

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Take a step in every environment; record it and the terminal observations."""
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
        """Record unfinished episodes as truncated, and close the environment."""
        try:
            self._recording.end()
        finally:
            self.env.close(**kwargs)

    def _with_final(self, observations: Any, infos: dict[str, Any], env_mask: Any) -> Any:
        """Return the observations, with terminal observations in the environments of the mask."""
        replaced, finals = tree.map_structure(np.copy, observations), infos.get("final_obs")
        for env_id in np.flatnonzero(env_mask).tolist():
            if finals is None or finals[env_id] is None:
                raise StructureError(
                    f"environment {env_id}: its episode is over, and `infos` have no `final_obs` for it, only "
                    f"{[*infos]}: its terminal observation would be lost. Use another `autoreset_mode`."
                )
            write_row(replaced, env_id, self._encode_observation(finals[env_id]))
        return replaced
