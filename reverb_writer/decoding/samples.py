"""Samples as columns of arrays, with what the server tells of them."""

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
        rows: [sum(lengths), ...], the samples end to end; owned by the caller. A list of such arrays, one a sample, if
            samples differ in dtype or in the shape of a row.
        lengths: [n] rows of each sample.
        squeezed: whether each has one row, to be given without the time dimension.
    """

    rows: Array | list[Array]
    lengths: npt.NDArray[np.int64]
    squeezed: bool

    def split(self) -> list[Array]:
        """Return the rows of each sample, views; a squeezed one without the time dimension."""
        if isinstance(self.rows, list):
            rows = self.rows
        else:
            ends = np.cumsum(self.lengths).tolist()
            rows = [self.rows[start:end] for start, end in itertools.pairwise([0, *ends])]
        return [row[0] for row in rows] if self.squeezed else rows


class SampleInfo(NamedTuple):
    """What the server tells about a sample.

    Attributes:
        key: of the item, for `mutate_priorities`.
        priority: of the item when it was sampled.
        probability: with which it was chosen.
        table_size: items in the table at that moment.
        times_sampled: how often the item has been sampled, this time included.
    """

    key: int
    priority: float
    probability: float
    table_size: int
    times_sampled: int


@dataclass(frozen=True)
class SampleInfos:
    """What the server tells about n samples.

    Attributes:
        keys: [n] uint64, of the items, for `update_priorities`.
        priorities: [n] float64, when they were sampled.
        probabilities: [n] float64, with which they were chosen.
        table_sizes: [n] int64, items in the table at that moment.
        times_sampled: [n] int32, how often each has been sampled, this time included.
    """

    keys: npt.NDArray[np.uint64]
    priorities: npt.NDArray[np.float64]
    probabilities: npt.NDArray[np.float64]
    table_sizes: npt.NDArray[np.int64]
    times_sampled: npt.NDArray[np.int32]

    def choose(self, index: Any) -> SampleInfos:
        """Return those of some samples, by whatever NumPy takes as index of the first dimension."""
        return SampleInfos(*(getattr(self, name)[index] for name in _INFO_FIELDS))

    @classmethod
    def concatenate(cls, infos: Sequence[SampleInfos]) -> SampleInfos:
        """Return those of several batches, one after the other."""
        return SampleInfos(*(np.concatenate([getattr(info, name) for info in infos]) for name in _INFO_FIELDS))


_INFO_FIELDS = ("keys", "priorities", "probabilities", "table_sizes", "times_sampled")  # in the order of SampleInfo


def split_samples(columns: Sequence[Column], infos: SampleInfos) -> Iterator[tuple[list[Array], SampleInfo]]:
    """Yield each sample's columns, [T, ...] or [...] where it is squeezed, and its info."""
    leaves = map(list, zip(*[column.split() for column in columns], strict=True))
    numbers = [getattr(infos, field).tolist() for field in _INFO_FIELDS]
    yield from zip(leaves, map(SampleInfo, *numbers), strict=True)
