"""Slices of one table of one server, drawn from pools: items that were sampled together.

    BatchAssembler.take_rows -> SliceDrawer: markers of all rows -> slices -> only their rows are copied -> DrawnSlices

This happens in the thread that fetches. Only with `row_priority_fn`, which needs all columns of all rows and is the
user's own code, it happens in the reader's thread.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import tree

from reverb_writer.decoding.batch_assembler import BatchAssembler
from reverb_writer.decoding.samples import BatchInfo, ChooseRows, copy_chosen_rows
from reverb_writer.errors import IncompleteError, ReplayTimeoutError
from reverb_writer.reading.batches import Batch
from reverb_writer.reading.table_reader import Pack, TableReader
from reverb_writer.slices import By, SliceMarkers, Slices, SliceSampler, Trajectories, find_trajectories, read_markers
from reverb_writer.slices.gather import mark_slices
from reverb_writer.slices.markers import marker_leaves

__all__ = ["DrawnSlices", "SliceDrawer", "SliceOptions", "SlicePools"]

ItemNumbers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class SliceOptions:
    """How slices of a pool are drawn; see `ContiguousDataset`."""

    sampler: SliceSampler
    slices_per_item: int
    replacement: bool
    row_priority_fn: Callable[[Any], Any] | None
    emit_init: bool
    with_next: bool

    def draw(self, data: Any, trajectories: Trajectories, rng: np.random.Generator) -> Slices:
        """Draw all slices that one pool gives."""
        priorities = None if self.row_priority_fn is None else self.row_priority_fn(data)
        if self.sampler.by is By.TRAJECTORY:
            return self.sampler.each(trajectories, rng, self.slices_per_item)
        if self.replacement:
            sampler = dataclasses.replace(self.sampler, num_slices=self.slices_per_item * len(trajectories))
            return sampler.sample(trajectories, rng, priorities)
        # No trajectory has more slices than rows and overhanging rows.
        most = trajectories.num_steps + 2 * self.sampler.slice_len * len(trajectories)
        return next(dataclasses.replace(self.sampler, num_slices=most).one_pass(trajectories, rng, priorities))


@dataclass(frozen=True)
class DrawnSlices:
    """All slices of one pool, laid end to end.

    Attributes:
        data: leaves [N, ...].
        next: leaves [S, ...], the row after each slice; None without `with_next`.
        markers: of the N rows.
        info: [S] of the item of each slice.
        items: [S] number of the item of each slice; items are numbered in the order in which they arrive.
    """

    data: Any
    next: Any
    markers: SliceMarkers
    info: BatchInfo
    items: ItemNumbers

    def part(self, first: int, stop: int) -> Batch:
        """Return slices number `first` to `stop` - 1, as views."""
        markers = self.markers.part(first, stop)
        begin = int(self.markers.slices.widths[:first].sum())
        rows, slices = slice(begin, begin + len(markers)), slice(first, stop)
        after = None if self.next is None else tree.map_structure(lambda leaf: leaf[slices], self.next)
        data = tree.map_structure(lambda leaf: leaf[rows], self.data)
        return Batch(data, self.info.choose(slices), markers, after)


class SliceDrawer:
    """Draws slices of the pools of one table of one server, in the order in which they arrive."""

    def __init__(self, options: SliceOptions, rng: np.random.Generator, *, number: int, num_members: int) -> None:
        """Start without a pool.

        Args:
            options: how slices are drawn.
            rng: source of randomness, used by nothing else.
            number: of this table and server among the members of a `ContiguousDataset`.
            num_members: how many members there are, so that ids of trajectories differ.
        """
        self._options, self._rng, self._number, self._num_members = options, rng, number, num_members
        self._num_trajectories = self._num_items = 0  # of former pools

    def draw_assembled(self, assembler: BatchAssembler, pack: Pack, server: str) -> tuple[DrawnSlices, BatchInfo]:
        """Draw slices of the samples that an assembler holds; see `draw`."""
        return self.draw(assembler.take_rows, assembler.num_columns, pack, server)

    def draw(
        self,
        take_rows: Callable[[Sequence[int], ChooseRows], tuple[list[Any], BatchInfo]],
        num_columns: int,
        pack: Pack,
        server: str,
    ) -> tuple[DrawnSlices, BatchInfo]:
        """Draw slices of the next pool, and copy their rows.

        Args:
            take_rows: `BatchAssembler.take_rows`, or the same for samples that were taken.
            num_columns: how many columns the samples have.
            pack: makes the table's nest of a list of leaves.
            server: address of the server, for the info.

        Returns:
            The slices, and the info of all items of the pool.

        Raises:
            IncompleteError: no trajectory is long enough, or all priorities are 0.
            StructureError: samples differ in dtype or shape, or columns or markers in length.
        """
        needs_all = self._options.row_priority_fn is not None
        indices = list(range(num_columns)) if needs_all else marker_leaves(pack(range(num_columns)))
        drawn: list[tuple[SliceMarkers, ItemNumbers]] = []

        def choose(arrays: Sequence[Any], info: BatchInfo) -> npt.NDArray[np.int64]:
            array_of = dict(zip(indices, arrays, strict=True))
            drawn.append(self._choose(pack([array_of.get(index) for index in range(num_columns)]), info))
            slices = drawn[0][0].slices
            return np.concatenate([slices.rows, slices.next_rows]) if self._options.with_next else slices.rows

        columns, info = take_rows(indices, choose)
        ((markers, items),) = drawn
        num_rows = len(markers)
        after = pack([column[num_rows:] for column in columns]) if self._options.with_next else None
        data = pack([column[:num_rows] for column in columns])
        of_slices = dataclasses.replace(info.choose(items), server=server)
        found = DrawnSlices(data, after, markers, of_slices, self._num_items + items)
        self._num_items += len(info)
        return found, info

    def _choose(self, nest: Any, info: BatchInfo) -> tuple[SliceMarkers, ItemNumbers]:
        """Draw slices of samples laid end to end; return their markers, and the item of each slice."""
        ends = np.cumsum(info.lengths)
        first_rows = ends - info.lengths
        stored = read_markers(nest, starts=first_rows)
        starts = np.zeros(ends[-1], bool)
        starts[first_rows] = True
        is_init = starts if stored.is_init is None else starts | stored.is_init
        trajectories = find_trajectories(dataclasses.replace(stored, is_init=is_init))
        item_of = np.searchsorted(ends, trajectories.starts, "right")
        if not self._options.replacement:
            first = np.unique(info.keys, return_index=True)[1]
            trajectories = trajectories.choose(np.flatnonzero(np.isin(item_of, first)))
            item_of = np.searchsorted(ends, trajectories.starts, "right")
        markers = mark_slices(
            self._options.draw(nest, trajectories, self._rng), stored, emit_init=self._options.emit_init
        )
        items = item_of[markers.slices.trajectories]
        if stored.traj_ids is None:
            ids = (self._num_trajectories + markers.traj_ids) * self._num_members + self._number
            markers = dataclasses.replace(markers, traj_ids=ids)
        self._num_trajectories += len(trajectories)
        return markers, items


class SlicePools:
    """One table of one server: the slices of its pools, one after the other."""

    def __init__(self, reader: TableReader, drawer: SliceDrawer) -> None:
        """Start without a pool.

        Args:
            reader: whose samples, as many as it returns together, are a pool, or are the slices drawn of one.
            drawer: draws slices of samples if the reader has not.
        """
        self.reader, self._drawer = reader, drawer
        self._drawn: DrawnSlices | None = None
        self._next = 0  # number of the next slice

    def items_left(self) -> ItemNumbers:
        """Return the number of the item of each slice that is not taken."""
        return np.zeros(0, np.int64) if self._drawn is None else self._drawn.items[self._next :]

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
            first, self._next = self._next, min(self._next + num_slices, len(drawn.items))
            num_slices -= self._next - first
            yield drawn.part(first, self._next), drawn.items[first : self._next]

    def _slices_left(self, start: float, timeout_s: float) -> DrawnSlices | None:
        """Return the slices of the pool, or of the next one if all are taken; None at the end."""
        too_short: IncompleteError | None = None
        while self._drawn is None or self._next == len(self._drawn.items):
            try:
                samples = self.reader.next(start, timeout_s)
                if samples is None:
                    return None
                self._drawn, self._next = None, 0
                self._drawn = samples[0] if isinstance(samples[0], DrawnSlices) else self._draw(*samples)
            except ReplayTimeoutError as error:
                raise too_short or error from None
            except IncompleteError as error:
                too_short = error
                if time.monotonic() > start + timeout_s:
                    raise
        return self._drawn

    def _draw(self, columns: Any, info: BatchInfo) -> DrawnSlices:
        take_rows = functools.partial(copy_chosen_rows, columns, info)
        return self._drawer.draw(take_rows, len(columns), self.reader.pack, self.reader.server)[0]
