"""Batches of whole samples: stacked, padded, or laid end to end.

samples ---------------------------------------------> one batch               without limits of rows or ages
samples -> fresh ones -> full batches by size and rows -> batches, and a rest   with them
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from reverb_writer.decoding.batch_assembler import BatchAssembler
from reverb_writer.decoding.samples import SampleRows
from reverb_writer.errors import StructureError
from reverb_writer.reading.ages import versions_of
from reverb_writer.reading.batch_maker import BatchMaker
from reverb_writer.rows import LastRow
from reverb_writer.slices import Slices
from reverb_writer.slices.batch import Batch

Array = npt.NDArray[Any]
Collate = Literal["error", "pad", "pack"]


@dataclass
class WholeSamples(BatchMaker):
    """Makes batches of whole samples; fields as in `ReplayDataset`.

    Attributes:
        newest: the newest version, which another thread may assign; None if it is unknown.
    """

    batch_size: int
    collate: Collate = "error"
    last_row: LastRow | None = None
    max_rows: int | None = None
    max_age: int | None = None
    version: str = "version"

    def __post_init__(self) -> None:
        self.newest: int | None = None
        self.is_lazy = self.max_age is not None
        self._cuts = self.max_rows is not None or self.max_age is not None
        self._left: list[SampleRows] = []  # samples that do not fill a batch yet; at most one run

    def is_full(self, samples: BatchAssembler) -> bool:
        """Return whether the remaining samples and these samples fill a batch."""
        if not self._cuts:
            return False
        lengths = [*(run.info.lengths for run in self._left), samples.lengths()]
        return bool(self._stops(np.concatenate(lengths)))

    def make(self, samples: BatchAssembler, server: str) -> list[Batch]:
        """Return one batch; with limits of rows or ages, all full batches, or one if it `is_lazy`."""
        self._pack = samples.pack
        if not self._cuts:
            return [self._batch(self._read(samples.rows(), server))]
        runs = self._left
        if samples.num_samples:
            new = self._read(samples.rows(), server)
            if runs and runs[0].form != new.form:  # of a writer whose items have no spec
                self._left = [new.joined()]
                return [self._batch(runs[0])]
            runs = [*runs, new]
        runs = self._fresh(runs)
        lengths = np.concatenate([np.zeros(0, np.int64), *(run.info.lengths for run in runs)])
        stops = [0, *self._stops(lengths)][: 2 if self.is_lazy else None]
        batches = [self._batch(_part(runs, *edges)) for edges in itertools.pairwise(stops)]
        self._left = [_part(runs, stops[-1], len(lengths), copies=True)] if stops[-1] < len(lengths) else []
        return batches

    def rest(self) -> Batch | None:
        """Return the samples that do not fill a batch; None if none remain."""
        runs, self._left = self._fresh(self._left), []
        return self._batch(runs[0]) if runs else None

    def _read(self, samples: SampleRows, server: str) -> SampleRows:
        """Return samples with all their info."""
        has_versions = self.newest is not None or self.max_age is not None
        versions = versions_of(samples, self._pack, self.version) if has_versions else None
        if server or has_versions:
            samples.info = dataclasses.replace(samples.info, server=server, versions=versions)
        return samples

    def _fresh(self, runs: Sequence[SampleRows]) -> list[SampleRows]:
        """Return the samples that are not too old, and count the others."""
        newest = self.newest
        if self.max_age is None or newest is None:
            return [*runs]
        fresh = []
        for run in runs:
            chosen = np.flatnonzero(newest - run.info.versions <= self.max_age)
            self.num_left_out += len(run) - len(chosen)
            if len(chosen):
                fresh.append(run if len(chosen) == len(run) else run.of(chosen))
        return fresh

    def _stops(self, lengths: npt.NDArray[np.int64]) -> list[int]:
        """Return the number after the last sample of each full batch, of samples of these lengths.

        A sample of more rows than the limit is a batch by itself.
        """
        max_rows = math.inf if self.max_rows is None else self.max_rows
        stops = []
        first = longest = total = 0
        for number, length in enumerate(lengths.tolist()):
            longest, total = max(longest, length), total + length
            num_rows = longest * (number + 1 - first) if self.collate == "pad" else total
            if num_rows > max_rows and number > first:
                stops.append(number)
                first, longest, total, num_rows = number, length, length, length
            if num_rows >= max_rows or number + 1 - first == self.batch_size:
                stops.append(number + 1)
                first, longest, total = number + 1, 0, 0
        return stops

    def _batch(self, samples: SampleRows) -> Batch:
        slices = None
        if self.collate == "pack":
            samples.check_equal_lengths(but_scalars=True)
            columns, kinds = samples.copies()
            slices = _slices(samples)
        else:
            if self.collate == "error":
                _check_one_length(samples)
            columns, kinds = samples.padded()
        return Batch(self._pack(columns), samples.info, slices, row_kinds=kinds, last_row=self.last_row)


def _part(runs: Sequence[SampleRows], first: int, stop: int, *, copies: bool = False) -> SampleRows:
    """Return the samples `first` to `stop` - 1 of several runs; with `copies`, they are copies in any case."""
    parts = []
    for run in runs:
        begin, end = max(first, 0), min(stop, len(run))
        if begin < end:
            parts.append(run if end - begin == len(run) else run.of(np.arange(begin, end)))
        first, stop = first - len(run), stop - len(run)
    return parts[0] if len(parts) == 1 and not copies else parts[0].joined(parts[1:])


def _check_one_length(samples: SampleRows) -> None:
    """Check that all samples have the same number of rows in each column."""
    for lengths in samples.lengths:
        if (lengths != lengths[0]).any():
            raise StructureError(
                f"samples of {lengths.min()} to {lengths.max()} rows in one batch, expected equal lengths. Write "
                "windows of one length, or pass `collate='pad'` or `collate='pack'`."
            )


def _slices(samples: SampleRows) -> Slices:
    """Return whole samples as slices of a storage in which they are laid end to end."""
    lengths = samples.info.lengths
    stops = lengths.cumsum()
    num_rows, first_rows = int(stops[-1]), stops - lengths
    starts = np.zeros(num_rows, bool)
    starts[first_rows] = True
    return Slices(
        rows=np.arange(num_rows),
        starts=starts,
        mask=np.ones(num_rows, bool),
        lengths=lengths,
        first_rows=first_rows,
        trajectories=np.arange(len(lengths)),
        cut_by_sampler=np.zeros(len(lengths), bool),
        probabilities=samples.info.probabilities,
        next_rows=stops - 1,
        storage_shape=(num_rows,),
    )
