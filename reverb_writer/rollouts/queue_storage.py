"""A storage that keeps the newest rows of several rollouts."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np

from reverb_writer.arguments import number
from reverb_writer.errors import SpecError
from reverb_writer.rollouts import storage_records
from reverb_writer.rollouts.storage import RolloutStorage


class QueueRolloutStorage(RolloutStorage):
    """A `RolloutStorage` in which new rows replace the oldest ones, once it has grown to its full size.

    It grows at `clear()` if fewer than T rows are free, by at most T rows, until it has
    floor(`buffer_dilation_ratio` T) rows. Rows are always read in the order of time: returns,
    minibatches and statistics are those of all rows in the storage.

        T = 4, ratio 1.5    rollout    rows written    size
                            1          0 1 2 3         4, then grows
                            2          4 5 0 1         6
                            3          2 3 4 5         6

    Attributes:
        step: the row that the next transition goes to; once the storage is full, that of the oldest one.
    """

    def __init__(self, *arguments: Any, buffer_dilation_ratio: float = 1.0, **options: Any) -> None:
        """Allocate T rows.

        Arguments and errors: as in `RolloutStorage`. `buffer_dilation_ratio` >= 1 is the full size as a multiple of T.
        """
        super().__init__(*arguments, **options)
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
        """Begin a new rollout. Earlier rows are kept; the storage grows if it is smaller than its full size."""
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
        action_labels: in the shape of the actions.
    """

    Transition = storage_records.LabelTransition
    MiniBatch = storage_records.LabelMiniBatch

    _LIKE: ClassVar = {"action_labels": "actions"}
    _ALSO_NEEDED = ("action_labels",)

    action_labels: Any
