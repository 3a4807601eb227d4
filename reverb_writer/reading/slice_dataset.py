"""Flat batches of slices, laid end to end, from a table of whole episodes or of sequences that span episodes.

    servers -> Mixer -> pools of items -> SlicesOfPools -> transform -> Prefetcher -> Batch [N, ...]

The server draws items, by the table's sampler; of each item slices are drawn here. Many actors can write to a table at
once: every item is of one actor, so no slice crosses from one episode, or actor, to another.

Source: TorchRL, `SliceSampler` and its relatives; docs/how-to/from-torchrl.md lists the differences.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from reverb_writer.arguments import integer
from reverb_writer.errors import SpecError
from reverb_writer.reading.dataset import Dataset
from reverb_writer.reading.read_options import ReadKeywords, ReadOptions
from reverb_writer.reading.slice_maker import SliceOptions, SlicesOfPools
from reverb_writer.slices import By, Short, SliceSampler

if TYPE_CHECKING:
    from typing_extensions import Unpack


class SliceDataset(Dataset):
    """An endless iterator over flat batches of slices.

    Iterated by one thread at a time. A context manager. Not usable in a forked child.

    Attributes:
        timeout_s: time-out of a batch, in seconds.

    Example:
        with rw.SliceDataset("localhost:8000", "episodes", num_slices=32, slice_len=16) as dataset:
            for batch in dataset:
                values = network(batch.data["observation"], reset=batch.markers.is_init)  # [N, ...], N <= 32 x 16
    """

    _num_open_sizes = 1

    def __init__(
        self,
        replay: Any,
        table: str,
        num_slices: int,
        slice_len: int,
        *,
        by: By | str = By.TRAJECTORY,
        short: Short | str = Short.KEEP,
        span: int | tuple[int, int] = 0,
        replacement: bool = True,
        row_priority_fn: Callable[[Any], Any] | None = None,
        emit_init: bool = True,
        pool_size: int | None = None,
        slices_per_item: int = 1,
        with_next: bool = False,
        seed: int | None = None,
        **options: Unpack[ReadKeywords],
    ) -> None:
        """Find the table; the first `next` begins to fetch.

        Args:
            replay: a `Client`, or an address, addresses or an object that `Client` takes. If there are several servers,
                a uniform or prioritized table is sampled as if one server had all items. From any other table, pools
                come from each server in turn.
            table: its name. A `MixedDataset` has slices of several tables.
            num_slices: slices in a batch, >= 1.
            slice_len: rows in a slice, >= 1; at most, unless `short` says otherwise.
            by: "trajectory" draws one slice of every item that the server draws. "row" draws any slices of `pool_size`
                items that the server draws; each row is equally likely. For equally likely rows of the whole table,
                write items with their length as priority, and sample by priority.
            short: what becomes of trajectories shorter than a slice: "keep", "skip", or "pad" with a mask.
            span: rows that a slice may hang over the first and the last row of its trajectory: a number, or a pair.
            replacement: False to draw each trajectory, or each slice if `by` is "row", only once from a pool. From a
                table with `max_times_sampled=1`, each item comes only once altogether.
            row_priority_fn: gets the nest of a pool, leaves [M, ...], and returns [M] priorities of rows. A slice is
                drawn with the priority of its first row. `by` must be "row".
            emit_init: False for `is_init` only if it is stored.
            pool_size: items that are fetched together, >= 1; None for `num_slices`.
            slices_per_item: how many slices a pool gives for each of its trajectories, >= 1. They come in rounds: each
                round has one slice of each trajectory. The server sends whole items, so more slices of each are
                cheaper; batches that follow each other have slices of the same items then. `replacement` must be True.
            with_next: give `batch.next`, the row that follows each slice, to bootstrap where a slice was cut.
            seed: to draw the same slices in each run; None for others.
            **options: limits, time-outs and the end of the reading: the fields of `ReadOptions`. A batch that is
                fetched ahead is a pool here, and `max_samples` counts items.

        Raises:
            SpecError: an argument can never work. Other errors are those of `ReplayDataset`.
        """
        read_options = ReadOptions(**options)
        sampler = SliceSampler(num_slices, slice_len, by=by, short=short, span=span)
        if row_priority_fn is not None and sampler.by is not By.ROW:
            raise SpecError("`row_priority_fn` is for slices that are drawn by row. Pass `by='row'`.")
        rng = np.random.default_rng(None if seed is None else integer("seed", seed, minimum=0))
        slices_per_item = integer("slices_per_item", slices_per_item, minimum=1)
        if slices_per_item > 1 and not replacement:
            raise SpecError(
                "`slices_per_item` must be 1 with `replacement=False`, got "
                f"{slices_per_item}: each slice or trajectory of a pool is drawn once."
            )
        pool_size = num_slices if pool_size is None else integer("pool_size", pool_size, minimum=1)
        self.num_slices = num_slices
        how = SliceOptions(sampler, slices_per_item, replacement, row_priority_fn, emit_init, with_next)
        self._open(replay, table, pool_size, read_options, lambda structure: SlicesOfPools(structure, how, rng))
