"""`Episode`: an environment's episode, or a chunk of it, in an actor's memory."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from reverb_writer.arguments import integer
from reverb_writer.episodes import episode_steps
from reverb_writer.episodes.episode_data import EpisodeData
from reverb_writer.episodes.lookback_buffer import BROKEN_STATE, InfiniteLookbackBuffer
from reverb_writer.episodes.spaces import check
from reverb_writer.errors import ClosedError, FormatError, IncompleteError, SpecError, StructureError, UnknownKeyError

_CHECK_EVERY = 50

# Contents of a state: attributes that are never changed in place, columns, and objects of the user's.
_IDS = ("id_", "agent_id", "module_id", "multi_agent_episode_id")
_PLAIN = (*_IDS, "t_started", "t", "is_terminated", "is_truncated")
_COLUMNS = ("observations", "infos", "actions", "rewards")
_OBJECTS = ("temporary_timestep_data", "custom_data")


class Episode(EpisodeData):
    """An episode of one agent, or a chunk of one: T steps, T + 1 observations and infos, and a look-back before them.

    The getters of an ongoing episode return lists; after `finalize()`, arrays. Arguments are copied, except infos,
    which are any objects; results are owned by the caller. A call that raises has changed nothing. Not thread-safe.

    Source: RLlib 2.35 `SingleAgentEpisode`; docs/how-to/from-rllib.md lists the differences.

    Attributes:
        id_: of the episode; its chunks share it.
        agent_id, module_id, multi_agent_episode_id: any values of the caller.
        t_started: the step of the environment's episode at which this chunk starts, >= 0.
        t: the current step: t_started + len(self).
        is_terminated: whether the environment ended in a terminal state.
        is_truncated: whether a time limit or the like ended it.
        observations, infos, actions, rewards: the columns, each an `InfiniteLookbackBuffer`.
        extra_model_outputs: more columns, by name.
        custom_data: whatever the caller wants to keep with it, by name; nothing is checked. Chunks that follow, and
            slices, have copies; of a chunk that is added the entries win.

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
        """Add what `env.reset()` returned: `observation`, and `infos`, a dict or None.

        Raises:
            SpecError: the episode has observations already, or is a later chunk of an episode.
            ClosedError: the episode is over, or finalized.
            StructureError: the observation is not in its space, or no array, number, string or nest of these.
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
        """Add what `env.step(action)` returned; amortised O(1).

        Structures and shapes must be those of the first step. Spaces are checked at the first step and at every 50th
        only, because the check is slow.

        Args:
            observation: the one after the action.
            action: the one before the observation.
            reward: a number.
            infos: of this step; None for an empty dict.
            terminated: whether the environment is in a terminal state.
            truncated: whether a time limit or the like ended the episode.
            extra_model_outputs: further outputs of the model by name; the same names at every step.

        Raises:
            ClosedError: the episode is over, or finalized.
            IncompleteError: there was no reset.
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
        for rows, block in added:  # none of this can fail
            rows.put(block)
        self.infos.append({} if infos is None else infos)
        self.extra_model_outputs = buffers
        self.t += 1
        self.is_terminated, self.is_truncated = bool(terminated), bool(truncated)
        self._last_step_time = time.perf_counter()

    def _extra_columns(self, extras: Mapping[str, Any]) -> dict[str, InfiniteLookbackBuffer]:
        """Return the columns of extra model outputs of these names; the first step of a chunk may add columns."""
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

        Infos stay lists. Idempotent.
        """
        for buffer in (self.observations, self.actions, self.rewards, *self.extra_model_outputs.values()):
            buffer.finalize()
        self.temporary_timestep_data.clear()
        return self

    to_numpy = finalize
    """`finalize`, by RLlib's newer name."""

    def concat_episode(self, other: Episode) -> None:
        """Add the steps of `other`, the chunk that follows this one, in place; its look-back is left out.

        Raises:
            SpecError: the other one has another id, starts at another step, or with another observation.
            ClosedError: this one is done, or finalized.
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

        def joined(
            own: InfiniteLookbackBuffer, following: InfiniteLookbackBuffer, rows: slice = slice(None)
        ) -> InfiniteLookbackBuffer:
            column = own.part(rows, own.lookback)
            column.concat(following)
            return column

        # The last observation and info of this one are the first of the next one.
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
        """Return the chunk that follows: no steps yet, starting where this one is now.

        Args:
            len_lookback_buffer: number of the last steps that can be looked back at, from 0 to all.

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

        Its look-back is as long as that of this episode, if there are enough steps before it; `t_started` is its first
        step. It is over if it contains the end of an episode that is over.

        Raises:
            SpecError: the step is not positive.
        """
        if slice_.step is not None and slice_.step < 1:
            raise SpecError(f"the step of an episode's slice must be >= 1, got {slice_.step}.")
        start, stop, step = slice_.indices(len(self))
        num_lookback = self.rewards.lookback
        steps = np.arange(start, stop, step) + num_lookback
        if start <= stop and len(self.observations):
            lookback = np.arange(start, start + num_lookback)
            # A part of T steps has T + 1 observations.
            observations = np.concatenate([lookback, steps, [stop + num_lookback]])
            part = self._part(observations, np.concatenate([lookback, steps]), num_lookback, self.t_started + start)
        else:  # it ends before it starts: it has no observation either
            part = self._part(steps, steps, 0, self.t_started + start)
        if stop == len(self):
            part.is_terminated, part.is_truncated = self.is_terminated, self.is_truncated
        return part

    def _part(
        self, observations: Any, others: Any, lookback: int, t_started: int, *, finalized: bool | None = None
    ) -> Episode:
        """Return an episode of some of the rows, as `InfiniteLookbackBuffer.part`."""
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
            raise NotImplementedError(
                f"an episode can only be sliced, as in `episode[a:b]`, got {item!r}. Use a getter."
            )
        return self.slice(item)

    def add_temporary_timestep_data(self, key: str, data: Any) -> None:
        """Store `data`, any object, under the name `key` until `finalize()`, without a check or a copy.

        Raises:
            ClosedError: the episode is finalized.
        """
        self._check_temporary()
        self.temporary_timestep_data.setdefault(key, []).append(data)

    def get_temporary_timestep_data(self, key: str) -> list[Any]:
        """Return the list of objects that were stored under the name `key`.

        Raises:
            ClosedError: the episode is finalized.
            UnknownKeyError: nothing is stored under this name.
        """
        self._check_temporary()
        if key not in self.temporary_timestep_data:
            raise UnknownKeyError(
                f"no temporary data is stored as {key!r}; the names are {[*self.temporary_timestep_data]}."
            )
        return self.temporary_timestep_data[key]

    def _check_temporary(self) -> None:
        if self.is_finalized:
            raise ClosedError("the episode is finalized, which removed its temporary data. Read it before.")

    def get_state(self) -> dict[str, Any]:
        """Return the whole episode as a dict of arrays, lists and spaces, to be pickled.

        It shares no data with the episode: infos, temporary and custom data are copied with `copy.deepcopy`.
        """
        state = {name: getattr(self, name) for name in _PLAIN}
        state |= {name: getattr(self, name).get_state() for name in _COLUMNS}
        state["extra_model_outputs"] = {key: buffer.get_state() for key, buffer in self.extra_model_outputs.items()}
        state |= {name: copy.deepcopy(getattr(self, name)) for name in _OBJECTS}
        return {**state, "duration_s": self.get_duration_s()}

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> Episode:
        """Return the episode of a `state` that `get_state` returned.

        Raises:
            FormatError: this is not a state of an episode.
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
        """Return the T + 1 steps that observers write of this episode, as a nest with leaves [T + 1, ...].

        The look-back is left out. `reverb_writer.environments.recorded_steps` draws the layout.

        Raises:
            IncompleteError: the episode has no step yet.
        """
        return episode_steps.of(self)

    @classmethod
    def from_steps(cls, data: Any, *, id_: str | None = None, t_started: int | None = None) -> Episode:
        """Return the finalized episode of steps, such as those of a sampled whole episode.

        Args:
            data: leaves [T + 1, ...]: a nest as `steps()` returns it, RLDS steps, or a TF-Agents trajectory. Rows after
                the last step, such as padding, are left out.
            id_: as when constructing.
            t_started: as when constructing.

        Raises:
            StructureError: observations, actions or rewards are missing, or their lengths differ.
        """
        return cls(id_, **episode_steps.columns(data), t_started=t_started, len_lookback_buffer=0).finalize()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(len={len(self)} done={self.is_done} R={self.get_return():g} id_={self.id_})"
