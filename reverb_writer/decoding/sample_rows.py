"""The rows of samples that were assembled: any of them can be copied, without copying the others."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from reverb_writer.decoding.chunk_ring import row_bytes
from reverb_writer.decoding.row_ranges import JoinedRanges
from reverb_writer.decoding.samples import BatchInfo, Column
from reverb_writer.errors import StructureError

Array = npt.NDArray[Any]


class SampleRows:
    """Rows of n samples. The rows of all samples, laid end to end, are numbered from 0 to M - 1.

    Attributes:
        info: of the samples.
        items: [n] encoded trajectory of each sample, which identifies its rows; None if unknown.
        num_columns: how many columns they have.
        row_bytes: size of a row, without the characters of strings.
    """

    def __init__(
        self,
        sources: Sequence[tuple[Array, JoinedRanges | None]],
        info: BatchInfo,
        items: Sequence[bytes] | None = None,
    ) -> None:
        """Refer to rows.

        Args:
            sources: for each column, an array, and where in it the samples' rows are; None if all M rows are in order.
            info: of the samples.
            items: encoded trajectories of the samples.
        """
        self._sources, self.info, self.items = sources, info, items
        self.num_columns = len(sources)
        self.row_bytes = sum(row_bytes((source.dtype, source.shape[1:])) for source, _ in sources)

    @classmethod
    def of_columns(cls, columns: Sequence[Column], info: BatchInfo, items: Sequence[bytes] | None = None) -> SampleRows:
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
        return cls(sources, info, items)

    def column(self, index: int) -> Array:
        """Return all rows of one column, [M, ...]."""
        source, ranges = self._sources[index]
        return source if ranges is None else ranges.copy(source)

    def take(self, rows: npt.NDArray[np.int64], only: Container[int] | None = None) -> list[Any]:
        """Return copies of some rows, [N, ...], given by their numbers [N].

        Args:
            rows: numbers of rows.
            only: indices of columns; None is returned for the others. None for all columns.
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
