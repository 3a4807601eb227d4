"""Flat batches of slices, laid end to end, from a table of whole episodes or of sequences that span episodes.

The server's sampler draws items, and this module draws slices of each item. Many actors may write to a table at once:
one actor writes each item, so no slice crosses from one actor or episode to another.

Source: TorchRL, `SliceSampler` and its relatives; docs/how-to/from-torchrl.md lists the differences.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from reverb_writer import rows as of_rows
from reverb_writer.arguments import integer, options_of
from reverb_writer.decoding.batch_assembler import BatchAssembler
from reverb_writer.decoding.samples import BatchInfo, SampleRows
from reverb_writer.keywords import takes
from reverb_writer.reading.batch_maker import BatchMaker
from reverb_writer.reading.read_options import ReadKeywords, ReadOptions
from reverb_writer.replay.dataset import Dataset
from reverb_writer.rows.layouts import checked_last_row, leaves_of_kinds, steps_and_mask
from reverb_writer.slices import Slices, SliceSampler
from reverb_writer.slices.axes import Flags, Integers, Kinds, taken
from reverb_writer.slices.batch import Batch
from reverb_writer.slices.boundaries import KnownTrajectories
from reverb_writer.slices.gather import kinds_of_slices, with_ids
from reverb_writer.slices.sampler import By, Short, Start

if TYPE_CHECKING:
    from typing_extensions import Unpack


_LOG = logging.getLogger(__package__)


class SliceDataset(Dataset):
    """An endless iterator over flat batches of slices.

    One thread at a time may iterate. A context manager. Not usable in a forked child.

    Attributes:
        timeout_s: time-out of a batch, in seconds.

    Example:
        with rw.SliceDataset("localhost:8000", "episodes", num_slices=32, slice_len=16) as dataset:
            for batch in dataset:
                values = network(batch.data["observation"], reset=batch.slices.starts)  # [N, ...], N <= 32 x 16
    """

    _num_open_sizes = 1

    @takes(ReadOptions)
    def __init__(
        self,
        replay: Any,
        table: str,
        num_slices: int,
        slice_len: int,
        *,
        by: By = "trajectory",
        short: Short = "keep",
        start: Start = "any",
        pool_size: int | None = None,
        slices_per_item: int = 1,
        with_next: bool = False,
        last_row: of_rows.LastRow | None = None,
        seed: int | None = None,
        **options: Unpack[ReadKeywords],
    ) -> None:
        """Find the table; the first `next` begins to fetch.

        Args:
            replay: a `Client`, or an address, addresses or an object that `Client` takes. With several servers, a
                uniform or prioritized table is sampled as if one server had all items. From any other table, pools
                come from each server in turn.
            table: name of the table. A `MixedDataset` has slices of several tables.
            num_slices: slices in a batch, >= 1.
            slice_len: rows in a slice, >= 1; fewer are possible if `short` is "keep".
            by: "trajectory" draws one slice of every item that the server draws. "row" draws any slices of `pool_size`
                items that the server draws; each slice is equally likely. For equally likely slices of the whole table,
                write items with their length as priority, and sample by priority.
            short: treatment of trajectories shorter than a slice: "keep", "skip", or "pad", whose `batch.mask` is
                False.
            start: "any", or "episode" for slices that start with the first row of an episode.
            pool_size: items that are fetched together, >= 1; None for `num_slices`.
            slices_per_item: number of slices that a pool gives per trajectory, >= 1, in rounds of one slice per
                trajectory. The server sends whole items, so more slices per item are cheaper; consecutive batches then
                have slices of the same items.
            with_next: whether to return `batch.next`, the row after each slice, to bootstrap where a slice was cut.
            last_row: as in `ReplayDataset`, for items of other writers.
            seed: seed of the draws; None for new draws in each run.
            **options: limits, time-outs and the end of the reading: the fields of `ReadOptions`. Here
                `max_in_flight_batches` counts pools.

        Raises:
            SpecError: an argument can never work. Other errors are those of `ReplayDataset`.
        """
        read_options = options_of(ReadOptions, options, self)
        sampler = SliceSampler(num_slices, slice_len, by=by, short=short, start=start)
        last_row = checked_last_row(last_row)
        rng = np.random.default_rng(None if seed is None else integer("seed", seed, minimum=0))
        slices_per_item = integer("slices_per_item", slices_per_item, minimum=1)
        pool_size = num_slices if pool_size is None else integer("pool_size", pool_size, minimum=1)
        self.num_slices = num_slices
        maker = SlicesOfPools(sampler, rng, slices_per_item, last_row=last_row, with_next=with_next)
        self._open(replay, table, pool_size, read_options, maker)


class _Pool(NamedTuple):
    """Samples and their slices."""

    rows: SampleRows
    pack: Callable[[Sequence[Any]], Any]
    info: BatchInfo
    slices: Slices
    items: npt.NDArray[np.int64]  # [S] number of each slice's sample
    num_before: int  # trajectories of earlier pools


@dataclass
class SlicesOfPools(BatchMaker):
    """Makes batches of the slices of pools, in the order of their draws; fields as in `SliceDataset`."""

    sampler: SliceSampler
    rng: np.random.Generator  # no one else uses it
    slices_per_item: int = 1
    last_row: of_rows.LastRow | None = None
    with_next: bool = False

    def __post_init__(self) -> None:
        self._known = KnownTrajectories()
        self._has_warned = False
        self._num_trajectories = 0  # of earlier pools
        self._left: list[Batch] = []  # slices that do not fill a batch yet

    def make(self, samples: BatchAssembler, server: str) -> list[Batch]:
        """Return batches of the remaining slices of earlier pools, then of this pool; see `BatchMaker`."""
        rows = samples.rows()
        rows.check_equal_lengths()
        pool = self._drawn(rows, samples.pack, server)
        batches: list[Batch] = []
        stop, num_slices, size = 0, len(pool.items), self.sampler.num_slices
        while stop < num_slices:
            num_left = sum(len(batch.info) for batch in self._left)
            first, stop = stop, min(stop + size - num_left, num_slices)
            self._left.append(self._copy(pool, first, stop))
            if num_left + stop - first == size and (batch := self.rest()) is not None:
                batches.append(batch)
        return batches

    def rest(self) -> Batch | None:
        """Return the slices that do not fill a batch; None if none remain."""
        left, self._left = self._left, []
        if len(left) > 1:
            return Batch.concatenate(left)
        return left[0] if left else None

    def _drawn(self, rows: SampleRows, pack: Callable[[Sequence[Any]], Any], server: str) -> _Pool:
        """Draw slices of the samples of a pool."""
        info = dataclasses.replace(rows.info, server=server)
        trajectories, item_of = self._known.find(info.keys.tolist(), info.lengths, self._reader(rows, pack))
        divides_items = len(trajectories) > len(info)  # a whole episode may be short
        if divides_items and not self._has_warned and (advice := self.sampler.advice(trajectories)):
            _LOG.warning("%s", advice)
            self._has_warned = True
        slices = self.sampler.of_pool(trajectories, self.rng, self.slices_per_item)
        num_before = self._num_trajectories
        self._num_trajectories += len(trajectories)
        return _Pool(rows, pack, info, slices, item_of[slices.trajectories], num_before)

    def _reader(self, rows: SampleRows, pack: Callable[[Sequence[Any]], Any]) -> Callable[[Integers, Flags], Kinds]:
        """Return a function from numbers of rows, and flags of the first rows of items, to the kinds of the rows."""

        def read(numbers: Integers, starts: Flags) -> Kinds:
            stored = rows.take_kinds(numbers)
            if stored is not None:
                return stored
            no_rows = rows.take(numbers[:0])
            steps, mask = steps_and_mask(pack(no_rows))
            needed = leaves_of_kinds(steps)
            shows = [*needed, mask] if mask is not None else needed
            columns = {at for at, column in enumerate(no_rows) if any(column is leaf for leaf in shows)}
            steps, mask = steps_and_mask(pack(rows.take(numbers, columns)))
            if needed:
                found: Kinds = of_rows.kinds_of(steps, mask=mask, starts=starts, last_row=self.last_row, outcome=False)
                return found
            kinds = np.full(len(numbers), of_rows.ACTION, np.uint8)  # each item is one trajectory
            return kinds if mask is None else np.where(mask, kinds, np.uint8(of_rows.PADDING))

        return read

    def _copy(self, pool: _Pool, first: int, stop: int) -> Batch:
        """Return the slices `first` to `stop` - 1 of a pool, with copies of their rows."""
        pack, rows = pool.pack, pool.rows
        slices = pool.slices.part(first, stop)
        size = len(slices.rows)
        numbers = np.append(slices.rows, slices.next_rows) if self.with_next else slices.rows
        columns, kinds = rows.take_with_kinds(numbers)
        data = pack([column[:size] for column in columns])
        return Batch(
            data,
            taken(pool.info, samples=pool.items[first:stop]),
            slices=with_ids(slices, data, pool.num_before),
            next=pack([column[size:] for column in columns]) if self.with_next else None,
            row_kinds=None if kinds is None else kinds_of_slices(kinds[:size], slices),
            next_kinds=None if kinds is None or not self.with_next else kinds[size:],
            last_row=self.last_row,
        )
