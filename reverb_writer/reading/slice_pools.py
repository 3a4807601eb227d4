"""Slices of one table of one server, drawn from pools: items that were sampled together."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from reverb_writer.errors import IncompleteError, ReplayTimeoutError
from reverb_writer.reading.batches import Batch, collate
from reverb_writer.reading.table_reader import TableReader
from reverb_writer.slices import (
    By,
    Markers,
    Slices,
    SliceSampler,
    Trajectories,
    find_trajectories,
    gather,
    read_markers,
)

__all__ = ["SliceOptions", "SlicePools"]

ItemNumbers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class SliceOptions:
    """How slices of a pool are drawn; see `ContiguousDataset`."""

    sampler: SliceSampler
    rng: np.random.Generator
    replacement: bool
    row_priority_fn: Callable[[Any], Any] | None
    emit_init: bool

    def draw(self, data: Any, trajectories: Trajectories) -> Slices:
        """Draw all slices that one pool gives."""
        priorities = None if self.row_priority_fn is None else self.row_priority_fn(data)
        if self.sampler.by is By.TRAJECTORY:
            return self.sampler.each(trajectories, self.rng)
        if self.replacement:
            sampler = dataclasses.replace(self.sampler, num_slices=len(trajectories))
            return sampler.sample(trajectories, self.rng, priorities)
        # No trajectory has more slices than rows and overhanging rows.
        most = trajectories.num_steps + 2 * self.sampler.slice_len * len(trajectories)
        return next(dataclasses.replace(self.sampler, num_slices=most).one_pass(trajectories, self.rng, priorities))


class SlicePools:
    """One table of one server: its pools one after the other, and the slices drawn of them."""

    def __init__(self, reader: TableReader, options: SliceOptions, *, number: int, num_members: int) -> None:
        """Start without a pool.

        Args:
            reader: whose samples, as many as it returns together, are a pool.
            options: how slices are drawn.
            number: of this table and server among the members of a `ContiguousDataset`.
            num_members: how many members there are, so that ids of trajectories differ.
        """
        self.reader = reader
        self._options, self._number, self._num_members = options, number, num_members
        self._num_trajectories = self._num_items = 0  # of former pools
        self._pool_trajectories = 0
        self._pool: Batch | None = None
        # Of the pool: markers as stored, slices, number of the next slice, item of each trajectory.
        self._stored = Markers()
        self._slices: Slices | None = None
        self._next = 0
        self._item_of: ItemNumbers = np.zeros(0, np.int64)

    def items_left(self) -> ItemNumbers:
        """Return the number of the item of each slice that is not taken."""
        if self._slices is None:
            return np.zeros(0, np.int64)
        left: ItemNumbers = self._num_items + self._item_of[self._slices.trajectories[self._next :]]
        return left

    @property
    def is_exhausted(self) -> bool:
        """Whether all slices are taken and no more items will come."""
        return self.reader.is_exhausted and not len(self.items_left())

    def take(self, num_slices: int, start: float, timeout_s: float) -> Iterator[tuple[Batch, ItemNumbers]]:
        """Yield the next slices, in one batch or in several, each with the number of the item of each slice.

        Args:
            num_slices: how many slices, fewer at the end.
            start: when the wait began, of `time.monotonic()`.
            timeout_s: time-out in seconds, from `start`.
        """
        while num_slices and (drawn := self._slices_left(start, timeout_s)):
            pool, slices = drawn
            first, stop = self._next, min(self._next + num_slices, len(slices.lengths))
            self._next = stop
            num_slices -= stop - first
            part = slices.part(first, stop)
            data, markers = gather(pool.data, part, self._stored, emit_init=self._options.emit_init)
            if self._stored.traj_ids is None:
                ids = (self._num_trajectories + markers.traj_ids) * self._num_members + self._number
                markers = dataclasses.replace(markers, traj_ids=ids)
            items = self._item_of[part.trajectories]
            yield Batch(data, pool.info.choose(items), markers), self._num_items + items

    def _slices_left(self, start: float, timeout_s: float) -> tuple[Batch, Slices] | None:
        """Return the pool and its slices, or the next pool if all slices are taken; None at the end."""
        too_short: IncompleteError | None = None
        while self._pool is None or self._slices is None or self._next == len(self._slices.lengths):
            try:
                samples = self.reader.next(start, timeout_s)
            except ReplayTimeoutError as error:
                raise too_short or error from None
            if samples is None:
                return None
            try:
                self._begin(collate(*samples, self.reader.pack, "flat", self.reader.server))
            except IncompleteError as error:
                too_short = error
                if time.monotonic() > start + timeout_s:
                    raise
        return self._pool, self._slices

    def _begin(self, pool: Batch) -> None:
        """Draw the slices of the next pool; an IncompleteError if it has none."""
        if self._pool is not None:
            self._num_items += len(self._pool.info)
            self._num_trajectories += self._pool_trajectories
            self._pool = self._slices = None
        ends = np.cumsum(pool.info.lengths)
        first_rows = ends - pool.info.lengths
        stored = read_markers(pool.data, starts=first_rows)
        starts = np.zeros(ends[-1], bool)
        starts[first_rows] = True
        is_init = starts if stored.is_init is None else starts | stored.is_init
        trajectories = find_trajectories(dataclasses.replace(stored, is_init=is_init))
        item_of = np.searchsorted(ends, trajectories.starts, "right")
        if not self._options.replacement:
            first = np.unique(pool.info.keys, return_index=True)[1]
            trajectories = trajectories.choose(np.flatnonzero(np.isin(item_of, first)))
            item_of = np.searchsorted(ends, trajectories.starts, "right")
        slices = self._options.draw(pool.data, trajectories)
        self._pool, self._stored, self._slices, self._next = pool, stored, slices, 0
        self._item_of, self._pool_trajectories = item_of, len(trajectories)
