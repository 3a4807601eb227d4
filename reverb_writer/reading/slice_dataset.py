r"""Flat batches of slices, laid end to end, from tables of whole episodes or of sequences that span episodes.

    table a -> TableReader -> SlicePools \   each its share
    table b -> TableReader -> SlicePools  >  of the slices  -> Batch [N, ...]

The server draws items, by the table's sampler; of each item slices are drawn here. Many actors can write to a table at
once: every item is of one actor, so no slice crosses from one episode, or actor, to another.

Source: TorchRL, `SliceSampler` and its relatives; docs/compatibility.md lists the differences.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from reverb_writer.arguments import integer
from reverb_writer.client.client import Client
from reverb_writer.decoding.batch_assembler import MAX_SAMPLE_BYTES
from reverb_writer.errors import SpecError
from reverb_writer.reading.batches import Batch, transformed
from reverb_writer.reading.dataset import Dataset
from reverb_writer.reading.fetchers import LEAST_S
from reverb_writer.reading.priority_updates import checked_updates
from reverb_writer.reading.read_options import MAX_CACHE_BYTES, OnTimeout, ReadOptions
from reverb_writer.reading.slice_pools import SliceDrawer, SliceOptions, SlicePools
from reverb_writer.reading.stats import DatasetStats
from reverb_writer.reading.table_reader import TableReader
from reverb_writer.slices import (
    By,
    Short,
    SliceSampler,
    allot,
)


class ContiguousDataset(Dataset):
    """An endless iterator over flat batches of slices.

    Iterated by one thread at a time. A context manager. Not usable in a forked child.

    Attributes:
        timeout_s: time-out of a batch, in seconds.

    Example:
        with rw.ContiguousDataset("localhost:8000", "episodes", num_slices=32, slice_len=16) as dataset:
            for batch in dataset:
                values = network(batch.data["observation"], reset=batch.markers.is_init)  # [N, ...], N <= 32 x 16
    """

    _num_open_sizes = 1

    def __init__(  # noqa: D417  # `ReadOptions` documents the others
        self,
        client: Any,
        table: str | Sequence[str],
        num_slices: int,
        slice_len: int,
        *,
        by: By | str = By.TRAJECTORY,
        short: Short | str = Short.KEEP,
        span: int | tuple[int, int] = 0,
        replacement: bool = True,
        row_priority_fn: Callable[[Any], Any] | None = None,
        emit_init: bool = True,
        weights: Sequence[float] | None = None,
        pool_size: int | None = None,
        slices_per_item: int = 1,
        with_next: bool = False,
        seed: int | None = None,
        max_in_flight_batches: int = 2,
        timeout_s: float | None = None,
        connect_timeout_s: float | None = None,
        on_timeout: OnTimeout = "raise",
        single_pass: bool = False,
        max_samples: int | None = None,
        skip_unsafe: bool = False,
        reuse_buffers: bool = False,
        max_cache_bytes: int = MAX_CACHE_BYTES,
        max_sample_bytes: int = MAX_SAMPLE_BYTES,
        transform: Callable[[Batch], Batch] | None = None,
    ) -> None:
        """Find the tables and start to fetch.

        `ReadOptions` documents the keywords that are not listed here. A batch is a pool,
        and `max_samples` counts the items of each member. `transform` gets the batches of slices, in the thread that
        iterates.

        Args:
            client: a `Client`, an address or several, a `Target` or its source, or a `reverb.Client`. Its servers are
                those of the target now: one that joins later is not read.
            table: its name, or several. Each table of each server is a member of an ensemble.
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
            weights: of the members, server by server and table by table; None for equal weights.
            pool_size: items that are fetched together, >= 1; None for `num_slices`.
            slices_per_item: how many slices a pool gives for each of its trajectories, >= 1. They come in rounds: each
                round has one slice of each trajectory. The server sends whole items, so more slices of each are
                cheaper; batches that follow each other have slices of the same items then. `replacement` must be True.
            with_next: give `batch.next`, the row that follows each slice, to bootstrap where a slice was cut.
            seed: to draw the same slices in each run; None for others.

        Raises:
            SpecError: an argument can never work. Other errors are those of `ReplayDataset`.
        """
        options = ReadOptions(
            max_in_flight_batches=max_in_flight_batches,
            timeout_s=timeout_s,
            connect_timeout_s=connect_timeout_s,
            on_timeout=on_timeout,
            single_pass=single_pass,
            max_samples=max_samples,
            skip_unsafe=skip_unsafe,
            reuse_buffers=reuse_buffers,
            max_cache_bytes=max_cache_bytes,
            max_sample_bytes=max_sample_bytes,
            transform=transform,
        )
        self._sampler = SliceSampler(num_slices, slice_len, by=by, short=short, span=span)
        if row_priority_fn is not None and self._sampler.by is not By.ROW:
            raise SpecError("`row_priority_fn` is for slices that are drawn by row. Pass `by='row'`.")
        self._rng = np.random.default_rng(None if seed is None else integer("seed", seed, minimum=0))
        tables = [table] if isinstance(table, str) else list(table) if isinstance(table, Sequence) else []
        if not tables or not all(isinstance(name, str) for name in tables):
            raise SpecError(f"`table` must be the name of a table, or several, got {table!r}.")
        slices_per_item = integer("slices_per_item", slices_per_item, minimum=1)
        if slices_per_item > 1 and not replacement:
            raise SpecError(
                "`slices_per_item` must be 1 with `replacement=False`, got "
                f"{slices_per_item}: each slice or trajectory of a pool is drawn once."
            )
        pool_size = num_slices if pool_size is None else integer("pool_size", pool_size, minimum=1)
        self._weights: list[float] = []
        self._members: list[SlicePools] = []
        self._stopped = False  # by a time-out, until it is iterated again
        self._missing: list[int] = []  # slices of each member that the unfinished batch lacks
        # The unfinished batch: member, slices and numbers of their items. It is kept after a time-out.
        self._parts: list[tuple[int, Batch, npt.NDArray[np.int64]]] = []

        how = SliceOptions(self._sampler, slices_per_item, replacement, row_priority_fn, emit_init, with_next)

        def make_readers(client: Client, deadline: float) -> Iterator[TableReader]:
            num_members = len(tables) * len(client.shards)
            self._weights = _checked_weights(weights, num_members)
            for one, name in itertools.product(client.each(), tables):
                number = len(self._members)
                drawer = SliceDrawer(how, self._rng.spawn(1)[0], number=number, num_members=num_members)
                left_s = max(deadline - time.monotonic(), LEAST_S)  # one time-out for all tables
                finish = None if row_priority_fn is not None else drawer.draw_assembled
                reader = TableReader(one, name, pool_size, options, left_s, finish=finish)
                self._members.append(SlicePools(reader, drawer))
                yield reader

        self._open(client, options, make_readers)

    def __iter__(self) -> Iterator[Batch]:
        self._stopped = False
        return super().__iter__()

    def _next_batch(self, start: float) -> Batch | None:
        """Return the next batch; the last one of a single pass may be smaller.

        A single pass ends when all tables are read: once a table has ended, the others give its share. One time-out
        covers all tables of a batch.
        """
        num_missing = sum(self._missing) or self._sampler.num_slices
        while num_missing and not self._stopped:
            if not self._missing:
                weights = [0 if member.is_exhausted else weight for member, weight in self._weighted()]
                if not any(weights):
                    break
                self._missing = allot(num_missing, weights, self._rng).tolist()
            for number, share in enumerate(self._missing):
                self._keep(number, self._members[number].take(share, start, self.timeout_s))
                self._stopped = self._stopped or (self._missing[number] > 0 and not self._members[number].is_exhausted)
            num_missing, self._missing = sum(self._missing), []
        return self._batch()

    def _take_batch(self, start: float, timeout_s: float) -> Batch | None:
        """Return the slices that have arrived; what one member's share lacks, the others give."""
        if not self._missing:
            self._missing = allot(self._sampler.num_slices, self._weights, self._rng).tolist()
        for number, share in enumerate(self._missing):
            self._keep(number, self._members[number].take(share, start, timeout_s, arrived=True))
        for number, (member, weight) in enumerate(self._weighted()):
            if weight:
                num_missing = sum(self._missing)
                self._missing = [num_missing * (other == number) for other in range(len(self._members))]
                self._keep(number, member.take(num_missing, start, timeout_s, arrived=True))
        self._missing = []
        return self._batch()

    def _keep(self, number: int, slices: Iterator[tuple[Batch, npt.NDArray[np.int64]]]) -> None:
        """Add slices of a member to the unfinished batch."""
        for batch, items in slices:
            self._parts.append((number, batch, items))
            self._missing[number] -= len(batch.info)

    def _batch(self) -> Batch | None:
        """Return the unfinished batch as it is; None if it has no slices."""
        parts, self._parts = self._parts, []
        if not parts:
            return None
        numbers, batches, _ = zip(*parts, strict=True)
        batch = batches[0] if len(batches) == 1 else Batch.concatenate(batches, numbers)
        several = len(self._members) > 1
        if several == (batch.markers.members is None):
            members = np.full(len(batch.markers), numbers[0]) if several else None
            batch = dataclasses.replace(batch, markers=dataclasses.replace(batch.markers, members=members))
        return batch if self._options.transform is None else transformed(batch, self._options.transform)

    def _weighted(self) -> Iterator[tuple[SlicePools, float]]:
        return zip(self._members, self._weights, strict=True)

    def update_priorities(self, batch: Batch, priorities: Any) -> None:
        """Set the priorities of the items of a batch, soon; of two slices of one item the last one counts.

        Args:
            batch: from this dataset.
            priorities: [S], one a slice, finite and >= 0; of any framework.

        Raises:
            SpecError: a priority cannot be one, or there are not as many as slices.
        """
        keys, priorities = checked_updates(batch, priorities)
        markers = batch.markers
        of_slices = 0 if markers.members is None else markers.members[markers.slices.first_rows]
        for number, member in enumerate(self._members):
            chosen = np.broadcast_to(of_slices == number, priorities.shape)
            if chosen.any():
                member.reader.updates.put(keys[chosen], priorities[chosen])

    def stats(self) -> list[DatasetStats]:
        """Return the counters of each member, in the order of `weights`."""
        all_stats = [member.reader.stats() for member in self._members]
        if not self._finalizer.alive:
            for number, (member, stats) in enumerate(zip(self._members, all_stats, strict=True)):
                in_parts = sum(int((items >= 0).sum()) for owner, _, items in self._parts if owner == number)
                stats.undelivered_samples += in_parts + member.num_items_left()
        return all_stats


def _checked_weights(weights: Sequence[float] | None, num_members: int) -> list[float]:
    found = [1.0] * num_members if weights is None else list(weights) if np.iterable(weights) else []
    if len(found) != num_members:
        raise SpecError(f"`weights` must be one a table of each server, {num_members}, got {weights!r}.")
    allot(0, found, np.random.default_rng())
    return found
