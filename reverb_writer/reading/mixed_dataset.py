"""Batches with samples of several datasets, such as one half offline data and one half online data.

dataset a -> batches of its own size --+
dataset b -> batches of its own size --+-> Batch [B, ...], info.members -> update_priorities -> a, b
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from reverb_writer.arguments import check_timeout, check_wait
from reverb_writer.deadline import LEAST_S
from reverb_writer.decoding.samples import BatchInfo
from reverb_writer.errors import SpecError
from reverb_writer.leaves import host_array
from reverb_writer.reading.dataset import Dataset
from reverb_writer.reading.priority_updates import checked_updates
from reverb_writer.reading.stats import DatasetStats
from reverb_writer.reading.views import Views
from reverb_writer.slices.batch import Batch


class MixedDataset(Views):
    """An iterator over batches that consist of one batch of each of several datasets.

    It ends when any dataset ends. Samples of a batch are in the order of the datasets; `info.members` has the number of
    each sample's dataset. One thread at a time may iterate; all other methods are thread-safe. A context manager, which
    closes the datasets.

    Attributes:
        datasets: in the order given.

    Example:
        online = rw.ReplayDataset("localhost:8000", "online", batch_size=192)
        offline = rw.ReplayDataset("localhost:8000", "offline", batch_size=64)
        with rw.MixedDataset([online, offline]) as dataset:
            for batch in dataset:
                dataset.update_priorities(batch, train(batch))
    """

    def __init__(self, datasets: Sequence[Dataset]) -> None:
        """Mix datasets.

        Args:
            datasets: each contributes one of its own batches to a batch. Except for the number of samples, the leaves
                must agree in structure, dtypes and shapes.

        Raises:
            SpecError: the datasets cannot be mixed.
        """
        if not isinstance(datasets, Sequence) or not datasets or not all(isinstance(one, Dataset) for one in datasets):
            raise SpecError(f"`datasets` must be a list of ReplayDatasets and SliceDatasets, got {datasets!r}.")
        self.datasets = tuple(datasets)
        self._held: dict[int, Batch] = {}  # batches of some datasets, by number, until all datasets have one

    def __repr__(self) -> str:
        return f"<MixedDataset of {', '.join(map(repr, self.datasets))}>"

    def __iter__(self) -> Iterator[Batch]:
        for dataset in self.datasets:
            iter(dataset)
        return self

    def __next__(self) -> Batch:
        """Return the next batch.

        Raises:
            StructureError: the datasets differ in structure, dtypes or shapes; names the leaf.
            ReplayTimeoutError, ServerUnavailableError, UnsafeDataError, FormatError, ClosedError: as the datasets. No
                sample is lost.
        """
        for number, dataset in enumerate(self.datasets):
            if number not in self._held:
                self._held[number] = next(dataset)
        return self._mixed()

    def poll(self, timeout_s: float = 0.0) -> Batch | None:
        """Return the samples of each dataset that have arrived, at most a batch; None if none have arrived.

        It ends no iteration; see `ReplayDataset.poll`.

        Args:
            timeout_s: time to wait for a full batch, in seconds, >= 0.
        """
        end = time.monotonic() + check_wait(timeout_s)
        for number, dataset in enumerate(self.datasets):
            if number not in self._held:
                batch = dataset.poll(max(end - time.monotonic(), 0.0))
                if batch is not None:
                    self._held[number] = batch
        return self._mixed() if self._held else None

    def _mixed(self) -> Batch:
        """Return the held batches as one batch."""
        numbers, self._held, held = sorted(self._held), {}, self._held
        batches = [held[number] for number in numbers]
        batch = Batch.concatenate(batches, numbers)
        members = np.repeat(numbers, [len(one.info) for one in batches])
        return dataclasses.replace(batch, info=dataclasses.replace(batch.info, members=members))

    def update_priorities(self, batch: Batch, priorities: Any) -> None:
        """Set the priorities of the items of a batch, each in its own table.

        Args:
            batch: a batch of this dataset or of a view of it, or its info.
            priorities: [B], or one for each slice, finite and >= 0, of any framework.

        Raises:
            SpecError: a priority is out of range, samples and priorities differ in number, or another dataset made the
                batch.
            ClosedError: after `close()`.
        """
        info = batch.info if isinstance(batch, Batch) else batch
        if not isinstance(info, BatchInfo) or info.members is None:
            raise SpecError(f"`batch` must come from this dataset, got {type(batch).__name__} without `info.members`.")
        keys, priorities = checked_updates(batch, priorities)
        members = host_array(info.members)
        for member, dataset in enumerate(self.datasets):
            dataset.update_priorities(keys[members == member], priorities[members == member])

    def flush_priorities(self, timeout_s: float | None = None) -> None:
        """Wait at most `timeout_s` seconds until all priorities given so far are set; see `ReplayDataset`."""
        for dataset in self.datasets:
            dataset.flush_priorities(timeout_s)

    def stats(self) -> list[DatasetStats]:
        """Return the counters of each dataset; samples that wait here for their batch count as delivered."""
        return [dataset.stats() for dataset in self.datasets]

    def close(self, timeout_s: float | None = None) -> None:
        """Close the datasets. Idempotent.

        Args:
            timeout_s: time-out of the whole call, in seconds; None for each dataset's own time-out.
        """
        end = None if timeout_s is None else time.monotonic() + check_timeout(timeout_s)
        for dataset in self.datasets:
            dataset.close(None if end is None else max(end - time.monotonic(), LEAST_S))

    def __reduce__(self) -> tuple[Any, ...]:
        return MixedDataset, (self.datasets,)
