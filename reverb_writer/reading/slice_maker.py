"""Flat batches of slices, drawn from pools: items that were sampled together.

BatchAssembler.rows -> KnownTrajectories -> slices -> their rows are copied -> their markers -> Batch [N, ...]
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from reverb_writer.decoding.batch_assembler import BatchAssembler
from reverb_writer.decoding.sample_rows import SampleRows
from reverb_writer.decoding.samples import BatchInfo
from reverb_writer.decoding.table_structure import TableStructure
from reverb_writer.slices import By, Slices, SliceSampler, Trajectories, read_markers
from reverb_writer.slices.axes import taken
from reverb_writer.slices.batch import Batch
from reverb_writer.slices.boundaries import KnownTrajectories
from reverb_writer.slices.gather import mark_rows
from reverb_writer.slices.markers import marker_leaves

_COPY_BYTES = 16 << 20  # slices of a pool are copied together if they are no larger: the allocator reuses such memory


@dataclass(frozen=True)
class SliceOptions:
    """How slices of a pool are drawn; see `SliceDataset`."""

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


class _Pool(NamedTuple):
    """Samples, and the slices that were drawn of them."""

    rows: SampleRows
    info: BatchInfo
    slices: Slices
    items: npt.NDArray[np.int64]  # [S] number of the sample of each slice
    num_before: int  # trajectories of former pools


class SlicesOfPools:
    """Makes batches of the slices of pools, in the order in which they are drawn; a `BatchMaker`."""

    def __init__(self, structure: TableStructure, options: SliceOptions, rng: np.random.Generator) -> None:
        """Start without a pool. `rng` is used by nothing else."""
        self.calls_user = options.row_priority_fn is not None
        self._structure, self._options, self._rng = structure, options, rng
        self._known = KnownTrajectories()
        self._num_trajectories = 0  # of former pools
        self._left: list[Batch] = []  # slices that fill no batch yet

    def make(self, assembler: BatchAssembler, server: str) -> Iterator[tuple[Batch | None, bool]]:
        """Yield batches of the slices of the next pool, after those that former pools have left; see `BatchMaker`."""
        pool = self._drawn(assembler.rows(), server)
        sampler, num_slices = self._options.sampler, len(pool.items)
        size = sampler.num_slices
        batch_bytes = size * sampler.slice_len * pool.rows.row_bytes
        step = size * max(_COPY_BYTES // max(batch_bytes, 1), 1)  # so many slices are copied together
        ends = range(size - sum(len(batch.info) for batch in self._left), num_slices + 1, size)  # of batches
        copied: Batch
        full: Batch | None = None
        for first, stop in itertools.pairwise(sorted({*range(0, num_slices, step), *ends, num_slices})):
            begin = first % step
            if begin == 0:
                copied = self._copy(pool, first, min(first + step, num_slices))
            is_all = stop - first == len(copied.info)
            self._left.append(copied if is_all else copied.part(begin, begin + stop - first))
            if stop in ends:
                full, self._left = _joined(self._left), []
                if stop != ends[-1]:
                    yield full, False
        assembler.begin_next()
        yield full, True

    def rest(self) -> Batch | None:
        """Return the slices that fill no batch; None if there are none."""
        left, self._left = self._left, []
        return _joined(left) if left else None

    def _drawn(self, rows: SampleRows, server: str) -> _Pool:
        """Draw slices of the samples of a pool."""
        options, info = self._options, dataclasses.replace(rows.info, server=server)
        trajectories, item_of = self._known.find(info.keys.tolist(), info.lengths, self._reader(rows))
        if not options.replacement:
            first = np.unique(info.keys, return_index=True)[1]
            chosen = np.flatnonzero(np.isin(item_of, first))
            trajectories, item_of = trajectories.choose(chosen), item_of[chosen]
        data = None
        if options.row_priority_fn is not None:
            data = self._structure.pack([rows.column(index) for index in range(rows.num_columns)])
        slices = options.draw(data, trajectories, self._rng)
        num_before = self._num_trajectories
        self._num_trajectories += len(trajectories)
        return _Pool(rows, info, slices, item_of[slices.trajectories], num_before)

    def _reader(self, rows: SampleRows) -> Callable[[npt.NDArray[np.int64]], Any]:
        """Return a function that returns the leaves of some rows that have markers."""
        pack = self._structure.pack
        return lambda chosen: pack(rows.take(chosen, marker_leaves(pack(range(rows.num_columns)))))

    def _copy(self, pool: _Pool, first: int, stop: int) -> Batch:
        """Return slices number `first` to `stop` - 1 of a pool, with copies of their rows."""
        options, pack, rows = self._options, self._structure.pack, pool.rows
        slices = taken(pool.slices, samples=slice(first, stop), rows=pool.slices.rows_of(first, stop))
        items = pool.items[first:stop]
        first_rows = slices.first_rows
        begin = slices.rows[first_rows]
        preceding = np.maximum(begin - 1, (pool.info.lengths.cumsum() - pool.info.lengths)[items])
        columns = rows.take(np.append(slices.rows, slices.next_rows) if options.with_next else slices.rows)
        data = pack([column[: len(slices.rows)] for column in columns])
        after = pack([column[len(slices.rows) :] for column in columns]) if options.with_next else None
        read = self._reader(rows)
        stored = read_markers(data, starts=first_rows, before=lambda: read(preceding))
        markers = mark_rows(slices, stored, emit_init=options.emit_init)
        ids = markers.traj_ids.copy()  # not the memory of `data`
        if stored.traj_ids is None:
            ids = ids + pool.num_before
        return Batch(data, taken(pool.info, samples=items), dataclasses.replace(markers, traj_ids=ids), after)


def _joined(batches: Sequence[Batch]) -> Batch:
    return batches[0] if len(batches) == 1 else Batch.concatenate(batches)
