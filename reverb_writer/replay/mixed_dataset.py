"""Batches with samples of several datasets, such as one half offline data and one half online data.

dataset a -> batches of its own size --+
dataset b -> batches of its own size --+-> Batch [B, ...], info.members -> update_priorities -> a, b
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from reverb_writer.arguments import check_timeout, check_wait
from reverb_writer.deadline import LEAST_S
from reverb_writer.decoding.samples import BatchInfo
from reverb_writer.errors import SpecError
from reverb_writer.leaves import host_array
from reverb_writer.reading.priority_updates import checked_updates, info_of
from reverb_writer.reading.stats import DatasetStats
from reverb_writer.reading.views import View
from reverb_writer.reading.views.forms import Form, in_form
from reverb_writer.replay.dataset import Dataset
from reverb_writer.slices.batch import Batch


class MixedDataset(View):
    """An iterator over batches that consist of one batch of each of several datasets.

    It ends when any dataset ends. Samples of a batch are in the order of the datasets; `info.members`, and for slices
    `slices.members`, have the number of each sample's dataset. If only some tables have stored kinds, the kinds of the
    other tables are those that the leaves show. One thread at a time may iterate; all other methods are thread-safe. A
    context manager, which closes the datasets.

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
        super().__init__(Members(self.datasets))

    def __repr__(self) -> str:
        return f"<MixedDataset of {self.reader}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return MixedDataset, (self.datasets,)


class Members:
    """The datasets of a mixture, as the reader of its views. Forms are made in the thread that calls."""

    def __init__(self, datasets: Sequence[Dataset]) -> None:
        """Start without batches."""
        self._datasets = datasets
        self._held: dict[int, Batch] = {}  # batches of some datasets, by number, until all datasets have one

    def __reduce__(self) -> tuple[Any, ...]:
        return Members, (self._datasets,)

    def __str__(self) -> str:
        return ", ".join(map(repr, self._datasets))

    @property
    def is_prioritized(self) -> bool:
        """Whether the table of any dataset is sampled by priority."""
        return any(dataset.reader.is_prioritized for dataset in self._datasets)

    def begin(self, form: Form) -> None:  # noqa: ARG002  # of the members' batches together
        """Begin to fetch."""
        for dataset in self._datasets:
            iter(dataset)

    def next(self, form: Form) -> Any:
        """Return the next batch in a form; raises as the datasets, and StructureError if the batches differ."""
        for number, dataset in enumerate(self._datasets):
            if number not in self._held:
                self._held[number] = next(dataset)
        return in_form(self._mixed(), form)

    def poll(self, timeout_s: float, form: Form) -> Any:
        """Return the samples of each dataset that have arrived, at most a batch; None if none have arrived."""
        end = time.monotonic() + check_wait(timeout_s)
        for number, dataset in enumerate(self._datasets):
            if number not in self._held:
                batch = dataset.poll(max(end - time.monotonic(), 0.0))
                if batch is not None:
                    self._held[number] = batch
        return in_form(self._mixed(), form) if self._held else None

    def _mixed(self) -> Batch:
        """Return the held batches as one batch."""
        numbers, self._held, held = sorted(self._held), {}, self._held
        batches = [held[number] for number in numbers]
        for number, batch in zip(numbers, batches, strict=True):
            if not isinstance(batch, Batch):
                raise SpecError(f"`transform` of dataset {number} of a mixture must return a Batch, got {type(batch)}.")
        batch = Batch.concatenate(batches, numbers)
        members = np.repeat(numbers, [len(one.info) for one in batches])
        return dataclasses.replace(batch, info=dataclasses.replace(batch.info, members=members))

    def update_priorities(self, batch: Any, priorities: Any) -> None:
        """Set the priorities of the items of a batch of this mixture, each in its own table."""
        info = info_of(batch)
        if not isinstance(info, BatchInfo) or info.members is None:
            raise SpecError(f"`batch` must come from this dataset, got {type(batch).__name__} without `info.members`.")
        keys, priorities = checked_updates(info, priorities)
        members = host_array(info.members)
        for member, dataset in enumerate(self._datasets):
            dataset.update_priorities(keys[members == member], priorities[members == member])

    def flush_priorities(self, timeout_s: float | None) -> None:
        """Wait at most `timeout_s` seconds for each dataset."""
        for dataset in self._datasets:
            dataset.flush_priorities(timeout_s)

    def stats(self) -> DatasetStats:
        """Return the sums of the datasets' counters; samples that wait here for their batch count as delivered."""
        each = [dataset.stats() for dataset in self._datasets]
        sums = {field.name: sum(getattr(one, field.name) for one in each) for field in dataclasses.fields(DatasetStats)}
        largest = {name: max(getattr(one, name) for one in each) for name in ("batches", "last_age_s")}
        return DatasetStats(**{**sums, **largest})

    def close(self, timeout_s: float | None) -> None:
        """Close the datasets, within `timeout_s` seconds together; None for each dataset's own time-out."""
        end = None if timeout_s is None else time.monotonic() + check_timeout(timeout_s)
        for dataset in self._datasets:
            dataset.close(None if end is None else max(end - time.monotonic(), LEAST_S))
