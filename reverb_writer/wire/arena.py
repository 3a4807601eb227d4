"""Decoded chunks of some columns, kept as rows of one array a column, bounded in bytes.

    segment 0    segment 1    segment 2    ...
    [chunk|chunk|chunk  ][chunk|chunk    ][.....             ]
                                 ^ the next chunk goes here; where none fits, the next segment is emptied whole

A window is then a few ranges of rows, and a batch of windows is one `take` a column. Chunks leave in the order in which
they came, a segment at a time, so memory is never in pieces. For uniform sampling that is as good as any order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Arena"]

Array = npt.NDArray[Any]

_NUM_SEGMENTS = 16
_MAX_ROWS = 1 << 27
_REFERENCE_BYTES = 64  # what a string costs beside its characters


class Arena:
    """Rows of columns that are stored together. Not thread-safe.

    Attributes:
        spans: first row and row after the last, by chunk key.
        columns: [capacity, ...] arrays; valid where a span says so.
        max_rows: how many one sample may have.
        row_bytes: of one row of all columns, the characters of strings not counted.
        num_bytes: what the chunks in it occupy, those characters counted.
    """

    def __init__(
        self, columns: Sequence[Array], max_bytes: int, max_sample_bytes: int, before_loss: Callable[[], None]
    ) -> None:
        """Make an empty arena.

        Args:
            columns: arrays [T, ...] as they will come: their dtypes and shapes count.
            max_bytes: bound on what is kept; twice the chunks of the largest sample if that is more.
            max_sample_bytes: bound on the rows of one sample.
            before_loss: is called before rows are given up, so that they can be read for the last time.
        """
        self.dtypes_and_shapes = _dtypes_and_shapes(columns)
        self.row_bytes = sum(
            (_REFERENCE_BYTES if dtype.kind == "O" else dtype.itemsize) * math.prod(shape)
            for dtype, shape in self.dtypes_and_shapes
        )
        self.max_rows = max_sample_bytes // max(self.row_bytes, 1)
        self._max_bytes, self._before_loss = max_bytes, before_loss
        self._segment = self._next = self._segment_stop = 0
        self._allocate(0, 0)

    def holds(self, columns: Sequence[Array]) -> bool:
        """Return whether columns are of the dtypes and shapes that this arena is for."""
        return _dtypes_and_shapes(columns) == self.dtypes_and_shapes

    def clear(self, chunks: Sequence[Sequence[Array]]) -> None:
        """Give up all chunks; these will have room together."""
        self._before_loss()
        self._allocate(sum(len(columns[0]) for columns in chunks), sum(map(self._size, chunks)))

    def put(self, key: int, columns: Sequence[Array]) -> tuple[int, int]:
        """Copy a chunk's columns, all [T, ...] with one T, and return its span."""
        length, size = len(columns[0]), self._size(columns)
        if length > self._segment_rows or size > self._segment_bytes:
            self.clear([columns])
        elif self._next + length > self._segment_stop or self._used[self._segment] + size > self._segment_bytes:
            self._enter((self._segment + 1) % len(self._keys))
        start, stop = self._next, self._next + length
        for rows, column in zip(self.columns, columns, strict=True):
            rows[start:stop] = column
        self._next = stop
        self._used[self._segment] += size
        self.spans[key] = start, stop
        self._keys[self._segment].append(key)
        return start, stop

    @property
    def num_bytes(self) -> int:
        """Return what the chunks occupy."""
        return sum(self._used)

    def _size(self, columns: Sequence[Array]) -> int:
        """Return what a chunk occupies, bytes."""
        strings = (string for column in columns if column.dtype.kind == "O" for string in column.flat)
        return len(columns[0]) * self.row_bytes + sum(map(len, strings))

    def _allocate(self, min_rows: int, min_bytes: int) -> None:
        """Begin anew, with segments of at least so many rows and bytes. Memory that is not used yet costs nothing."""
        rows = min(self._max_bytes // max(self.row_bytes, 1), _MAX_ROWS)
        self._segment_rows = max(rows // _NUM_SEGMENTS, min_rows, 1)
        num_segments = max(rows // self._segment_rows, 2)
        self._segment_bytes = max(self._max_bytes // num_segments, self._segment_rows * self.row_bytes, min_bytes)
        capacity = num_segments * self._segment_rows
        self.columns = [np.empty((capacity, *shape), dtype) for dtype, shape in self.dtypes_and_shapes]
        self.spans: dict[int, tuple[int, int]] = {}
        self._keys: list[list[int]] = [[] for _ in range(num_segments)]
        self._used = [0] * num_segments
        self._enter(0)

    def _enter(self, segment: int) -> None:
        self._segment = segment
        self._next = segment * self._segment_rows
        self._segment_stop = self._next + self._segment_rows
        if self._keys[segment]:
            self._before_loss()
            for key in self._keys[segment]:
                del self.spans[key]
            self._keys[segment] = []
            self._used[segment] = 0
            for column in self.columns:
                if column.dtype.kind == "O":
                    column[self._next : self._segment_stop] = None


def _dtypes_and_shapes(columns: Sequence[Array]) -> list[tuple[np.dtype[Any], tuple[int, ...]]]:
    return [(column.dtype, column.shape[1:]) for column in columns]
