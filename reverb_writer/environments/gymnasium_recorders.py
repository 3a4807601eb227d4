"""Wrappers that record Gymnasium environments, vector environments, and simulators of many environments.

Environments that step together reset themselves in one of three modes. `o5` is the final observation of an episode,
`o0` the first observation of the next episode:

    mode       call   observation  terminated  infos           the last row is written
    ---------  -----  -----------  ----------  --------------  ------------------------------------
    NEXT_STEP  step   o5           True
               step   o0           False                       with this step, whose action has no effect
    SAME_STEP  step   o0           True        final_obs: o5   at once
    DISABLED   step   o5           True                        at once
               reset  o0                                       in the environments of the mask

A simulator is a `gymnasium.Env` with `num_envs` and batched spaces, such as those of Isaac Lab: it takes and returns
tensors [N, ...], and resets itself in SAME_STEP.

Source: Gymnasium 1.x, `gymnasium.vector.AutoresetMode` and `vector/sync_vector_env.py`; ManiSkill and Isaac Lab (final
observations of all environments in one nest of tensors).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, SupportsFloat

import gymnasium
import numpy as np
import tree
from gymnasium.error import ResetNeeded
from gymnasium.utils import RecordConstructorArgs
from gymnasium.vector import VectorEnv, VectorWrapper
from gymnasium.wrappers import Autoreset

from reverb_writer.environments.extras import Extras
from reverb_writer.environments.recorded_steps import Recording, end_kind, end_kinds
from reverb_writer.episodes.spaces import array_encoder, encoder
from reverb_writer.errors import SpecError, StructureError
from reverb_writer.leaves import host_array
from reverb_writer.nests import write_row

_MODES = ("NextStep", "SameStep", "Disabled")
_FINAL = ("final_obs", "final_observation")  # Gymnasium 1, and older releases

_FLOAT32 = np.dtype(np.float32)
_encode_reward = array_encoder(_FLOAT32, (), "reward", "as rewards are stored")

_OWN_LOOP = """Write your own loop, because observers accept ends without a final observation:
    action = policy(obs)
    next_obs, reward, terminated, truncated, info = env.step(action)
    observer({"observation": obs, "action": action, "reward": reward}, terminated=terminated, truncated=truncated)
    obs = next_obs"""


class Recorder(gymnasium.Wrapper[Any, Any, Any, Any], RecordConstructorArgs):
    """A Gymnasium environment that passes every step to an observer; see `reverb_writer.environments.recorded_steps`.

    Around Gymnasium's `Autoreset`, the resetting step belongs to no episode and is not recorded. An environment made
    again from its `spec` has the same observer.
    """

    def __init__(
        self,
        env: gymnasium.Env[Any, Any],
        observer: Any,
        *,
        extras: Callable[..., Any] | None = None,
        final_extras: Callable[[Any], Any] | None = None,
    ) -> None:
        """Wrap an environment; arguments and errors as for `record`."""
        self._encode_observation = encoder(env, "observation_space")
        self._encode_action = encoder(env, "action_space")
        self._extras, self._has_extras = Extras(extras, final_extras), extras is not None
        RecordConstructorArgs.__init__(
            self, _disable_deepcopy=True, observer=observer, extras=extras, final_extras=final_extras
        )
        gymnasium.Wrapper.__init__(self, env)
        layer: Any = env
        while isinstance(layer, gymnasium.Wrapper) and not isinstance(layer, Autoreset):
            layer = layer.env
        self._autoreset = layer if isinstance(layer, Autoreset) else None
        self._recording = Recording(observer, final_fields=self._extras.final_fields)

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        """Take a step and record it; at the end of an episode, also record the final observation."""
        recording = self._recording
        if recording.needs_reset:
            if recording.state.observation is None and self._autoreset is not None and self._autoreset.autoreset:
                result = recording.call(self.env.step, action)
                recording.first(self._encode_observation(result[0]))
                return result
            raise ResetNeeded("Call `reset` before `step`: no episode is being recorded, or a step of it was not.")
        fields = {"action": self._encode_action(action)}
        if self._has_extras:
            fields.update(self._extras.before())
        result = recording.call(self.env.step, action)
        observation, reward, terminated, truncated, info = result
        fields["reward"] = _encode_reward(reward)
        if self._has_extras:
            fields.update(self._extras.after(info))
        ends = end_kind(terminated=terminated) if terminated or truncated else None
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


class BatchRecording:
    """The recording of N environments that step together; the wrappers below call it."""

    def __init__(
        self,
        spaces: Any,
        mode: str,
        observer: Any,
        extras: Callable[..., Any] | None,
        final_extras: Callable[[Any], Any] | None,
        *,
        is_simulator: bool = False,
    ) -> None:
        """Prepare the recording of the environment `spaces`, which has the number and the spaces of environments."""
        n = self._num_envs = int(spaces.num_envs)
        self._mode, self._is_simulator = mode, is_simulator
        self._encode_observations = encoder(spaces, "single_observation_space", n)
        self._encode_observation = encoder(spaces, "single_observation_space")
        self._encode_actions = encoder(spaces, "single_action_space", n)
        self._encode_rewards = array_encoder(_FLOAT32, (n,), "reward", "as rewards are stored")
        self._extras = Extras(extras, final_extras, n)
        self._recording = Recording(observer, n, mode, self._extras.final_fields)

    def step(self, step: Callable[[Any], Any], actions: Any) -> tuple[Any, Any, Any, Any, Any]:
        """Take a step in every environment; record it and the final observations."""
        recording = self._recording
        if np.count_nonzero(recording.needs_reset):
            missing = np.flatnonzero(recording.needs_reset).tolist()
            which = "before `step`" if len(missing) == self._num_envs else f"of environments {missing}"
            raise ResetNeeded(f"Call `reset` {which}: no episode is being recorded, or a step of it was not.")
        fields = {"action": self._encode_actions(actions), **self._extras.before()}
        result = recording.call(step, actions)
        observations, rewards, terminated, truncated, infos = result
        ends = end_kinds(
            host_array(terminated).astype(bool, copy=False), host_array(truncated).astype(bool, copy=False)
        )
        fields["reward"] = self._encode_rewards(rewards)
        fields.update(self._extras.after(infos))
        following = final = self._encode_observations(observations)
        if self._mode == "SameStep" and ends is not None:
            final = self._with_final(following, infos, ends != 0)
        recording.observe(fields, final, ends, following)
        return result  # type: ignore[no-any-return]

    def reset(self, reset: Callable[..., Any], seed: Any, options: dict[str, Any] | None) -> tuple[Any, Any]:
        """Begin episodes, in the environments of `options["reset_mask"]` or in all."""
        env_mask = (options or {}).get("reset_mask")  # before the environment removes it
        observations, infos = self._recording.call(reset, env_mask=env_mask, seed=seed, options=options)
        self._recording.first(self._encode_observations(observations), env_mask=env_mask)
        return observations, infos

    def end(self) -> None:
        """Record unfinished episodes as truncated."""
        self._recording.end()

    def _with_final(self, observations: Any, infos: Any, env_mask: Any) -> Any:
        """Return the observations, with final observations in the environments of the mask."""
        is_list = not isinstance(infos, Mapping)  # `DictInfoToList`
        name = next((name for name in _FINAL if any(name in info for info in (infos if is_list else [infos]))), None)
        finals = None if name is None else [info.get(name) for info in infos] if is_list else infos[name]
        replaced = tree.map_structure(np.copy, observations)
        if finals is not None and not is_list and not _is_per_env(finals):  # one nest of all environments
            present = infos.get(f"_{name}")
            missing = env_mask & ~(env_mask if present is None else host_array(present).astype(bool))
            if missing.any():
                raise self._without_final(int(np.argmax(missing)), infos)
            batched = self._encode_observations(finals)
            for into, leaf in zip(tree.flatten(replaced), tree.flatten(batched), strict=True):
                into[env_mask] = leaf[env_mask]
            return replaced
        for env_id in np.flatnonzero(env_mask).tolist():
            if finals is None or finals[env_id] is None:
                raise self._without_final(env_id, infos)
            write_row(replaced, env_id, self._encode_observation(finals[env_id]))
        return replaced

    def _without_final(self, env_id: int, infos: Any) -> StructureError:
        names = [*(infos if isinstance(infos, Mapping) else infos[env_id])]
        advice = _OWN_LOOP if self._is_simulator else "Use another `autoreset_mode`."
        return StructureError(
            f"environment {env_id}: its episode is over, and `infos` have no `final_obs` for it, only {names}: its "
            f"final observation would be lost. {advice}"
        )


class VectorRecorder(VectorWrapper):
    """A vector environment that passes every step to an observer; the module's docstring draws the modes."""

    def __init__(
        self,
        env: VectorEnv[Any, Any, Any],
        observer: Any,
        *,
        extras: Callable[..., Any] | None = None,
        final_extras: Callable[[Any], Any] | None = None,
    ) -> None:
        """Wrap an environment; arguments and errors as for `record`."""
        given = env.metadata.get("autoreset_mode")
        mode = getattr(given, "value", given)  # a member of `AutoresetMode`, or its name
        if mode not in _MODES:
            raise SpecError(
                f"`env` must have one of {', '.join(map(repr, _MODES))} as its autoreset mode, got {given!r}. Set "
                '`env.metadata["autoreset_mode"]`.'
            )
        self._batch = BatchRecording(env, mode, observer, extras, final_extras)
        # After the checks: some versions of Gymnasium close a half-made environment at garbage collection.
        super().__init__(env)

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Take a step in every environment; record it and the final observations."""
        return self._batch.step(self.env.step, actions)

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin episodes, in the environments of `options["reset_mask"]` or in all."""
        return self._batch.reset(self.env.reset, seed, options)

    def close(self, **kwargs: Any) -> None:
        """Record unfinished episodes as truncated, and close the environment."""
        try:
            self._batch.end()
        finally:
            self.env.close(**kwargs)


class SimulatorRecorder(gymnasium.Wrapper[Any, Any, Any, Any]):
    """A simulator of N environments that passes every step to an observer; rows are copied to the host."""

    def __init__(
        self,
        env: gymnasium.Env[Any, Any],
        observer: Any,
        *,
        extras: Callable[..., Any] | None = None,
        final_extras: Callable[[Any], Any] | None = None,
    ) -> None:
        """Wrap an environment; arguments and errors as for `record`."""
        self._batch = BatchRecording(env.unwrapped, "SameStep", observer, extras, final_extras, is_simulator=True)
        super().__init__(env)

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Take a step in every environment; record it and the final observations."""
        return self._batch.step(self.env.step, action)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin episodes in all environments."""
        return self._batch.reset(self.env.reset, seed, options)

    def close(self) -> None:
        """Record unfinished episodes as truncated, and close the environment."""
        try:
            self._batch.end()
        finally:
            self.env.close()


def _is_per_env(finals: Any) -> bool:
    """Return whether final observations are a list by environment, as in Gymnasium, and not one nest of arrays."""
    return isinstance(finals, list) or (isinstance(finals, np.ndarray) and finals.dtype == object)
