"""The episodes of environments that step together, as `gymnasium.vector` has them.

What an environment returns at the end of an episode depends on the autoreset mode. `o5` is the terminal observation,
`o0` that of the next reset:

    mode       call   observation  terminated  infos          becomes
    ---------  -----  -----------  ----------  -------------  ------------------------------------------------------
    NEXT_STEP  step   o5           True                       the last step
               step   o0           False                      a new episode's reset; the action did nothing
    SAME_STEP  step   o0           True        final_obs: o5  the last step, with o5, and a new episode's reset
    DISABLED   step   o5           True                       the last step
               reset  o0                                      a new episode's reset, in the lanes of the mask

Source: Gymnasium 1.x, `gymnasium.vector.AutoresetMode`.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tree

from reverb_writer.arguments import integer
from reverb_writer.episodes.episode import Episode
from reverb_writer.errors import SpecError, StructureError

__all__ = ["AutoresetMode", "EpisodeBatch"]

_FINAL_OBSERVATIONS = ("final_obs", "final_observation")


class AutoresetMode(enum.Enum):
    """When a vector environment resets an environment whose episode is over; the values are Gymnasium's."""

    NEXT_STEP = "NextStep"
    SAME_STEP = "SameStep"
    DISABLED = "Disabled"


class EpisodeBatch:
    """N lanes, each with an ongoing `Episode` of its own.

    It takes what a vector environment returns, and gives back each episode when it is over, its terminal observation
    included. A call that raises has changed nothing. Not thread-safe.

    Example:
        batch = rw.EpisodeBatch.of(envs)
        batch.add_env_reset(*envs.reset())
        while training:
            actions = policy(observations)
            observations, *outcome = envs.step(actions)
            for episode in batch.add_env_step(observations, actions, *outcome):
                observer.write_episode(episode)

    Attributes:
        episodes: that of each lane; of a lane that waits for its reset, the one that is over.
        autoreset_mode: when environments reset themselves.
    """

    def __init__(
        self,
        num_envs: int,
        autoreset_mode: Any = AutoresetMode.NEXT_STEP,
        *,
        observation_space: Any = None,
        action_space: Any = None,
    ) -> None:
        """Start with empty episodes.

        Args:
            num_envs: N, >= 1.
            autoreset_mode: ours, Gymnasium's, or its name there, such as "SameStep".
            observation_space: of one environment; needed where a batch is no array, as of texts.
            action_space: of one environment.

        Raises:
            SpecError: there is no such mode, or `num_envs` is no integer >= 1.
        """
        self._num_envs = integer("num_envs", num_envs, minimum=1)
        try:
            self.autoreset_mode = AutoresetMode(getattr(autoreset_mode, "value", autoreset_mode))
        except ValueError:
            names = ", ".join(repr(mode.value) for mode in AutoresetMode)
            raise SpecError(f"`autoreset_mode` must be one of {names}, got {autoreset_mode!r}.") from None
        self._spaces = {"observation_space": observation_space, "action_space": action_space}
        self.episodes = [self._new() for _ in range(self._num_envs)]

    @classmethod
    def of(cls, envs: Any) -> EpisodeBatch:
        """Make the batch for a `gymnasium.vector` environment: its number, spaces and autoreset mode.

        Raises:
            SpecError: its metadata do not tell the mode.
        """
        return cls(
            envs.num_envs,
            envs.metadata.get("autoreset_mode"),
            observation_space=envs.single_observation_space,
            action_space=envs.single_action_space,
        )

    def __len__(self) -> int:
        """Return N."""
        return self._num_envs

    def add_env_reset(
        self, observations: Any, infos: Mapping[str, Any] | None = None, *, reset_mask: Any = None
    ) -> list[Episode]:
        """Add what `envs.reset()` returned.

        Args:
            observations: [N, ...].
            infos: as the vector environment has them.
            reset_mask: [N] booleans, which lanes were reset; None for all.

        Returns:
            The episodes that were cut off by it: ongoing, with steps, and neither terminated nor truncated.

        Raises:
            StructureError: an observation is not in its space, or the mask has not N booleans.
        """
        mask = self._flags("reset_mask", np.ones(self._num_envs, bool) if reset_mask is None else reset_mask)
        started = {int(lane): self._started(observations, infos, int(lane)) for lane in np.flatnonzero(mask)}
        cut_off = [self.episodes[lane] for lane in started]
        for lane, episode in started.items():
            self.episodes[lane] = episode
        return [episode for episode in cut_off if len(episode) and not episode.is_done]

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
            extra_model_outputs: what the model said besides, leaves [N, ...], by name.

        Returns:
            The episodes that this step has ended, in the order of the lanes.

        Raises:
            IncompleteError: there was no reset.
            ClosedError: a lane waits for its reset (DISABLED).
            StructureError: something is not as in the first step, or a terminal observation is missing (SAME_STEP).
        """
        terminateds, truncateds = self._flags("terminateds", terminateds), self._flags("truncateds", truncateds)
        same_step = self.autoreset_mode is AutoresetMode.SAME_STEP
        added: list[Episode] = []
        started: dict[int, Episode] = {}
        try:
            for lane, episode in enumerate(self.episodes):
                if episode.is_done and self.autoreset_mode is AutoresetMode.NEXT_STEP:
                    started[lane] = self._started(observations, infos, lane)
                    continue
                over = bool(terminateds[lane] or truncateds[lane])
                if over and same_step:
                    observation, info = _final(infos, lane)
                    started[lane] = self._started(observations, infos, lane)
                else:
                    observation, info = self._observation(observations, lane), lane_infos(infos, lane)
                episode.add_env_step(
                    observation,
                    _lane(actions, lane, self._spaces["action_space"]),
                    rewards[lane],
                    info,
                    terminated=terminateds[lane],
                    truncated=truncateds[lane],
                    extra_model_outputs=tree.map_structure(lambda leaf: leaf[lane], dict(extra_model_outputs or {})),  # noqa: B023
                )
                added.append(episode)
        except Exception:
            for episode in added:
                episode.forget_last_step()
            raise
        for lane, episode in started.items():
            self.episodes[lane] = episode
        return [episode for episode in added if episode.is_done]

    def cut(self, len_lookback_buffer: int = 0) -> list[Episode]:
        """Return the ongoing episodes that have steps, as chunks; the lanes go on with what follows them.

        Args:
            len_lookback_buffer: see `Episode.cut`.
        """
        chunks = []
        for lane, episode in enumerate(self.episodes):
            if len(episode) and not episode.is_done:
                self.episodes[lane] = episode.cut(len_lookback_buffer)
                chunks.append(episode)
        return chunks

    def _new(self) -> Episode:
        return Episode(**self._spaces)

    def _started(self, observations: Any, infos: Mapping[str, Any] | None, lane: int) -> Episode:
        episode = self._new()
        episode.add_env_reset(self._observation(observations, lane), lane_infos(infos, lane))
        return episode

    def _observation(self, observations: Any, lane: int) -> Any:
        return _lane(observations, lane, self._spaces["observation_space"])

    def _flags(self, name: str, flags: Any) -> npt.NDArray[np.bool_]:
        array = np.asarray(flags)
        if array.shape != (self._num_envs,) or array.dtype.kind != "b":
            raise StructureError(f"`{name}` must be {self._num_envs} booleans, got {array.dtype} {array.shape}.")
        return array


def lane_infos(infos: Mapping[str, Any] | None, lane: int) -> dict[str, Any]:
    """Return the infos of one environment: those that its mask `_key` says it has; all where there is no mask.

    >>> infos = {"lives": [3, 2], "_lives": [True, False]}
    >>> lane_infos(infos, 0), lane_infos(infos, 1)
    ({'lives': 3}, {})
    """
    own = {}
    for key, values in (infos or {}).items():
        mask = (infos or {}).get(f"_{key}")
        if key in (*_FINAL_OBSERVATIONS, "final_info") or (key.startswith("_") and key[1:] in (infos or {})):
            continue
        if mask is None or mask[lane]:
            own[key] = lane_infos(values, lane) if isinstance(values, Mapping) else values[lane]
    return own


def _final(infos: Mapping[str, Any] | None, lane: int) -> tuple[Any, dict[str, Any]]:
    """Return the terminal observation of a lane, and its infos."""
    found = [infos[key][lane] for key in _FINAL_OBSERVATIONS if infos and infos.get(key) is not None]
    if not found or found[0] is None:
        raise StructureError(
            f"lane {lane} has ended, and `infos` have no `final_obs` for it: its terminal observation would be lost. "
            "Pass the infos of the step, or the environment's own `autoreset_mode`."
        )
    final = (infos or {}).get("final_info", {})
    return found[0], lane_infos(final, lane) if isinstance(final, Mapping) else dict(final[lane] or {})


def _lane(batch: Any, lane: int, space: Any) -> Any:
    """Return the part of one environment."""
    parts = getattr(space, "spaces", None)
    if isinstance(parts, Mapping):
        return {key: _lane(batch[key], lane, part) for key, part in parts.items()}
    if isinstance(parts, Sequence):
        return tuple(_lane(item, lane, part) for item, part in zip(batch, parts, strict=True))
    return batch[lane] if space is not None else tree.map_structure(lambda leaf: leaf[lane], batch)
