"""The columns of an episode, and their getters and setters; `episode` adds steps."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from typing import Any

import numpy as np

from reverb_writer.arguments import integer
from reverb_writer.episodes.indexing import Indices
from reverb_writer.episodes.lookback_buffer import InfiniteLookbackBuffer
from reverb_writer.errors import StructureError, UnknownKeyError


def _space_of(column: str, doc: str) -> property:
    def get(episode: EpisodeData) -> Any:
        return getattr(episode, column).space

    def put(episode: EpisodeData, space: Any) -> None:
        getattr(episode, column).space = space

    return property(get, put, doc=doc)


class EpisodeData:
    """The columns of an episode, with getters and setters; see `Episode`.

    `InfiniteLookbackBuffer.get` documents the arguments, results and errors of getters, `InfiniteLookbackBuffer.set`
    those of setters. A setter that raises has changed nothing.
    """

    def __init__(
        self,
        id_: str | None = None,
        *,
        observations: Any = None,
        observation_space: Any = None,
        infos: Any = None,
        actions: Any = None,
        action_space: Any = None,
        rewards: Any = None,
        terminated: bool = False,
        truncated: bool = False,
        extra_model_outputs: Mapping[str, Any] | None = None,
        t_started: int | None = None,
        len_lookback_buffer: int | str = "auto",
        agent_id: Any = None,
        module_id: Any = None,
        multi_agent_episode_id: Any = None,
    ) -> None:
        """Start an episode, empty or with data: lists of items, or nests of arrays [T, ...], which finalize it.

        An `InfiniteLookbackBuffer` is copied together with its look-back.

        Args:
            id_: id of the episode; None for a random one.
            observations: T + 1 observations.
            observation_space: Gymnasium space of an observation; only one-hot vectors need it.
            infos: T + 1 infos; None for empty ones.
            actions: T actions.
            action_space: Gymnasium space of an action; only one-hot vectors need it.
            rewards: T numbers.
            terminated: whether the environment ended in a terminal state.
            truncated: whether a time limit or a similar cause ended the episode.
            extra_model_outputs: more columns of T items, by name.
            t_started: first step of the chunk; None for 0.
            len_lookback_buffer: number of the T steps that are look-back; "auto" for all.
            agent_id: stored as an attribute.
            module_id: stored as an attribute.
            multi_agent_episode_id: stored as an attribute.

        Raises:
            StructureError: the numbers of items do not match, or items differ in structure.
            SpecError: `t_started` or `len_lookback_buffer` is not a number >= 0.
        """
        self.id_ = uuid.uuid4().hex if id_ is None else id_
        self.agent_id = agent_id
        self.module_id = module_id
        self.multi_agent_episode_id = multi_agent_episode_id
        self.rewards = _column(rewards, 0)
        lookback = self.rewards.lookback
        if not isinstance(rewards, InfiniteLookbackBuffer):
            lookback = self.rewards.len_incl_lookback()
            if len_lookback_buffer != "auto":
                lookback = min(lookback, integer("len_lookback_buffer", len_lookback_buffer, minimum=0))
            self.rewards.lookback = lookback
        self.observations = _column(observations, lookback, observation_space)
        if infos is None:
            infos = [{} for _ in range(self.observations.len_incl_lookback())]
        self.infos = _column(infos, lookback, untyped=True)
        self.actions = _column(actions, lookback, action_space)
        self.extra_model_outputs = {key: _column(data, lookback) for key, data in (extra_model_outputs or {}).items()}
        self.is_terminated = bool(terminated)
        self.is_truncated = bool(truncated)
        self.t_started = integer("t_started", 0 if t_started is None else t_started, minimum=0)
        self.t = self.t_started + len(self.rewards)
        self.temporary_timestep_data: dict[str, list[Any]] = {}
        self.custom_data: dict[str, Any] = {}
        self._start_time = self._last_step_time = time.perf_counter()
        self.validate()

    observation_space = _space_of("observations", "The Gymnasium space of an observation, or None; may be set.")
    action_space = _space_of("actions", "The Gymnasium space of an action, or None; may be set.")

    @property
    def is_finalized(self) -> bool:
        """Whether getters return arrays, and no step can be added."""
        return self.rewards.finalized

    is_numpy = is_finalized
    """`is_finalized` under RLlib's newer name."""

    @property
    def is_reset(self) -> bool:
        """Whether the episode has an observation, from the reset or from the step before the chunk."""
        return len(self.observations) > 0

    @property
    def is_done(self) -> bool:
        """Whether the episode is over: terminated or truncated."""
        return self.is_terminated or self.is_truncated

    def start_timer(self, duration_s: float = 0.0) -> None:
        """Restart the timer at `duration_s`, in seconds."""
        self._last_step_time = time.perf_counter()
        self._start_time = self._last_step_time - duration_s

    def get_duration_s(self) -> float:
        """Return the seconds from the reset, or the cut, to the last step; 0.0 if there is none."""
        return self._last_step_time - self._start_time

    def __len__(self) -> int:
        """Return T, the number of steps, without the look-back."""
        return self.t - self.t_started

    def validate(self) -> None:
        """Check that the numbers of items match, without the look-back.

        Raises:
            StructureError: the numbers do not match.
        """
        sizes = {"observations": len(self.observations), "infos": len(self.infos), "actions": len(self.actions)}
        sizes |= {"rewards": len(self.rewards), **{key: len(b) for key, b in self.extra_model_outputs.items()}}
        steps = max(0, sizes["observations"] - 1)
        expected = {key: sizes["observations"] if key in ("observations", "infos") else steps for key in sizes}
        if sizes != expected:
            raise StructureError(f"T steps need T + 1 observations and infos, and T of everything else, got {sizes}.")
        form = self.rewards.rows.form
        if form is not None and not form.is_number:
            raise StructureError("rewards must be numbers.")

    def get_observations(
        self,
        indices: Indices = None,
        *,
        neg_index_as_lookback: bool = False,
        fill: Any = None,
        one_hot_discrete: bool = False,
    ) -> Any:
        """Return one observation, or several; see `InfiniteLookbackBuffer.get`.

        >>> EpisodeData(observations=[4, 5, 6, 7, 8, 9], actions=[0] * 5, rewards=[0] * 5,
        ...             len_lookback_buffer=3).get_observations(slice(-2, 1), neg_index_as_lookback=True)
        [5, 6, 7]
        """
        return self.observations.get(
            indices, neg_index_as_lookback=neg_index_as_lookback, fill=fill, one_hot_discrete=one_hot_discrete
        )

    def get_infos(self, indices: Indices = None, *, neg_index_as_lookback: bool = False, fill: Any = None) -> Any:
        """Return one info, or a list of several, by `indices`; the objects are not copied."""
        return self.infos.get(indices, neg_index_as_lookback=neg_index_as_lookback, fill=fill)

    def get_actions(
        self,
        indices: Indices = None,
        *,
        neg_index_as_lookback: bool = False,
        fill: Any = None,
        one_hot_discrete: bool = False,
    ) -> Any:
        """Return one action, or several; see `InfiniteLookbackBuffer.get`."""
        return self.actions.get(
            indices, neg_index_as_lookback=neg_index_as_lookback, fill=fill, one_hot_discrete=one_hot_discrete
        )

    def get_rewards(self, indices: Indices = None, *, neg_index_as_lookback: bool = False, fill: Any = None) -> Any:
        """Return one reward, or several; see `InfiniteLookbackBuffer.get`."""
        return self.rewards.get(indices, neg_index_as_lookback=neg_index_as_lookback, fill=fill)

    def get_extra_model_outputs(
        self, key: str, indices: Indices = None, *, neg_index_as_lookback: bool = False, fill: Any = None
    ) -> Any:
        """Return one item of the extra model output `key`, or several; see `InfiniteLookbackBuffer.get`.

        Raises:
            UnknownKeyError: no extra model output has this name.
        """
        return self._extra(key).get(indices, neg_index_as_lookback=neg_index_as_lookback, fill=fill)

    def set_observations(
        self, *, new_data: Any, at_indices: Indices = None, neg_index_as_lookback: bool = False
    ) -> None:
        """Overwrite one observation, or several; see `InfiniteLookbackBuffer.set`."""
        self.observations.set(new_data, at_indices=at_indices, neg_index_as_lookback=neg_index_as_lookback)

    def set_actions(self, *, new_data: Any, at_indices: Indices = None, neg_index_as_lookback: bool = False) -> None:
        """Overwrite one action, or several; see `InfiniteLookbackBuffer.set`."""
        self.actions.set(new_data, at_indices=at_indices, neg_index_as_lookback=neg_index_as_lookback)

    def set_rewards(self, *, new_data: Any, at_indices: Indices = None, neg_index_as_lookback: bool = False) -> None:
        """Overwrite one reward, or several; see `InfiniteLookbackBuffer.set`."""
        self.rewards.set(new_data, at_indices=at_indices, neg_index_as_lookback=neg_index_as_lookback)

    def set_extra_model_outputs(
        self, *, key: str, new_data: Any, at_indices: Indices = None, neg_index_as_lookback: bool = False
    ) -> None:
        """Overwrite one item of the extra model output `key`, or several; see `InfiniteLookbackBuffer.set`.

        A new name without `at_indices` adds a column without look-back.

        Raises:
            UnknownKeyError: `at_indices` is given, and no extra model output has this name.
            StructureError: the number of items of a new column differs from the number of steps.
        """
        if key in self.extra_model_outputs or at_indices is not None:
            self._extra(key).set(new_data, at_indices=at_indices, neg_index_as_lookback=neg_index_as_lookback)
            return
        buffer = InfiniteLookbackBuffer(new_data)
        if len(buffer) != len(self):
            raise StructureError(f"`{key}` must have an item for each of {len(self)} steps, got {len(buffer)}.")
        if self.is_finalized:
            buffer.finalize()
        self.extra_model_outputs[key] = buffer

    def _extra(self, key: str) -> InfiniteLookbackBuffer:
        if key not in self.extra_model_outputs:
            names = ", ".join(map(repr, self.extra_model_outputs)) or "none"
            raise UnknownKeyError(f"no extra model outputs are named {key!r}; the names are: {names}.")
        return self.extra_model_outputs[key]

    def get_return(self) -> float:
        """Return the undiscounted sum of the rewards, without the look-back."""
        return float(self.rewards.to_arrays().sum())

    def env_steps(self) -> int:
        """Return the number of steps, without the look-back."""
        return len(self)

    agent_steps = env_steps
    """`env_steps`, because the agent acts at each step."""

    def get_data_dict(self) -> dict[str, Any]:
        """Return T rows under RLlib's names, `obs`, `actions`, ..., without the last observation and the look-back.

        Values are lists; if finalized, arrays, except `infos`.

        >>> EpisodeData("x", observations=[0, 1], actions=[5], rewards=[1.0], len_lookback_buffer=0,
        ...             terminated=True).get_data_dict()  # doctest: +NORMALIZE_WHITESPACE
        {'terminateds': [True], 'truncateds': [False], 't': [0], 'eps_id': ['x'], 'obs': [0], 'infos': [{}],
         'actions': [5], 'rewards': [1.0]}
        """
        num = len(self)
        own: dict[str, Any] = {
            "terminateds": [False] * (num - 1) + [self.is_terminated] * (num > 0),
            "truncateds": [False] * (num - 1) + [self.is_truncated] * (num > 0),
            "t": [*range(self.t_started, self.t)],
            "eps_id": [self.id_] * num,
        }
        if self.is_finalized:
            dtypes = (bool, bool, np.int64, None)
            own = {key: np.array(data, dtype) for (key, data), dtype in zip(own.items(), dtypes, strict=True)}
        return {
            **own,
            "obs": self.get_observations(slice(0, num)),
            "infos": self.get_infos(slice(0, num)),
            "actions": self.get_actions(),
            "rewards": self.get_rewards(),
            **{key: self.get_extra_model_outputs(key) for key in self.extra_model_outputs},
        }


def _column(data: Any, lookback: int, space: Any = None, *, untyped: bool = False) -> InfiniteLookbackBuffer:
    if not isinstance(data, InfiniteLookbackBuffer):
        return InfiniteLookbackBuffer(data, lookback, space, untyped=untyped)
    column = data.part(slice(None), data.lookback)
    column.space = data.space if space is None else space
    return column
