"""The rows of samples that were assembled: any of them can be copied, without copying the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from reverb_writer.decoding.chunk_ring import row_bytes
from reverb_writer.decoding.row_ranges import JoinedRanges
from reverb_writer.decoding.samples import BatchInfo, Column
from reverb_writer.errors import StructureError

__all__ = ["SampleRows"]

Array = npt.NDArray[Any]


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

    def take(self, rows: npt.NDArray[np.int64]) -> list[Array]:
        """Return copies of some rows of each column, [N, ...], given by their numbers [N]."""
        distinct = {ranges for _, ranges in self._sources}  # several columns have the same
        places = {ranges: rows if ranges is None else ranges.rows(rows) for ranges in distinct}
        return [source.take(places[ranges], axis=0) for source, ranges in self._sources]
