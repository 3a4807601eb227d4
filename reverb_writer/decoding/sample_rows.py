"""The rows of samples that were assembled: any of them can be copied, without copying the others."""

from __future__ import annotations

import functools
from collections.abc import Container, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from reverb_writer.decoding.chunk_ring import row_bytes
from reverb_writer.decoding.samples import BatchInfo, Column
from reverb_writer.errors import StructureError

Array = npt.NDArray[Any]


class JoinedRows:
    """Where in a ring the rows of several samples are. Laid end to end, they are numbered from 0 to M - 1.

    >>> joined = JoinedRows(np.array([7, 8, 0, 3, 4]), starts=np.array([3, 0]), lengths=np.array([2, 3]))
    >>> joined.all_rows.tolist(), joined.rows(np.array([1, 2, 3])).tolist()
    ([3, 4, 7, 8, 0], [4, 7, 8])
    """

    def __init__(
        self, rows: npt.NDArray[np.int32], starts: npt.NDArray[np.intp], lengths: npt.NDArray[np.int64]
    ) -> None:
        """Refer to some of `rows`; of each sample, the first one and how many they are."""
        self._rows, self.lengths = rows, lengths
        self._stops = lengths.cumsum()
        self._offsets = starts - self._stops + lengths  # from numbers to places in `rows`

    @functools.cached_property
    def all_rows(self) -> npt.NDArray[np.intp]:
        """[M] where in the ring all rows are."""
        places = np.arange(self._stops[-1]) + self._offsets.repeat(self.lengths)
        rows: npt.NDArray[np.intp] = self._rows.take(places).astype(np.intp)  # once, not for each column
        return rows

    def rows(self, numbers: npt.NDArray[np.intp]) -> npt.NDArray[np.int32]:
        """Return [N] where in the ring some rows are, given by their numbers."""
        places = numbers + self._offsets[self._stops.searchsorted(numbers, "right")]
        rows: npt.NDArray[np.int32] = self._rows.take(places)
        return rows


class SampleRows:
    """Rows of n samples. The rows of all samples, laid end to end, are numbered from 0 to M - 1.

    Attributes:
        info: of the samples.
        num_columns: how many columns they have.
        row_bytes: size of a row, without the characters of strings.
    """

    def __init__(self, sources: Sequence[tuple[Array, JoinedRows | None]], info: BatchInfo) -> None:
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
        sources: list[tuple[Array, JoinedRows | None]] = []
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
        source, joined = self._sources[index]
        return source if joined is None else source.take(joined.all_rows, axis=0, mode="clip")

    def take(self, rows: npt.NDArray[np.int64], only: Container[int] | None = None) -> list[Any]:
        """Return copies of some rows, [N, ...], given by their numbers [N].

        Of the columns whose indices are in `only`, or of all; None is returned for the others.
        """
        places: dict[JoinedRows | None, npt.NDArray[Any]] = {None: rows}  # several columns have the same
        taken: list[Any] = []
        for index, (source, joined) in enumerate(self._sources):
            if only is not None and index not in only:
                taken.append(None)
                continue
            if joined not in places and joined is not None:
                places[joined] = joined.rows(rows)
            taken.append(source.take(places[joined], axis=0))
        return taken
