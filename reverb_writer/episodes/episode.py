"""`Episode`: an environment's episode, or a chunk of it, in an actor's memory."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from reverb_writer.arguments import integer
from reverb_writer.episodes import episode_steps
from reverb_writer.episodes.episode_data import EpisodeData
from reverb_writer.episodes.lookback_buffer import BROKEN_STATE, InfiniteLookbackBuffer
from reverb_writer.episodes.spaces import check
from reverb_writer.errors import ClosedError, FormatError, IncompleteError, SpecError, StructureError, UnknownKeyError
from reverb_writer.rows import LastRow

_CHECK_EVERY = 50

# Contents of a state: attributes that are never changed in place, columns, and the user's objects.
_IDS = ("id_", "agent_id", "module_id", "multi_agent_episode_id")
_PLAIN = (*_IDS, "t_started", "t", "is_terminated", "is_truncated")
_COLUMNS = ("observations", "infos", "actions", "rewards")
_OBJECTS = ("temporary_timestep_data", "custom_data")


class Episode(EpisodeData):
    """An episode of one agent, or a chunk of one: T steps, T + 1 observations and infos, and a look-back before them.

    Getters return lists before `finalize()`, and arrays after it. Arguments are copied, except infos, which may be any
    objects; the caller owns results. A call that raises has changed nothing. Not thread-safe.

    Source: RLlib 2.35 `SingleAgentEpisode`; docs/how-to/from-rllib.md lists the differences.

    Attributes:
        id_: id of the episode; its chunks share it.
        agent_id, module_id, multi_agent_episode_id: any values of the caller.
        t_started: first step of this chunk in the environment's episode, >= 0.
        t: the current step: t_started + len(self).
        is_terminated: whether the environment ended in a terminal state.
        is_truncated: whether a time limit or a similar cause ended the episode.
        observations, infos, actions, rewards: the columns, each an `InfiniteLookbackBuffer`.
        extra_model_outputs: more columns, by name.
        custom_data: the caller's objects, by name, without checks. Later chunks and slices have copies;
            `concat_episode` overwrites entries of the same name.

    >>> episode = Episode()
    >>> episode.add_env_reset(observation=0)
    >>> episode.add_env_step(observation=1, action=5, reward=1.0)
    >>> episode.add_env_step(observation=2, action=6, reward=0.5, terminated=True)
    >>> len(episode), episode.is_done, episode.get_return()
    (2, True, 1.5)
    >>> episode.finalize().get_rewards(slice(-3, 2), neg_index_as_lookback=True, fill=0.0)
    array([0. , 0. , 0. , 1. , 0.5])
    """

    def add_env_reset(self, observation: Any, infos: Any = None) -> None:
        """Add the results of `env.reset()`: `observation`, and `infos`, a dict or None.

        Raises:
            SpecError: the episode already has observations, or is a later chunk of an episode.
            ClosedError: the episode is over, or finalized.
            StructureError: the observation is not in its space, or is not an array, number, string or nest of these.
        """
        self._check_open()
        if self.observations.len_incl_lookback() or self.t != 0:
            raise SpecError(
                "the reset must be the first call, and the only one; this episode is at step "
                f"{self.t}. Start a new `Episode`."
            )
        check(self.observation_space, observation, "observation")
        self.observations.append(observation)
        self.infos.append({} if infos is None else infos)
        self.start_timer()

    def add_env_step(
        self,
        observation: Any,
        action: Any,
        reward: Any,
        infos: Any = None,
        *,
        terminated: bool = False,
        truncated: bool = False,
        extra_model_outputs: Mapping[str, Any] | None = None,
    ) -> None:
        """Add the results of `env.step(action)`; amortised O(1).

        Structures and shapes must match the first step. Spaces are checked only at the first and at every 50th step,
        because the check is slow.

        Args:
            observation: observation after the action.
            action: action before the observation.
            reward: a number.
            infos: infos of this step; None for an empty dict.
            terminated: whether the environment is in a terminal state.
            truncated: whether a time limit or a similar cause ended the episode.
            extra_model_outputs: further outputs of the model by name; the same names at every step.

        Raises:
            ClosedError: the episode is over, or finalized.
            IncompleteError: the episode has no reset.
            StructureError: a structure or shape differs from the first step, or a value is not in its space.
        """
        self._check_open()
        if not len(self.observations.rows):
            raise IncompleteError("a step needs a reset before it. Call `add_env_reset` first.")
        if (self.t - self.t_started) % _CHECK_EVERY == 0:
            check(self.observations.space, observation, "observation")
            check(self.actions.space, action, "action")
        extras, buffers = extra_model_outputs or {}, self.extra_model_outputs
        if (extras or buffers) and extras.keys() != buffers.keys():
            buffers = self._extra_columns(extras)
        observations, actions, rewards = self.observations.rows, self.actions.rows, self.rewards.rows
        added = [
            (observations, observations.checked(observation, "observation")),
            (actions, actions.checked(action, "action")),
            (rewards, rewards.checked(reward, "reward")),
            *((buffer.rows, buffer.rows.checked(extras[key], key)) for key, buffer in buffers.items()),
        ]
        if not added[2][1][0].is_number:
            raise StructureError(f"`reward` must be a number, got {reward!r}.")
        for rows, block in added:  # cannot fail from here on
            rows.put(block)
        self.infos.append({} if infos is None else infos)
        self.extra_model_outputs = buffers
        self.t += 1
        self.is_terminated, self.is_truncated = bool(terminated), bool(truncated)
        self._last_step_time = time.perf_counter()

    def _extra_columns(self, extras: Mapping[str, Any]) -> dict[str, InfiniteLookbackBuffer]:
        """Return the columns of these extra model outputs; the first step of a chunk may add columns."""
        columns = self.extra_model_outputs
        if not len(self):
            columns = {**{key: InfiniteLookbackBuffer() for key in extras}, **columns}
        if extras.keys() != columns.keys():
            names = f"{sorted(columns)}, got {sorted(extras)}"
            raise StructureError(f"`extra_model_outputs` must have the names of the first step, {names}.")
        return columns

    def _check_open(self) -> None:
        if self.is_done:
            raise ClosedError("the episode is over: nothing can be added to it. Start a new `Episode`.")
        if self.is_finalized:
            raise ClosedError("the episode is finalized: nothing can be added to it. Continue in `cut()`.")

    def finalize(self) -> Episode:
        """Make getters return arrays, remove temporary data and refuse further steps; return the episode.

        Infos remain lists. Idempotent.
        """
        for buffer in (self.observations, self.actions, self.rewards, *self.extra_model_outputs.values()):
            buffer.finalize()
        self.temporary_timestep_data.clear()
        return self

    to_numpy = finalize
    """`finalize` under RLlib's newer name."""

    def concat_episode(self, other: Episode) -> None:
        """Add the steps of `other`, the next chunk, in place, without its look-back.

        Raises:
            SpecError: the next chunk has another id, first step or first observation than expected.
            ClosedError: this chunk is done, or finalized.
            StructureError: steps differ in structure.
        """
        self._check_open()
        other.validate()
        for name, own, following in (("id_", self.id_, other.id_), ("t_started", self.t, other.t_started)):
            if own != following:
                raise SpecError(f"the next chunk must have `{name}` {own!r}, got {following!r}.")
        start = other.observations.lookback
        first = other.observations.rows.part(slice(start, start + 1), finalized=False)
        last = self.observations.rows.part(slice(-1, None), finalized=False)
        if not len(first) or not last.equal(first):
            raise SpecError("the next chunk must start with the last observation of this one.")

        def joined(own: InfiniteLookbackBuffer, following: InfiniteLookbackBuffer, rows: slice = slice(None)) -> Any:
            column = own.part(rows, own.lookback)
            column.concat(following)
            return column

        # The last observation and info of this chunk are the first of the next one.
        merged: dict[str, Any] = {
            "observations": joined(self.observations, other.observations, slice(-1)),
            "infos": joined(self.infos, other.infos, slice(-1)),
            "actions": joined(self.actions, other.actions),
            "rewards": joined(self.rewards, other.rewards),
        }
        if len(other):
            extras = self._extra_columns(other.extra_model_outputs)
            merged["extra_model_outputs"] = {
                key: joined(extras[key], following) for key, following in other.extra_model_outputs.items()
            }
        vars(self).update(merged)
        self.custom_data.update(other.custom_data)
        self.t = other.t
        self.is_terminated, self.is_truncated = other.is_terminated, other.is_truncated

    def cut(self, len_lookback_buffer: int = 0) -> Episode:
        """Return the next chunk, without steps, which starts at the current step of this one.

        Args:
            len_lookback_buffer: number of last steps for its look-back, from 0 to all.

        Raises:
            ClosedError: the episode is done.
            SpecError: `len_lookback_buffer` is not an integer >= 0.
        """
        if self.is_done:
            raise ClosedError("the episode is over: no chunk can follow. Start a new `Episode`.")
        total = self.rewards.len_incl_lookback()
        lookback = min(integer("len_lookback_buffer", len_lookback_buffer, minimum=0), total)
        # From the end, because columns may have look-backs of different lengths.
        observations, others = slice(-lookback - 1, None), slice(-lookback, None) if lookback else slice(0)
        successor = self._part(observations, others, lookback, self.t, finalized=False)
        successor.start_timer()
        return successor

    def slice(self, slice_: slice) -> Episode:
        """Return the steps of `slice_` as an episode, as `episode[a:b]` does.

        Its look-back is as long as this episode's, if enough steps precede it; `t_started` is its first step. It is
        over if this episode is over and the slice contains the last step.

        Raises:
            SpecError: the step is not positive.
        """
        if slice_.step is not None and slice_.step < 1:
            raise SpecError(f"the step of an episode's slice must be >= 1, got {slice_.step}.")
        start, stop, step = slice_.indices(len(self))
        steps, lookback = np.arange(start, stop, step), 0
        observations = others = steps
        if start <= stop and len(self.observations):  # else it ends before it starts, and also has no observation
            lookback = self.rewards.lookback
            others = np.concatenate([np.arange(start - lookback, start), steps])
            observations = np.append(others, stop)  # a part of T steps has T + 1 observations
        part = self._part(observations, others, lookback, self.t_started + start)
        if stop == len(self):
            part.is_terminated, part.is_truncated = self.is_terminated, self.is_truncated
        return part

    def _part(
        self, observations: Any, others: Any, lookback: int, t_started: int, *, finalized: bool | None = None
    ) -> Episode:
        """Return an episode with some of the rows, as `InfiniteLookbackBuffer.part` does."""
        part = Episode(t_started=t_started, **{name: getattr(self, name) for name in _IDS})
        for name in _COLUMNS:
            rows = observations if name in ("observations", "infos") else others
            setattr(part, name, getattr(self, name).part(rows, lookback, finalized=finalized))
        part.extra_model_outputs = {
            key: buffer.part(others, lookback, finalized=finalized) for key, buffer in self.extra_model_outputs.items()
        }
        part.t = t_started + len(part.rewards)
        part.custom_data = copy.deepcopy(self.custom_data)
        return part

    def __getitem__(self, item: Any) -> Episode:
        """Return `slice(item)`.

        Raises:
            NotImplementedError: the index is not a slice.
        """
        if not isinstance(item, slice):
            raise NotImplementedError(f"an episode can only be sliced: `episode[a:b]`, got {item!r}. Use a getter.")
        return self.slice(item)

    def add_temporary_timestep_data(self, key: str, data: Any) -> None:
        """Store `data`, any object, as `key` until `finalize()`, without a check or a copy.

        Raises:
            ClosedError: the episode is finalized.
        """
        self._check_temporary()
        self.temporary_timestep_data.setdefault(key, []).append(data)

    def get_temporary_timestep_data(self, key: str) -> list[Any]:
        """Return the list of objects stored as `key`.

        Raises:
            ClosedError: the episode is finalized.
            UnknownKeyError: no object has this name.
        """
        self._check_temporary()
        if key not in self.temporary_timestep_data:
            raise UnknownKeyError(
                f"no temporary data is named {key!r}; the names are {[*self.temporary_timestep_data]}."
            )
        return self.temporary_timestep_data[key]

    def _check_temporary(self) -> None:
        if self.is_finalized:
            raise ClosedError("the episode is finalized, which removed its temporary data. Read it before.")

    def get_state(self) -> dict[str, Any]:
        """Return the whole episode as a dict of arrays, lists and spaces, which can be pickled.

        The state shares no data with the episode: infos, temporary and custom data are copied with `copy.deepcopy`.
        """
        state = {name: getattr(self, name) for name in _PLAIN}
        state |= {name: getattr(self, name).get_state() for name in _COLUMNS}
        state["extra_model_outputs"] = {key: buffer.get_state() for key, buffer in self.extra_model_outputs.items()}
        state |= {name: copy.deepcopy(getattr(self, name)) for name in _OBJECTS}
        return {**state, "duration_s": self.get_duration_s()}

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> Episode:
        """Return the episode of `state`, a result of `get_state`.

        Raises:
            FormatError: `state` is not a state of an episode.
        """
        episode, load = Episode(), InfiniteLookbackBuffer.from_state
        try:
            vars(episode).update({name: state[name] for name in _PLAIN})
            vars(episode).update({name: load(state[name]) for name in _COLUMNS})
            episode.extra_model_outputs = {key: load(column) for key, column in state["extra_model_outputs"].items()}
            vars(episode).update({name: copy.deepcopy(state[name]) for name in _OBJECTS})
            episode.start_timer(state["duration_s"])
            if len(episode) != len(episode.rewards):
                raise FormatError(f"{len(episode)} steps by `t`, and {len(episode.rewards)} rewards.")
            episode.validate()
        except BROKEN_STATE as error:
            raise FormatError(f"this is not a state of an episode: {type(error).__name__}: {error}") from error
        return episode

    def steps(self) -> dict[str, Any]:
        """Return the T + 1 rows of this episode, as observers write them: a nest with leaves [T + 1, ...], copied.

        The leaves are `observation`, `action`, `reward` and, if the episode has any, `extra_model_outputs`. The
        look-back is left out. `reverb_writer.environments.recorded_steps` draws the layout.

        Raises:
            IncompleteError: the episode has no step yet.
        """
        return episode_steps.of(self)

    def kinds(self) -> npt.NDArray[np.uint8]:
        """Return the kinds of the rows of `steps()`, uint8 [T + 1]; `reverb_writer.rows` lists the bits.

        The last row of an episode that is not done has kind 0: it only holds the observation of the next chunk's first
        row.

        Raises:
            IncompleteError: the episode has no step yet.

        >>> columns = {"observations": [0, 1, 2], "actions": [5, 6], "rewards": [0, 1], "len_lookback_buffer": 0}
        >>> Episode(**columns, terminated=True).kinds(), Episode(**columns).kinds()
        (array([ 3,  2, 12], dtype=uint8), array([3, 2, 0], dtype=uint8))
        """
        return episode_steps.kinds(self)

    @classmethod
    def from_steps(
        cls,
        data: Any,
        *,
        kinds: Any = None,
        last_row: LastRow | None = None,
        id_: str | None = None,
        t_started: int | None = None,
    ) -> Episode:
        """Make a finalized episode of its rows, such as a sampled whole episode.

        The last row of rows that were cut only supplies its observation, because its action belongs to the next chunk.

        Args:
            data: rows, a nest with leaves [T + 1, ...]; a list is a nest of leaves. Results of `steps()`, steps of
                `record`, RLDS steps, a TF-Agents trajectory, or another layout of `reverb_writer.rows`. Padding is left
                out. `extra_model_outputs` and `extras` become extra model outputs, and `policy_info` becomes one.
            kinds: kinds of the rows, integers [T + 1], such as `episode.kinds()` or a sample's `kinds`. None if leaves
                of `data` show them.
            last_row: whose row the flags of the end stand on, if the names of leaves do not show it. With "action", the
                last row of a terminated episode has the last action, and its observation also becomes the final
                one. With "boundary", the action and the reward of the last row are left out.
            id_: as in the constructor.
            t_started: as in the constructor.

        Raises:
            StructureError: observations, actions or rewards are missing, or their lengths differ; or the rows belong to
                several episodes; or the last row of the episode has an action, and the observation after it is missing;
                or no leaf shows where the episode ends, and `kinds` is None.
        """
        columns = episode_steps.columns(data, kinds, last_row)
        return cls(id_, **columns, t_started=t_started, len_lookback_buffer=0).finalize()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(len={len(self)} done={self.is_done} R={self.get_return():g} id_={self.id_})"
