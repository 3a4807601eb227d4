"""Slices of one table of one server, drawn from pools: items that were sampled together.

    BatchAssembler.rows -> KnownTrajectories -> slices -> their rows are copied -> their markers -> DrawnSlices

This happens in the thread that fetches. Only with `row_priority_fn`, which needs all columns of all rows and is the
user's own code, it happens in the reader's thread.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from reverb_writer.decoding.batch_assembler import BatchAssembler
from reverb_writer.decoding.sample_rows import SampleRows
from reverb_writer.decoding.samples import BatchInfo
from reverb_writer.errors import IncompleteError, ReplayTimeoutError
from reverb_writer.reading.batches import Batch
from reverb_writer.reading.table_reader import Pack, TableReader
from reverb_writer.reading.thread_fetcher import Part
from reverb_writer.slices import By, SliceMarkers, Slices, SliceSampler, Trajectories, read_markers
from reverb_writer.slices.boundaries import KnownTrajectories
from reverb_writer.slices.gather import mark_rows
from reverb_writer.slices.markers import marker_leaves

_LOG = logging.getLogger(__package__)

ItemNumbers = npt.NDArray[np.int64]

_PART_BYTES = 16 << 20  # slices of a pool are copied together if they are no larger: the allocator reuses such memory


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
    """Slices of one pool, laid end to end."""

    data: Any  # leaves [N, ...]
    next: Any  # leaves [S, ...], the row after each slice; None without `with_next`
    markers: SliceMarkers  # of the N rows
    info: BatchInfo  # [S] of the item of each slice
    # [S] number of the item of each slice; items are numbered in the order in which they arrive. -1 if a later
    # slice of the pool is of the same item.
    items: ItemNumbers

    def part(self, first: int, stop: int) -> Batch:
        """Return slices number `first` to `stop` - 1, as views."""
        batch = Batch(self.data, self.info, self.markers, self.next)
        return batch if first == 0 and stop == len(self.items) else batch.part(first, stop)


class SliceDrawer:
    """Draws slices of the pools of one table of one server, in the order in which they arrive."""

    def __init__(self, options: SliceOptions, rng: np.random.Generator, *, number: int, num_members: int) -> None:
        """Start without a pool, as member `number` of `num_members`, so that ids of trajectories differ.

        `rng` is used by nothing else.
        """
        self._options, self._rng, self._number, self._num_members = options, rng, number, num_members
        self._known = KnownTrajectories()
        self._num_trajectories = self._num_items = 0  # of former pools

    def draw_assembled(self, assembler: BatchAssembler, pack: Pack, server: str) -> list[Part]:
        """Draw slices of the samples that an assembler holds; see `draw`."""
        return self.draw(assembler.rows(), pack, server, assembler.begin_next)

    def draw(self, rows: SampleRows, pack: Pack, server: str, end: Callable[[], None] = lambda: None) -> list[Part]:
        """Draw slices of the next pool.

        Returns:
            One part or more: functions that copy the rows of some slices, and return `DrawnSlices`.
        """
        options, info = self._options, dataclasses.replace(rows.info, server=server)

        def read(chosen: npt.NDArray[np.int64]) -> Any:
            """Return the leaves of some rows that have markers."""
            return pack(rows.take(chosen, marker_leaves(pack(range(rows.num_columns)))))

        trajectories, item_of = self._known.find(rows.items, info.lengths, read)
        if not options.replacement:
            first = np.unique(info.keys, return_index=True)[1]
            chosen = np.flatnonzero(np.isin(item_of, first))
            trajectories, item_of = trajectories.choose(chosen), item_of[chosen]
        data = None
        if options.row_priority_fn is not None:
            data = pack([rows.column(index) for index in range(rows.num_columns)])
        all_slices = options.draw(data, trajectories, self._rng)
        items = item_of[all_slices.trajectories]
        num_before, num_slices = self._num_trajectories, len(items)
        self._num_trajectories += len(trajectories)
        last_slices = np.full(len(info), -1)
        last_slices[items] = np.arange(num_slices)  # of several slices of one item the last one counts
        is_last = last_slices[items] == np.arange(num_slices)
        numbers = np.where(is_last, self._num_items + items, -1)
        self._num_items += len(info)
        item_rows = info.lengths.cumsum() - info.lengths
        batch_bytes = options.sampler.num_slices * options.sampler.slice_len * rows.row_bytes
        step = options.sampler.num_slices * max(_PART_BYTES // max(batch_bytes, 1), 1)
        parts: list[Part] = []
        for first_slice in range(0, num_slices, step):
            part = slice(first_slice, min(first_slice + step, num_slices))
            delivered = items[part][is_last[part]]
            if part.stop == num_slices:  # with items that have no slice
                delivered = np.append(delivered, np.flatnonzero(last_slices < 0))

            # It must not refer to `parts`, which hold it: the rows of a pool would stay until the collector runs.
            def copy(part: slice = part) -> DrawnSlices:
                is_all = part.start == 0 and part.stop == num_slices
                slices = all_slices if is_all else all_slices.part(part.start, part.stop)
                first_rows = slices.first_rows
                begin = slices.rows[first_rows]
                preceding = np.maximum(begin - 1, item_rows[items[part]])
                columns = rows.take(np.append(slices.rows, slices.next_rows) if options.with_next else slices.rows)
                data = pack([column[: len(slices.rows)] for column in columns])
                after = pack([column[len(slices.rows) :] for column in columns]) if options.with_next else None
                stored = read_markers(data, starts=first_rows, before=lambda: read(preceding))
                markers = mark_rows(slices, stored, emit_init=options.emit_init)
                ids = markers.traj_ids.copy()  # not the memory of `data`
                if stored.traj_ids is None:
                    ids = (num_before + ids) * self._num_members + self._number
                if part.stop == num_slices:
                    end()
                markers = dataclasses.replace(markers, traj_ids=ids)
                return DrawnSlices(data, after, markers, info.choose(items[part]), numbers[part])

            parts.append((copy, info.choose(delivered)))
        return parts


class SlicePools:
    """One table of one server: the slices of its pools, one after the other."""

    def __init__(self, reader: TableReader, drawer: SliceDrawer) -> None:
        """Start without a pool: one is what the reader returns at once.

        `drawer` draws slices of samples if the reader has not.
        """
        self.reader, self._drawer = reader, drawer
        self._drawn: DrawnSlices | None = None
        self._next = 0  # number of the next slice
        self._parts: collections.deque[Part] = collections.deque()  # of the pool, later ones
        self._said_too_short = False

    def num_items_left(self) -> int:
        """Return the number of items whose last slice is not taken."""
        in_drawn = 0 if self._drawn is None else int((self._drawn.items[self._next :] >= 0).sum())
        return in_drawn + sum(len(info) for _, info in self._parts)

    @property
    def is_exhausted(self) -> bool:
        """Whether all slices are taken and no more items will come."""
        are_taken = self._drawn is None or self._next == len(self._drawn.items)
        return self.reader.is_exhausted and not self._parts and are_taken

    def take(
        self, num_slices: int, start: float, timeout_s: float, *, arrived: bool = False
    ) -> Iterator[tuple[Batch, ItemNumbers]]:
        """Yield the next slices, in one batch or in several, each with the number of the item of each slice.

        The wait of `timeout_s` seconds began at `start`. If it ends, what has `arrived` is yielded, or an error raised.
        """
        while num_slices and (drawn := self._slices_left(start, timeout_s, arrived)):
            first, self._next = self._next, min(self._next + num_slices, len(drawn.items))
            num_slices -= self._next - first
            yield drawn.part(first, self._next), drawn.items[first : self._next]

    def _slices_left(self, start: float, timeout_s: float, arrived: bool) -> DrawnSlices | None:
        """Return the slices of the pool, or of the next one if all are taken; None at the end."""
        next_samples = self.reader.take if arrived else self.reader.next
        too_short: IncompleteError | None = None
        while self._drawn is None or self._next == len(self._drawn.items):
            try:
                if not self._parts:
                    samples = next_samples(start, timeout_s)
                    if samples is None:
                        return None
                    self._drawn, self._next = None, 0
                    self._parts.extend(self._parts_of(*samples))
                make, _ = self._parts.popleft()
                self._drawn, self._next = make(), 0
            except ReplayTimeoutError as error:
                raise too_short or error from None
            except IncompleteError as error:
                too_short = error
                if time.monotonic() > start + timeout_s:
                    if not arrived:
                        raise
                    if not self._said_too_short:
                        self._said_too_short = True
                        _LOG.warning("Table `%s`: %s `take` leaves such samples out.", self.reader.table, error)
                    return None
        return self._drawn

    def _parts_of(self, drawn: Any, info: BatchInfo) -> list[Part]:
        """Return functions that make slices; the reader has either made them, or returned whole samples."""
        if isinstance(drawn, DrawnSlices):
            return [(lambda: drawn, info)]
        return self._drawer.draw(SampleRows.of_columns(drawn, info), self.reader.structure.pack, self.reader.server)
