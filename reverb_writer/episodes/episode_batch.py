"""The episodes of environments that step together, as `gymnasium.vector` has them.

What an environment returns at the end of an episode depends on the autoreset mode. `o5` is the terminal observation of
an episode, `o0` the first one of the next:

    mode       call   observation  terminated  infos
    ---------  -----  -----------  ----------  -------------
    NEXT_STEP  step   o5           True
               step   o0           False                      the action of this step has no effect
    SAME_STEP  step   o0           True        final_obs: o5
    DISABLED   step   o5           True
               reset  o0                                      in the environments of the mask

A terminal observation belongs to the last step of its episode, the one after it to the reset of the next episode.

Source: Gymnasium 1.x, `gymnasium.vector.AutoresetMode` and `vector/sync_vector_env.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import tree

from reverb_writer.arguments import integer
from reverb_writer.episodes.episode import CheckedStep, Episode
from reverb_writer.episodes.spaces import parts_of
from reverb_writer.errors import SpecError, StructureError
from reverb_writer.leaves import env_flags

_MODES = ("NextStep", "SameStep", "Disabled")
_FINAL = ("final_obs", "final_info")


def mode_name(mode: Any) -> str:
    """Return the name of an autoreset mode: a member of `gymnasium.vector.AutoresetMode`, or its name already.

    Raises:
        SpecError: there is no such mode.
    """
    name = getattr(mode, "value", mode)
    if name not in _MODES:
        raise SpecError(
            f"`autoreset_mode` must be one of {', '.join(map(repr, _MODES))}, got {mode!r}. If the environment has "
            'none, set `env.metadata["autoreset_mode"]`.'
        )
    return str(name)


def final_observation(infos: Mapping[str, Any], env_id: int) -> Any:
    """Return the terminal observation of an environment that was reset in the same step."""
    found = infos.get("final_obs")
    if found is None or found[env_id] is None:
        raise StructureError(
            f"environment {env_id}: its episode is over, and `infos` have no `final_obs` for it, only {[*infos]}: its "
            "terminal observation would be lost. Pass the infos of the step, or use another `autoreset_mode`."
        )
    return found[env_id]


def env_infos(infos: Mapping[str, Any] | None, env_id: int) -> dict[str, Any]:
    """Return the infos of one environment: those that its mask `_key` says it has; all where there is no mask.

    >>> infos = {"lives": [3, 2], "_lives": [True, False]}
    >>> env_infos(infos, 0), env_infos(infos, 1)
    ({'lives': 3}, {})
    """
    infos = infos or {}
    own = {}
    for key, values in infos.items():
        mask = infos.get(f"_{key}")
        if key in _FINAL or (key.startswith("_") and key[1:] in infos):
            continue
        if mask is None or mask[env_id]:
            own[key] = env_infos(values, env_id) if isinstance(values, Mapping) else values[env_id]
    return own


class EpisodeBatch:
    """The ongoing `Episode` of each of N environments.

    Takes what a vector environment returns, and returns each episode when it is over, with its terminal observation. A
    call that raises has changed nothing. Not thread-safe.

    Example:
        batch = rw.EpisodeBatch.of(envs)
        batch.add_env_reset(*envs.reset())
        while training:
            actions = policy(observations)
            observations, *outcome = envs.step(actions)
            for episode in batch.add_env_step(observations, actions, *outcome):
                observer.write_episode(episode)

    Attributes:
        episodes: that of each environment; until an environment is reset, the episode that is over.
        autoreset_mode: when environments reset themselves: "NextStep", "SameStep" or "Disabled".
    """

    def __init__(
        self,
        num_envs: int,
        autoreset_mode: Any = "NextStep",
        *,
        observation_space: Any = None,
        action_space: Any = None,
    ) -> None:
        """Start with empty episodes.

        Args:
            num_envs: N, >= 1.
            autoreset_mode: a member of `gymnasium.vector.AutoresetMode`, or its name, such as "SameStep".
            observation_space: of one environment; needed where a batch is not an array, as of texts.
            action_space: of one environment.

        Raises:
            SpecError: there is no such mode, or `num_envs` is not an integer >= 1.
        """
        num_envs = integer("num_envs", num_envs, minimum=1)
        self.autoreset_mode = mode_name(autoreset_mode)
        self._spaces = {"observation_space": observation_space, "action_space": action_space}
        self.episodes = [Episode(**self._spaces) for _ in range(num_envs)]

    @classmethod
    def of(cls, envs: Any) -> EpisodeBatch:
        """Make the batch for `envs`, of `gymnasium.vector`: its number, spaces and autoreset mode.

        Raises:
            SpecError: its metadata do not tell the mode.
        """
        return cls(
            envs.num_envs,
            envs.metadata.get("autoreset_mode"),
            observation_space=envs.single_observation_space,
            action_space=envs.single_action_space,
        )

    def __repr__(self) -> str:
        return f"<EpisodeBatch of {len(self)} environments: {[len(episode) for episode in self.episodes]} steps>"

    def __len__(self) -> int:
        return len(self.episodes)

    def add_env_reset(
        self, observations: Any, infos: Mapping[str, Any] | None = None, *, reset_mask: Any = None
    ) -> list[Episode]:
        """Add what `envs.reset()` returned.

        Args:
            observations: [N, ...].
            infos: as the vector environment has them.
            reset_mask: [N] booleans, which environments were reset; None for all.

        Returns:
            The episodes that the reset interrupts: those with steps that are neither terminated nor truncated.

        Raises:
            StructureError: an observation is not in its space, or the mask has not N booleans.
        """
        mask = np.ones(len(self), bool) if reset_mask is None else env_flags("reset_mask", reset_mask, len(self))
        started = {env_id: self._started(observations, infos, env_id) for env_id in np.flatnonzero(mask).tolist()}
        interrupted = [self.episodes[env_id] for env_id in started]
        for env_id, episode in started.items():
            self.episodes[env_id] = episode
        return [episode for episode in interrupted if len(episode) and not episode.is_done]

    def add_env_step(
        self,
        observations: Any,
        actions: Any,
        rewards: Any,
        terminateds: Any,
        truncateds: Any,
        infos: Mapping[str, Any] | None = None,
        *,
        extra_model_outputs: Mapping[str, Any] | None = None,
    ) -> list[Episode]:
        """Add what `envs.step(actions)` returned.

        Args:
            observations: [N, ...].
            actions: [N, ...].
            rewards: [N] numbers.
            terminateds: [N] booleans.
            truncateds: [N] booleans.
            infos: as the vector environment has them.
            extra_model_outputs: further outputs of the model by name, leaves [N, ...].

        Returns:
            The episodes that this step has ended, in the order of the environments.

        Raises:
            IncompleteError: there was no reset.
            ClosedError: an environment was not reset after the end of its episode (DISABLED).
            StructureError: a structure or shape differs from that of the first step, or a terminal observation is
                missing (SAME_STEP).
        """
        terminateds = env_flags("terminateds", terminateds, len(self))
        truncateds = env_flags("truncateds", truncateds, len(self))
        over, infos = terminateds | truncateds, infos or {}
        checked: list[tuple[Episode, CheckedStep, Any, int]] = []
        started: dict[int, Episode] = {}
        for env_id, episode in enumerate(self.episodes):
            if episode.is_done and self.autoreset_mode == "NextStep":
                started[env_id] = self._started(observations, infos, env_id)
                continue
            if over[env_id] and self.autoreset_mode == "SameStep":
                observation, info = final_observation(infos, env_id), env_infos(infos.get("final_info"), env_id)
                started[env_id] = self._started(observations, infos, env_id)
            else:
                observation, info = self._observation(observations, env_id), env_infos(infos, env_id)
            action = _part(actions, env_id, self._spaces["action_space"])
            extras = _part(dict(extra_model_outputs or {}), env_id, None)
            step = episode._checked_step(observation, action, rewards[env_id], extras)  # noqa: SLF001  # all or none
            checked.append((episode, step, info, env_id))
        for episode, step, info, env_id in checked:
            episode._take(step, info, terminateds[env_id], truncateds[env_id])  # noqa: SLF001
        for env_id, episode in started.items():
            self.episodes[env_id] = episode
        return [episode for episode, *_ in checked if episode.is_done]

    def cut(self, len_lookback_buffer: int = 0) -> list[Episode]:
        """Return the ongoing episodes that have steps, as chunks; later steps go into the chunks that follow them.

        Args:
            len_lookback_buffer: see `Episode.cut`.
        """
        chunks = []
        for env_id, episode in enumerate(self.episodes):
            if len(episode) and not episode.is_done:
                self.episodes[env_id] = episode.cut(len_lookback_buffer)
                chunks.append(episode)
        return chunks

    def _started(self, observations: Any, infos: Mapping[str, Any] | None, env_id: int) -> Episode:
        episode = Episode(**self._spaces)
        episode.add_env_reset(self._observation(observations, env_id), env_infos(infos, env_id))
        return episode

    def _observation(self, observations: Any, env_id: int) -> Any:
        return _part(observations, env_id, self._spaces["observation_space"])


def _part(batch: Any, env_id: int, space: Any) -> Any:
    """Return what a batch has of one environment; `space` is that of a single environment, or None."""
    parts = parts_of(space)
    if isinstance(parts, dict):
        return {key: _part(batch[key], env_id, part) for key, part in parts.items()}
    if parts is not None:
        return tuple(_part(item, env_id, part) for item, part in zip(batch, parts, strict=True))
    return batch[env_id] if space is not None else tree.map_structure(lambda leaf: leaf[env_id], batch)
