"""The rows of samples that were assembled: any of them can be copied, without copying the others."""

from __future__ import annotations

import itertools
from collections.abc import Container, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from reverb_writer.decoding.chunk_ring import row_bytes
from reverb_writer.decoding.samples import BatchInfo, Column
from reverb_writer.errors import StructureError

Array = npt.NDArray[Any]


class JoinedRanges:
    """The row ranges of several samples. Their rows, laid end to end, are numbered from 0 to M - 1.

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
        # [n] number of rows of each sample
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


class SampleRows:
    """Rows of n samples. The rows of all samples, laid end to end, are numbered from 0 to M - 1.

    Attributes:
        info: of the samples.
        num_columns: how many columns they have.
        row_bytes: size of a row, without the characters of strings.
    """

    def __init__(self, sources: Sequence[tuple[Array, JoinedRanges | None]], info: BatchInfo) -> None:
        """Refer to rows.

        Args:
            sources: for each column, an array, and where in it the samples' rows are; None if all M rows are in order.
            info: of the samples.
        """
        self._sources, self.info = sources, info
        self.num_columns = len(sources)
        self.row_bytes = sum(row_bytes((source.dtype, source.shape[1:])) for source, _ in sources)

    @classmethod
    def of_columns(cls, columns: Sequence[Column], info: BatchInfo) -> SampleRows:
        """Return the rows of columns.

        Raises:
            StructureError: samples differ in dtype or shape, or the columns of a sample in length.
        """
        sources: list[tuple[Array, JoinedRanges | None]] = []
        for number, column in enumerate(columns):
            if isinstance(column.rows, list):
                raise StructureError(
                    f"column {number}: samples differ in dtype or shape. Find the actor that differs, or read "
                    "the table with a ReplayDataset and `collate='list'`."
                )
            if (column.lengths != info.lengths).any():
                raise StructureError(f"column {number}: its number of rows differs from that of other columns.")
            sources.append((column.rows, None))
        return cls(sources, info)

    def column(self, index: int) -> Array:
        """Return all rows of one column, [M, ...]."""
        source, ranges = self._sources[index]
        return source if ranges is None else ranges.copy(source)

    def take(self, rows: npt.NDArray[np.int64], only: Container[int] | None = None) -> list[Any]:
        """Return copies of some rows, [N, ...], given by their numbers [N].

        Of the columns whose indices are in `only`, or of all; None is returned for the others.
        """
        places: dict[JoinedRanges | None, npt.NDArray[Any]] = {None: rows}  # several columns have the same
        taken: list[Any] = []
        for index, (source, ranges) in enumerate(self._sources):
            if only is not None and index not in only:
                taken.append(None)
                continue
            if ranges not in places and ranges is not None:
                places[ranges] = ranges.rows(rows)
            taken.append(source.take(places[ranges], axis=0))
        return taken
