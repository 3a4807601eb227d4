"""One table of one server among those of a `ContiguousDataset`: pools of its items, and the slices drawn of them."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from reverb_writer.decoding.samples import SampleInfos
from reverb_writer.errors import IncompleteError, ReplayTimeoutError
from reverb_writer.reading.batches import Batch
from reverb_writer.reading.replay_dataset import ReplayDataset
from reverb_writer.slices import (
    By,
    SliceBatch,
    Slices,
    SliceSampler,
    Trajectories,
    find_trajectories,
    gather,
    read_markers,
)

__all__ = ["Draw", "Member", "Part"]


@dataclass(frozen=True)
class Draw:
    """How slices of a pool of trajectories are drawn."""

    sampler: SliceSampler
    rng: np.random.Generator
    replacement: bool
    row_priority_fn: Callable[[Any], Any] | None

    def __call__(self, data: Any, trajectories: Trajectories) -> Slices:
        """Draw all slices that a pool is good for."""
        priorities = None if self.row_priority_fn is None else self.row_priority_fn(data)
        if self.sampler.by is By.TRAJECTORY:
            return self.sampler.each(trajectories, self.rng)
        if self.replacement:
            sampler = dataclasses.replace(self.sampler, num_slices=len(trajectories))
            return sampler.sample(trajectories, self.rng, priorities)
        # No trajectory has more slices than rows and overhanging rows.
        most = trajectories.num_steps + 2 * self.sampler.slice_len * len(trajectories)
        return next(dataclasses.replace(self.sampler, num_slices=most).one_pass(trajectories, self.rng, priorities))


@dataclass(frozen=True)
class Part:
    """Slices of one pool.

    Attributes:
        batch: the slices.
        infos: [S] of the item that each is of.
        items: [S] its number among those of the member.
    """

    batch: SliceBatch
    infos: SampleInfos
    items: npt.NDArray[np.int64]


class Member:
    """One table of one server: a pool of its trajectories, and the slices drawn of them."""

    def __init__(self, dataset: ReplayDataset, draw: Draw, *, emit_init: bool, number: int, num_members: int) -> None:
        """Start without a pool.

        Args:
            dataset: whose batches are the pools.
            draw: makes slices of a pool.
            emit_init: see `ContiguousDataset`.
            number: of this member.
            num_members: that there are, so that ids of trajectories differ.
        """
        self.dataset = dataset
        self._draw, self._emit_init = draw, emit_init
        self._number, self._num_members = number, num_members
        self._num_trajectories = self._num_items = 0  # of former pools
        self._pool: _Pool | None = None
        self._next = 0

    def items_left(self) -> npt.NDArray[np.int64]:
        """Return the number of the item of each slice that is not taken."""
        if self._pool is None:
            return np.zeros(0, np.int64)
        left: npt.NDArray[np.int64] = self._num_items + self._pool.item_of[self._pool.slices.trajectories[self._next :]]
        return left

    @property
    def is_exhausted(self) -> bool:
        """Whether all slices are taken and no item will come any more."""
        return self.dataset.is_exhausted and not len(self.items_left())

    def take(self, num_slices: int, start: float) -> Iterator[Part]:
        """Yield the next slices, in one part or in several; waits as long as the dataset does, since `start`."""
        while num_slices and (pool := self._pool_with_slices(start)):
            first, stop = self._next, min(self._next + num_slices, len(pool.slices.lengths))
            self._next = stop
            num_slices -= stop - first
            slices = pool.slices.part(first, stop)
            batch = gather(pool.data, slices, pool.markers, emit_init=self._emit_init)
            if pool.markers.traj_ids is None:
                ids = (self._num_trajectories + batch.traj_ids) * self._num_members + self._number
                batch = dataclasses.replace(batch, traj_ids=ids)
            items = pool.item_of[slices.trajectories]
            yield Part(batch, pool.infos.choose(items), self._num_items + items)

    def _pool_with_slices(self, start: float) -> _Pool | None:
        """Return the pool, or the next one if all its slices are taken; None at the end."""
        too_short: IncompleteError | None = None
        while self._pool is None or self._next == len(self._pool.slices.lengths):
            try:
                batch = self.dataset.next_since(start)
            except ReplayTimeoutError as error:
                raise too_short or error from None
            if batch is None:
                return None
            if self._pool is not None:
                self._num_trajectories += self._pool.num_trajectories
                self._num_items += len(self._pool.infos.keys)
            try:
                self._pool, self._next = _Pool(batch, self._draw), 0
            except IncompleteError as error:
                too_short = error
                if time.monotonic() > start + self.dataset.timeout_s:
                    raise
        return self._pool


class _Pool:
    """Items that were sampled together, and the slices drawn of them."""

    def __init__(self, batch: Batch, draw: Draw) -> None:
        self.data, self.infos = batch.data, batch.info
        ends = np.cumsum(batch.info.lengths)
        first_rows = ends - batch.info.lengths
        self.markers = read_markers(self.data, starts=first_rows)
        starts = np.zeros(ends[-1], bool)
        starts[first_rows] = True
        is_init = starts if self.markers.is_init is None else starts | self.markers.is_init
        trajectories = find_trajectories(dataclasses.replace(self.markers, is_init=is_init))
        item_of = np.searchsorted(ends, trajectories.starts, "right")
        if not draw.replacement:
            first = np.unique(batch.info.keys, return_index=True)[1]
            trajectories = trajectories.choose(np.flatnonzero(np.isin(item_of, first)))
            item_of = np.searchsorted(ends, trajectories.starts, "right")
        self.item_of, self.num_trajectories = item_of, len(trajectories)
        self.slices = draw(self.data, trajectories)
