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

from reverb_writer.wire.sent_chunks import DtypesAndShapes, Kind, SentChunk

__all__ = ["Arena"]

Array = npt.NDArray[Any]

_NUM_SEGMENTS = 16
_MAX_ROWS = 1 << 27


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
        self,
        dtypes_and_shapes: DtypesAndShapes,
        max_bytes: int,
        max_sample_bytes: int,
        before_loss: Callable[[], None],
    ) -> None:
        """Make an empty arena.

        Args:
            dtypes_and_shapes: of the columns, without the time dimension.
            max_bytes: bound on what is kept; twice the chunks of the largest sample if that is more.
            max_sample_bytes: bound on the rows of one sample.
            before_loss: is called before rows are given up, so that they can be read for the last time.
        """
        self.dtypes_and_shapes = dtypes_and_shapes
        self.row_bytes = sum((dtype.itemsize) * math.prod(shape) for dtype, shape in self.dtypes_and_shapes)
        self.max_rows = max_sample_bytes // max(self.row_bytes, 1)
        self._max_bytes, self._before_loss = max_bytes, before_loss
        self._has_strings = any(dtype.kind == "O" for dtype, _ in dtypes_and_shapes)
        self._kind: Kind | None = None  # of the chunk that was asked for last, among those that are right
        self._segment = self._next = self._segment_stop = 0
        self._allocate(0, 0)

    def holds(self, chunk: SentChunk) -> bool:
        """Return whether a chunk is of the dtypes and shapes that this arena is for."""
        if chunk.kind is self._kind:
            return True
        if chunk.kind.dtypes_and_shapes != self.dtypes_and_shapes:
            return False
        self._kind = chunk.kind
        return True

    def clear(self, chunks: Sequence[SentChunk]) -> None:
        """Give up all chunks; these will have room together."""
        self._before_loss()
        self._allocate(sum(chunk.length for chunk in chunks), sum(chunk.num_bytes for chunk in chunks))

    def put(self, key: int, chunk: SentChunk) -> None:
        """Decode a chunk; it stays until there must be room for others.

        Raises:
            FormatError: it is damaged, and not there.
        """
        if chunk.length > self._segment_rows or chunk.num_bytes > self._segment_bytes:
            self.clear([chunk])
        elif (
            self._next + chunk.length > self._segment_stop
            or self._used[self._segment] + chunk.num_bytes > self._segment_bytes
        ):
            self._enter((self._segment + 1) % len(self._keys))
        start, stop = self._next, self._next + chunk.length
        chunk.decode_into(self.columns, self._stored, start)
        self._next = stop
        self._used[self._segment] += chunk.num_bytes
        self.spans[key] = start, stop
        self._keys[self._segment].append(key)

    @property
    def num_bytes(self) -> int:
        """Return what the chunks occupy."""
        return sum(self._used)

    def _allocate(self, min_rows: int, min_bytes: int) -> None:
        """Begin anew, with segments of at least so many rows and bytes. Memory that is not used yet costs nothing."""
        rows = min(self._max_bytes // max(self.row_bytes, 1), _MAX_ROWS)
        self._segment_rows = max(rows // _NUM_SEGMENTS, min_rows, 1)
        num_segments = max(rows // self._segment_rows, 2)
        self._segment_bytes = max(self._max_bytes // num_segments, self._segment_rows * self.row_bytes, min_bytes)
        capacity = num_segments * self._segment_rows
        self.columns = [np.empty((capacity, *shape), dtype) for dtype, shape in self.dtypes_and_shapes]
        self._stored = [] if self._has_strings else [_as_bytes(column) for column in self.columns]
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


def _as_bytes(column: Array) -> Array:
    """Return the same memory as [rows, row bytes], uint8."""
    return column.reshape(len(column), math.prod(column.shape[1:])).view(np.uint8)
