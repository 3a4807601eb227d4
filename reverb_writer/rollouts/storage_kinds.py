"""Storages with the newest rows of several rollouts, with labels, or with next observations."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np
import tree

from reverb_writer.arguments import number
from reverb_writer.errors import IncompleteError, SpecError
from reverb_writer.nests import write_row
from reverb_writer.rollouts import storage_records
from reverb_writer.rollouts.storage import RolloutStorage

_NEXT = {"next_observations": "observations", "next_critic_observations": "critic_observations"}
_FINAL = {"final_observations": "observations", "final_critic_observations": "critic_observations"}


class QueueRolloutStorage(RolloutStorage):
    """A `RolloutStorage` that grows to its full size; from then on, new rows replace the oldest ones.

    If fewer than T rows are free, `clear()` adds at most T rows, until the storage has
    floor(`buffer_dilation_ratio` T) rows. Once it is full, `step` is the oldest row. Returns, minibatches and
    statistics are computed from all rows in the storage, in the order of time.

        T = 4, ratio 1.5    rollout    rows written    size
                            1          0 1 2 3         4, then grows
                            2          4 5 0 1         6
                            3          2 3 4 5         6
    """

    def __init__(
        self,
        num_envs: int,
        num_transitions_per_env: int,
        obs_shape: Any,
        critic_obs_shape: Any,
        actions_shape: Any,
        num_rewards: int = 1,
        device: Any = None,
        *,
        buffer_dilation_ratio: float = 1.0,
        seed: int | None = None,
    ) -> None:
        """Allocate T rows.

        Arguments and errors: as in `RolloutStorage`. `buffer_dilation_ratio` >= 1 is the full size as a multiple of T.
        """
        super().__init__(
            num_envs,
            num_transitions_per_env,
            obs_shape,
            critic_obs_shape,
            actions_shape,
            num_rewards,
            device,
            seed=seed,
        )
        ratio = number("buffer_dilation_ratio", buffer_dilation_ratio)
        if ratio < 1:
            raise SpecError(f"`buffer_dilation_ratio` must be >= 1, got {ratio}.")
        self._full_size = math.floor(ratio * self.num_transitions_per_env)
        self._num_rows = 0

    @property
    def num_rows(self) -> int:
        """Number of rows in the storage."""
        return self._num_rows

    def clear(self) -> None:
        """Begin a new rollout, keep earlier rows, and grow if necessary and possible."""
        extra = min(self._full_size - self._capacity, self.num_transitions_per_env)
        if extra and self._capacity - self.step < self.num_transitions_per_env:
            for name, rows in self._zeros(extra).items():
                if rows is not None:
                    setattr(self, name, self._arrays.concatenate(getattr(self, name), rows))
        self._has_returns = False

    def untie_buffer_loop(self) -> None:
        """Sort the rows, returns and advantages by time; the next transition goes to row 0."""
        rows = self._rows_in_time()
        if isinstance(rows, slice):
            return
        for name in self._shapes:
            if getattr(self, name) is not None:
                setattr(self, name, self._in_time(name))
        self.step = 0

    def _check_room(self, num_rows: int) -> None:
        if self._capacity < self._full_size:
            super()._check_room(num_rows)

    def _advance(self) -> None:
        self.step += 1
        self._num_rows = min(self._num_rows + 1, self._capacity)
        if self.step == self._capacity == self._full_size:
            self.step = 0

    def _rows_in_time(self) -> Any:
        if self._num_rows < self._capacity or self.step in (0, self._capacity):
            return slice(0, self._num_rows)
        return self._arrays.asarray((np.arange(self._capacity) + self.step) % self._capacity)


class ActionLabelRollout(QueueRolloutStorage):
    """A `QueueRolloutStorage` for imitation learning: transitions and minibatches have `action_labels`.

    Attributes:
        action_labels: labels, in the shape of the actions.
    """

    Transition = storage_records.LabelTransition
    MiniBatch = storage_records.LabelMiniBatch

    _LIKE: ClassVar = {"action_labels": "actions"}
    _ALSO_NEEDED = ("action_labels",)

    action_labels: Any


class SarsaRolloutStorage(RolloutStorage):
    """A `RolloutStorage` whose minibatches have next observations, always of the same episode.

    The next observation of a row is the observation of the next row, or `next_observations` of the newest transition.
    Where an episode ended, it is `final_observations` of the transition, or the row's own observation if that is None,
    but never the first observation of the next episode.

    Attributes:
        next_observations: next observations, in the shape of the observations.
        next_critic_observations: the critic's next observations; None if the storage has no critic's observations.
    """

    Transition = storage_records.SarsaTransition
    MiniBatch = storage_records.SarsaMiniBatch

    _LIKE = _NEXT

    _knows_next = True

    next_observations: Any
    next_critic_observations: Any

    def _read(self, transition: Any) -> dict[str, Any]:
        row = super()._read(transition)
        for field, like in _FINAL.items():
            given, shape = getattr(transition, field), self._shapes[like]
            if given is not None and shape is not None:
                row[field] = self._arrays.conform(field, given, shape, self.num_envs)
        return row

    def _append(self, row: dict[str, Any]) -> None:
        ended = row["dones"][:, 0] != 0
        self._knows_next = bool(ended.all()) or all(name in row for name, like in _NEXT.items() if like in row)
        for (name, like), final in zip(_NEXT.items(), _FINAL, strict=True):
            if like in row:
                own = row[like]
                row[name] = self._arrays.where(ended, row.pop(final, own), row.get(name, own))
                if self.step:
                    self._link(name, own)
        super()._append(row)

    def _link(self, name: str, following: Any) -> None:
        """Set the next observation of the previous row, where its episode continues."""
        ended = self.dones[self.step - 1][:, 0] != 0
        before = tree.map_structure(lambda leaf: leaf[self.step - 1], getattr(self, name))
        write_row(getattr(self, name), self.step - 1, self._arrays.where(ended, before, following))

    def _columns(self) -> dict[str, Any]:
        if not self._knows_next:
            raise IncompleteError(
                "the newest transition needs `next_observations`: no other row holds the observation after it. Set it "
                "before `add_transitions`."
            )
        return super()._columns()
