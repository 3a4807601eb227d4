"""Samples as columns of arrays, with the server's information about them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["Column", "SampleInfo", "SampleInfos", "split_samples"]

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Column:
    """One column of n samples.

    Attributes:
        rows: [sum(lengths), ...], the rows of all samples, concatenated; owned by the caller. A list of arrays
            [lengths[i], ...], one for each sample, if samples differ in dtype or in the shape of a row.
        lengths: [n] number of rows of each sample.
        is_scalar: whether each sample has one row, which readers get without the time dimension.
    """

    rows: Array | list[Array]
    lengths: npt.NDArray[np.int64]
    is_scalar: bool

    def split(self) -> list[Array]:
        """Return each sample's rows as a view [T, ...], or [...] if the column is scalar."""
        if isinstance(self.rows, list):
            rows = self.rows
        else:
            ends = np.cumsum(self.lengths).tolist()
            rows = [self.rows[start:end] for start, end in itertools.pairwise([0, *ends])]
        return [row[0] for row in rows] if self.is_scalar else rows


class SampleInfo(NamedTuple):
    """The server's information about one sample.

    Attributes:
        key: of the item, for `mutate_priorities`.
        priority: of the item when it was sampled.
        probability: with which the item was chosen.
        table_size: number of items in the table when the item was sampled.
        times_sampled: how often the item has been sampled, this time included.
    """

    key: int
    priority: float
    probability: float
    table_size: int
    times_sampled: int


@dataclass(frozen=True)
class SampleInfos:
    """The server's information about n samples: the fields of `SampleInfo` as arrays.

    Attributes:
        keys: [n] uint64, of the items, for `update_priorities`.
        priorities: [n] float64, of the items when they were sampled.
        probabilities: [n] float64, with which the items were chosen.
        table_sizes: [n] int64, number of items in the table when each item was sampled.
        times_sampled: [n] int32, how often each item has been sampled, this time included.
    """

    keys: npt.NDArray[np.uint64]
    priorities: npt.NDArray[np.float64]
    probabilities: npt.NDArray[np.float64]
    table_sizes: npt.NDArray[np.int64]
    times_sampled: npt.NDArray[np.int32]

    def choose(self, index: Any) -> SampleInfos:
        """Return the information about some of the samples; `index` is any NumPy index of the first dimension."""
        return SampleInfos(*(array[index] for array in self._arrays()))

    @classmethod
    def concatenate(cls, infos: Sequence[SampleInfos]) -> SampleInfos:
        """Return the information about the samples of several batches, in order."""
        return SampleInfos(*map(np.concatenate, zip(*map(SampleInfos._arrays, infos), strict=True)))

    def split(self) -> Iterator[SampleInfo]:
        """Yield the information about each sample."""
        yield from map(SampleInfo, *(array.tolist() for array in self._arrays()))

    def _arrays(self) -> tuple[Array, ...]:
        """Return the arrays in the order of `SampleInfo`, without those of subclasses."""
        return self.keys, self.priorities, self.probabilities, self.table_sizes, self.times_sampled


def split_samples(columns: Sequence[Column], infos: SampleInfos) -> Iterator[tuple[list[Array], SampleInfo]]:
    """Yield each sample's columns, [T, ...] or [...] if the column is scalar, and its information."""
    leaves = map(list, zip(*[column.split() for column in columns], strict=True))
    yield from zip(leaves, infos.split(), strict=True)
