"""Batches of which given shares come from given datasets, such as offline and online data half and half.

ReplayDataset a -> batches, cut into parts --+
ReplayDataset b -> batches, cut into parts --+-> Batch [B, ...], info.members -> update_priorities -> a, b
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tree

from reverb_writer.arguments import check_timeout, check_wait, integer, number
from reverb_writer.decoding.samples import BatchInfo
from reverb_writer.errors import SpecError, StructureError
from reverb_writer.leaves import host_array
from reverb_writer.nests import named_leaves
from reverb_writer.reading.batches import Batch, transformed
from reverb_writer.reading.dataset import Views
from reverb_writer.reading.fetchers import LEAST_S
from reverb_writer.reading.priority_updates import checked_updates
from reverb_writer.reading.replay_dataset import ReplayDataset
from reverb_writer.reading.stats import DatasetStats


class MixedDataset(Views):
    """An iterator over batches whose samples come from several datasets in fixed shares.

    It ends when one of them ends. Samples of a batch stand in the order of the datasets; `info.members` has the number
    of each one's dataset. Iterated by one thread at a time; the rest is thread-safe. A context manager, which closes
    the datasets.

    Attributes:
        datasets: in the order given.
        shares: samples of each in a batch.

    Example:
        with rw.MixedDataset({online: 0.5, offline: 0.5}, batch_size=256) as dataset:
            for batch in dataset:
                dataset.update_priorities(batch, train(batch))
    """

    def __init__(
        self,
        weights: Mapping[ReplayDataset, float],
        batch_size: int | None = None,
        *,
        transform: Callable[[Batch], Batch] | None = None,
    ) -> None:
        """Mix datasets.

        Args:
            weights: of each dataset, > 0. Their leaves must be of one structure, dtypes and shapes, but for the number
                of samples.
            batch_size: B, samples in a batch; None for the sum of the datasets' own. Shares are B times the weights,
                rounded so that they add up; each >= 1. A dataset whose own batch size is its share is not copied twice.
            transform: as that of a dataset, of the mixed batches, in the thread that iterates.

        Raises:
            SpecError: an argument can never work.
        """
        if not isinstance(weights, Mapping) or not weights:
            raise SpecError(f"`weights` must be a dict of datasets and their weights, got {weights!r}.")
        for dataset in weights:
            if not isinstance(dataset, ReplayDataset):
                raise SpecError(f"`weights` must be of ReplayDatasets, got {type(dataset).__name__}.")
            if dataset.reuses_buffers:
                raise SpecError("`reuse_buffers` must be False for a dataset that is mixed: its samples are held back.")
        self.datasets = tuple(weights)
        sizes = [dataset.batch_size for dataset in self.datasets]
        batch_size = sum(sizes) if batch_size is None else integer("batch_size", batch_size, minimum=1)
        self.shares = shares_of(batch_size, list(weights.values()))
        self._arguments = list(weights.items()), batch_size, transform
        self._transform = transform
        self._held: list[list[Batch]] = [[] for _ in self.datasets]  # of each, what later batches get

    def __repr__(self) -> str:
        shares = ", ".join(f"{share} of {dataset!r}" for dataset, share in zip(self.datasets, self.shares, strict=True))
        return f"<MixedDataset of {shares}>"

    def __iter__(self) -> Iterator[Batch]:
        for dataset in self.datasets:
            iter(dataset)
        return self

    def __next__(self) -> Batch:
        """Return the next batch.

        Raises:
            StructureError: the datasets differ in structure, dtypes or shapes; names the leaf.
            ReplayTimeoutError, ServerUnavailableError, UnsafeDataError, FormatError, ClosedError: as the datasets. No
                sample is lost by it.
        """
        for dataset, share, held in zip(self.datasets, self.shares, self._held, strict=True):
            while sum(len(batch.info) for batch in held) < share:
                held.append(next(dataset))
        return self._mixed(self.shares)

    def take(self, timeout_s: float = 0.0) -> Batch | None:
        """Return what has arrived by now of each dataset, its share at most; None if there is nothing.

        So the shares of a smaller batch may differ from `shares`. It ends no iteration; see `ReplayDataset.take`.

        Args:
            timeout_s: how long to wait for a full batch, in seconds, >= 0.
        """
        end = time.monotonic() + check_wait(timeout_s)
        for dataset, share, held in zip(self.datasets, self.shares, self._held, strict=True):
            while sum(len(batch.info) for batch in held) < share:
                batch = dataset.take(max(end - time.monotonic(), 0.0))
                if batch is None:
                    break
                held.append(batch)
        sizes = [sum(len(batch.info) for batch in held) for held in self._held]
        counts = [min(size, share) for size, share in zip(sizes, self.shares, strict=True)]
        return self._mixed(counts) if any(counts) else None

    def _mixed(self, counts: Sequence[int]) -> Batch:
        """Return a batch of so many of the samples that are held of each dataset."""
        parts = [_taken(held, count) for held, count in zip(self._held, counts, strict=True)]
        batch = _joined([part for of_member in parts for part in of_member])
        members = np.repeat(np.arange(len(counts)), counts)
        batch = dataclasses.replace(batch, info=dataclasses.replace(batch.info, members=members))
        return batch if self._transform is None else transformed(batch, self._transform)

    def update_priorities(self, batch: Batch, priorities: Any) -> None:
        """Set the priorities of the items of a batch, each in the table that it is from.

        Args:
            batch: from this dataset or a view of it; or its info.
            priorities: [B], finite and >= 0, of any framework.

        Raises:
            SpecError: a priority cannot be one, there are not as many as samples, or the batch is not of this dataset.
            ClosedError: after `close()`.
        """
        info = batch.info if isinstance(batch, Batch) else batch
        if not isinstance(info, BatchInfo) or info.members is None:
            raise SpecError(f"`batch` must be one of this dataset, got {type(batch).__name__} without `info.members`.")
        keys, priorities = checked_updates(batch, priorities)
        members = host_array(info.members)
        for member, dataset in enumerate(self.datasets):
            dataset.update_priorities(keys[members == member], priorities[members == member])

    def flush_priorities(self, timeout_s: float | None = None) -> None:
        """Return when all priorities given so far are set, after `timeout_s` seconds at most; see `ReplayDataset`."""
        for dataset in self.datasets:
            dataset.flush_priorities(timeout_s)

    def stats(self) -> list[DatasetStats]:
        """Return the counters of each dataset; samples that wait here for their batch count as delivered."""
        return [dataset.stats() for dataset in self.datasets]

    def close(self, timeout_s: float | None = None) -> None:
        """Close the datasets. Idempotent.

        Args:
            timeout_s: time-out of the whole call, in seconds; None for that of each dataset.
        """
        end = None if timeout_s is None else time.monotonic() + check_timeout(timeout_s)
        for dataset in self.datasets:
            dataset.close(None if end is None else max(end - time.monotonic(), LEAST_S))

    def __reduce__(self) -> tuple[Any, ...]:
        return _remade, self._arguments


def _remade(weights: Sequence[tuple[ReplayDataset, float]], batch_size: int, transform: Any) -> MixedDataset:
    return MixedDataset(dict(weights), batch_size, transform=transform)


def shares_of(batch_size: int, weights: Sequence[float]) -> list[int]:
    """Divide a batch by weights; what is left over goes to the largest remainders.

    >>> shares_of(256, [0.5, 0.5]), shares_of(10, [1, 1, 1]), shares_of(8, [3, 1])
    ([128, 128], [4, 3, 3], [6, 2])
    """
    checked = [number("weights", weight) for weight in weights]
    if min(checked) <= 0:
        raise SpecError(f"`weights` must be > 0, got {list(weights)!r}. Leave out what should give nothing.")
    exact = [batch_size * weight / sum(checked) for weight in checked]
    shares = [int(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: shares[i] - exact[i])
    for i in by_remainder[: batch_size - sum(shares)]:
        shares[i] += 1
    if min(shares) < 1:
        raise SpecError(
            f"`weights` must give each dataset a sample of a batch of {batch_size} at least, got {list(weights)!r}, "
            f"which is {shares}."
        )
    return shares


def _taken(held: list[Batch], num_samples: int) -> list[Batch]:
    """Remove and return the first samples, of which there are enough."""
    parts = []
    while num_samples:
        batch = held.pop(0)
        if len(batch.info) > num_samples:
            held.insert(0, _part(batch, slice(num_samples, None)))
            batch = _part(batch, slice(num_samples))
        num_samples -= len(batch.info)
        parts.append(batch)
    return parts


def _part(batch: Batch, which: slice) -> Batch:
    return Batch(tree.map_structure(lambda leaf: leaf[which], batch.data), batch.info.choose(which))


def _joined(parts: Sequence[Batch]) -> Batch:
    """Concatenate batches of one structure."""
    first, first_leaves = named_leaves(parts[0].data, "a batch")
    for part in parts:
        paths, leaves = named_leaves(part.data, "a batch")
        for path, other, leaf, like in zip(
            (*paths, ""), (*first, ""), (*leaves, None), (*first_leaves, None), strict=False
        ):
            if path != other or (leaf is not None and (leaf.dtype, leaf.shape[1:]) != (like.dtype, like.shape[1:])):
                got = "" if leaf is None else f" {leaf.dtype} {list(leaf.shape)}"
                expected = "" if like is None else f" {like.dtype} {list(like.shape)}"
                raise StructureError(
                    f"mixed datasets differ: leaf `{path}`{got}, expected `{other}`{expected} as in the first, but for "
                    "the number of samples. Have them alike, by `transform` for example."
                )
    data = tree.map_structure(lambda *leaves: np.concatenate(leaves), *(part.data for part in parts))
    return Batch(data, BatchInfo.concatenate([part.info for part in parts]))
