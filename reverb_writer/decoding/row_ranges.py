"""Row ranges of samples in a ring of decoded chunks, laid end to end: where the rows of a batch are. Integers only."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt


class JoinedRanges:
    """The row ranges of several samples. Their rows, laid end to end, are numbered from 0 to M - 1.

    Attributes:
        lengths: [n] number of rows of each sample.

    >>> joined = JoinedRanges([(7, 2, 0, 1), (3, 2)])
    >>> joined.lengths.tolist(), joined.all_rows().tolist(), joined.rows(np.array([1, 2, 3])).tolist()
    ([3, 2], [7, 8, 0, 3, 4], [8, 0, 3])
    """

    def __init__(self, ranges: Sequence[tuple[int, ...]]) -> None:
        """Join them; of each sample, first row and number of rows of range after range."""
        num_ranges = np.fromiter(map(len, ranges), np.intp, len(ranges)) // 2
        numbers = np.fromiter(itertools.chain.from_iterable(ranges), np.intp, 2 * int(num_ranges.sum()))
        self._starts, self._range_lengths = numbers[::2], numbers[1::2]
        self._stops = self._range_lengths.cumsum()
        self._offsets = self._starts - self._stops + self._range_lengths  # from numbers of rows to rows in the ring
        self.lengths: npt.NDArray[np.int64] = np.add.reduceat(self._range_lengths, num_ranges.cumsum() - num_ranges)

    def all_rows(self) -> npt.NDArray[np.intp]:
        """Return [M] where in the ring all rows are."""
        rows: npt.NDArray[np.intp] = np.arange(self._stops[-1]) + self._offsets.repeat(self._range_lengths)
        return rows

    def rows(self, numbers: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
        """Return [N] where in the ring some rows are, given by their numbers."""
        rows: npt.NDArray[np.intp] = numbers + self._offsets[self._stops.searchsorted(numbers, "right")]
        return rows

    def copy(self, source: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return [M, ...], a copy of all rows of one of the ring's columns."""
        starts, lengths = self._starts.tolist(), self._range_lengths.tolist()
        return np.concatenate([source[start : start + length] for start, length in zip(starts, lengths, strict=True)])
