r"""Flat batches of slices, laid end to end, from tables of whole episodes or of sequences that span episodes.

    table a -> ReplayDataset \   samples end to end -> trajectories -> slices
    table b -> ReplayDataset  >  each its share of the slices           -> ContiguousBatch [N, ...]

The server draws items, by the table's sampler; of each item slices are drawn here. Many actors can write to a table at
once: every item is of one actor, so no slice crosses from one episode, or actor, to another.

Source: TorchRL, `SliceSampler` and its relatives; docs/contiguous.md tells where this differs.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import time
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import tree

from reverb_writer.arguments import check_timeout, integer
from reverb_writer.client.client import as_client
from reverb_writer.decoding.samples import SampleInfos
from reverb_writer.errors import SpecError
from reverb_writer.reading.fetchers import picklable_client
from reverb_writer.reading.replay_dataset import ReplayDataset
from reverb_writer.reading.slice_pools import Draw, Member, Part
from reverb_writer.reading.stats import DatasetStats
from reverb_writer.slices import (
    By,
    Short,
    SliceBatch,
    SliceSampler,
    allot,
    concatenate_batches,
)

__all__ = ["ContiguousBatch", "ContiguousDataset"]

_LEAST_S = 0.05  # for what a call asks of a server, although its time-out has been spent on others
_MARKERS = ("is_init", "done", "terminated", "truncated", "cut_by_sampler", "traj_ids", "mask")


@dataclass(frozen=True)
class ContiguousBatch(SliceBatch):
    """Slices laid end to end; see `SliceBatch` for the data and its markers.

    Attributes:
        info: [S] of the item that each slice is of: key, priority, probability, table size, times sampled.
    """

    info: SampleInfos | None = None

    def map_arrays(self, convert: Callable[[npt.NDArray[Any]], Any]) -> ContiguousBatch:
        """Return the batch with each array of data and markers converted, as for a framework; all else stays."""
        markers: dict[str, Any] = {
            name: None if marker is None else convert(marker) for name, marker in self._markers().items()
        }
        return dataclasses.replace(self, data=tree.map_structure(convert, self.data), **markers)

    def numbers(self) -> dict[str, npt.NDArray[Any]]:
        """Return what there is beside the data as a dict of arrays: markers [N], `members` [N] and the info [S]."""
        found = {**vars(self.info), **self._markers(), "members": self.members}
        return {name: array for name, array in found.items() if array is not None}

    def _markers(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _MARKERS}


class ContiguousDataset:
    """An endless iterator over flat batches of slices.

    Iterated by one thread at a time. A context manager. Not usable in a forked child.

    Example:
        with rw.ContiguousDataset("localhost:8000", "episodes", num_slices=32, slice_len=16) as dataset:
            for batch in dataset:
                values = network(batch.data["observation"], reset=batch.is_init)   # [N, ...], N <= 32 x 16
    """

    def __init__(
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
        seed: int | None = None,
        **options: Any,
    ) -> None:
        """Find the tables and start to fetch.

        Args:
            client: a `Client`, an address or several, or a `reverb.Client`.
            table: its name, or several. Each table of each server is a member of an ensemble.
            num_slices: slices in a batch, >= 1.
            slice_len: rows in a slice, >= 1; at most, unless `short` says otherwise.
            by: "trajectory": a slice of every item that the server draws. "row": any slice of `pool_size` items that
                the server draws, each row alike. To have rows alike in the whole table write items with their length as
                priority, and sample by priority.
            short: what becomes of trajectories shorter than a slice: "keep", "skip", or "pad" with a mask.
            span: rows that a slice may hang over the first and the last row of its trajectory: a number, or a pair.
            replacement: False to draw each trajectory, or each slice if `by` is "row", once of a pool. Each item comes
                once altogether from a table with `max_times_sampled=1`.
            row_priority_fn: gets the nest of a pool, leaves [M, ...], and returns [M] priorities of rows, with which
                slices are drawn by their first row; `by` must be "row".
            emit_init: False for `is_init` only if it is stored.
            weights: of the members, server by server and table by table; None if all are alike.
            pool_size: items that are fetched together, >= 1; None for `num_slices`.
            seed: for slices that come again; None for others in each run.
            **options: `timeout_s`, `on_timeout`, `single_pass`, `max_samples` (items of each member), `skip_unsafe`,
                `max_in_flight_batches` and bounds, as of `ReplayDataset`.

        Raises:
            SpecError: an argument can never work, or is set by the slices: `num_steps`, `collate`.
            StructureError: a table is not there; names those that are.
            ServerUnavailableError: a server does not answer within the time-out.
        """
        given = {name: value for name, value in locals().items() if name not in ("self", "client", "table", "options")}
        self._reopen = functools.partial(ContiguousDataset, picklable_client(client), table, **given, **options)
        self._sampler = SliceSampler(num_slices, slice_len, by=by, short=short, span=span)
        for name in ("num_steps", "collate"):
            if name in options:
                raise SpecError(f"`{name}` is set by the slices, got {options[name]!r}. Leave it out.")
        if row_priority_fn is not None and self._sampler.by is not By.ROW:
            raise SpecError("`row_priority_fn` is for slices that are drawn by row. Pass `by='row'`.")
        self._rng = np.random.default_rng(None if seed is None else integer("seed", seed, minimum=0))
        tables = [table] if isinstance(table, str) else list(table) if isinstance(table, Sequence) else []
        if not tables or not all(isinstance(name, str) for name in tables):
            raise SpecError(f"`table` must be the name of a table, or several, got {table!r}.")
        pool_size = num_slices if pool_size is None else integer("pool_size", pool_size, minimum=1)
        timeout_s = options.get("timeout_s")
        self._client, self._owns_client = as_client(client, timeout_s)
        self._timeout_s = self._client.timeout_s if timeout_s is None else check_timeout(timeout_s)
        num_members = len(tables) * len(self._client.shards)
        self._members: list[Member] = []
        self._stopped = self._closed = False  # the first by a time-out, until it is iterated anew
        self._missing: list[int] = []  # slices that the batch under way needs of each member
        self._parts: list[tuple[int, Part]] = []  # of it, with their members; they outlast a time-out
        try:
            self._weights = _checked_weights(weights, num_members)
            draw = Draw(self._sampler, self._rng, replacement, row_priority_fn)
            deadline = time.monotonic() + self._timeout_s
            for number, (one, name) in enumerate(itertools.product(self._client.each(), tables)):
                options["timeout_s"] = max(deadline - time.monotonic(), _LEAST_S)  # one time-out for all tables
                dataset = ReplayDataset(one, name, pool_size, collate="flat", **options)
                dataset.timeout_s = self._timeout_s
                self._members.append(Member(dataset, draw, emit_init=emit_init, number=number, num_members=num_members))
        except BaseException:
            self.close()
            raise

    def __iter__(self) -> Iterator[ContiguousBatch]:
        """Return the dataset itself: it goes on where it was, also after a time-out has ended an iteration."""
        for member in self._members:
            iter(member.dataset)
        self._stopped = False
        return self

    def __next__(self) -> ContiguousBatch:
        """Return the next batch; the last one of a single pass may be smaller.

        A single pass ends when all tables are read: once a table has ended, the others give its share. One time-out
        covers all tables of a batch.

        Raises:
            IncompleteError: for the whole time-out only trajectories came that are too short, or of priority 0.
            ReplayTimeoutError, ServerUnavailableError, UnsafeDataError, FormatError, ClosedError: as `ReplayDataset`.
        """
        start = time.monotonic()
        num_missing = sum(self._missing) or self._sampler.num_slices
        while num_missing and not self._stopped:
            if not self._missing:
                weights = [0 if member.is_exhausted else weight for member, weight in self._weighted()]
                if not any(weights):
                    break
                self._missing = allot(num_missing, weights, self._rng).tolist()
            for number, share in enumerate(self._missing):
                for part in self._members[number].take(share, start):
                    self._parts.append((number, part))
                    self._missing[number] -= len(part.infos.keys)
                self._stopped = self._stopped or (self._missing[number] > 0 and not self._members[number].is_exhausted)
            num_missing, self._missing = sum(self._missing), []
        parts, self._parts = self._parts, []
        if not parts:
            raise StopIteration
        joined = concatenate_batches([part.batch for _, part in parts], [number for number, _ in parts])
        given = {field.name: getattr(joined, field.name) for field in dataclasses.fields(SliceBatch)}
        if len(self._members) == 1:
            given["members"] = None
        return ContiguousBatch(**given, info=SampleInfos.concatenate([part.infos for _, part in parts]))

    def _weighted(self) -> Iterator[tuple[Member, float]]:
        return zip(self._members, self._weights, strict=True)

    def update_priorities(self, batch: ContiguousBatch, priorities: Any) -> None:
        """Set the priorities of the items of a batch, soon; of two slices of one item the last one counts.

        Args:
            batch: from this dataset.
            priorities: [S], one a slice, finite and >= 0.

        Raises:
            SpecError: a priority cannot be one, or there are not as many as slices.
        """
        assert batch.info is not None  # noqa: S101  # made so above
        priorities = np.asarray(priorities, np.float64)
        if priorities.shape != batch.info.keys.shape:
            raise SpecError(
                f"`priorities` has shape {priorities.shape}, expected {batch.info.keys.shape}: one a slice."
            )
        of_slices = np.zeros(len(priorities), int) if batch.members is None else batch.members[batch.slices.first_rows]
        for number, member in enumerate(self._members):
            chosen = of_slices == number
            if chosen.any():
                member.dataset.update_priorities(batch.info.keys[chosen], priorities[chosen])

    def as_torch(self, device: Any = None) -> Any:
        """Return an `IterableDataset` of batches whose data and markers are tensors; see `ReplayDataset.as_torch`.

        Args:
            device: where the tensors go; None for the CPU. For a CUDA device memory is pinned.
        """
        from reverb_writer.reading.views.torch import TorchDataset  # noqa: PLC0415  # brings PyTorch

        return TorchDataset(self._reopen, self, device)

    def as_jax(self, device: Any = None) -> Iterator[ContiguousBatch]:
        """Return an iterator over batches whose data and markers are JAX arrays on `device`; None for the default."""
        from reverb_writer.reading.views.jax import jax_batches  # noqa: PLC0415  # brings JAX

        return jax_batches(self, device)

    def as_tf(self) -> Any:
        """Return a `tf.data.Dataset` of pairs: data, and a dict of markers and info; waits for the first batch."""
        from reverb_writer.reading.views.tf import tf_dataset  # noqa: PLC0415  # brings TensorFlow

        return tf_dataset(self, num_open=1)

    def stats(self) -> list[DatasetStats]:
        """Return the counters of each member, in the order of `weights`."""
        all_stats = [member.dataset.stats() for member in self._members]
        if self._closed:
            for number, (member, stats) in enumerate(zip(self._members, all_stats, strict=True)):
                items = [part.items for owner, part in self._parts if owner == number]
                stats.undelivered_samples += len(np.unique(np.concatenate([*items, member.items_left()])))
        return all_stats

    def close(self, timeout_s: float | None = None) -> None:
        """Stop fetching, and set the priorities that are on their way. Idempotent.

        What has come can still be iterated over; `stats()` counts as `undelivered_samples` the items that are not.

        Args:
            timeout_s: how long all of this takes at most, seconds; None for the dataset's.
        """
        self._closed = True
        deadline = time.monotonic() + (self._timeout_s if timeout_s is None else check_timeout(timeout_s))
        for member in self._members:
            member.dataset.stop()
        for member in self._members:
            member.dataset.close(max(deadline - time.monotonic(), _LEAST_S))
        if self._owns_client:
            self._client.close()

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how to open a dataset like this one in another process; what this one has fetched stays here."""
        return self._reopen, ()

    def __enter__(self) -> ContiguousDataset:
        """Return the dataset itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        """Close."""
        self.close()


def _checked_weights(weights: Sequence[float] | None, num_members: int) -> list[float]:
    found = [1.0] * num_members if weights is None else list(weights) if np.iterable(weights) else []
    if len(found) != num_members:
        raise SpecError(f"`weights` must be one a table of each server, {num_members}, got {weights!r}.")
    allot(0, found, np.random.default_rng())
    return found
