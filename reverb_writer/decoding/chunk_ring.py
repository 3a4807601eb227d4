"""Decoded chunks of some columns, kept as rows of one array a column, bounded in bytes.

    [ chunk 8 | chunk 9 |  room  | chunk 4 | chunk 5 | chunk 6 | chunk 7 | ]
                        ^ the next chunk   ^ leaves first

A window is then a few ranges of rows, and a batch of windows is one `take` a column. Chunks leave in the order in which
they came, so memory is never in pieces. For uniform sampling that is as good as any order.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from reverb_writer.decoding.encoded_chunk import DtypesAndShapes, Kind, SentChunk
from reverb_writer.errors import FormatError

__all__ = ["Arena", "row_bytes"]

Array = npt.NDArray[Any]

_AT_ONCE = 8  # so many times less than the arena holds is given up together: each loss costs a gather
_MAX_ROWS = 1 << 27  # of columns whose rows have no bytes


class _Place(NamedTuple):
    """Where a chunk begins. Rows are counted on and on: row r is row r % capacity of the columns."""

    key: int
    row: int
    num_bytes: int


class Arena:
    """Rows of columns that are stored together. Not thread-safe.

    Attributes:
        spans: first row and row after the last, by chunk key.
        columns: [capacity, ...] arrays; valid where a span says so.
        num_bytes: what the chunks in it occupy, the characters of strings included.
        is_enlarged: whether it is larger than its bound, for chunks that are.
    """

    def __init__(self, dtypes_and_shapes: DtypesAndShapes, max_bytes: int, before_loss: Callable[[], None]) -> None:
        """Make an empty arena.

        Args:
            dtypes_and_shapes: of the columns, without the time dimension.
            max_bytes: bound on what is kept; the chunks of the largest sample if that is more.
            before_loss: is called before rows are given up, so that they can be read for the last time.
        """
        self._dtypes_and_shapes = list(dtypes_and_shapes)
        self._row_bytes = sum(map(row_bytes, dtypes_and_shapes))
        self._max_bytes, self._before_loss = max_bytes, before_loss
        self._has_strings = any(dtype.kind == "O" for dtype, _ in dtypes_and_shapes)
        self._kind: Kind | None = None  # of the chunk that was asked for last, among those that are right
        self._allocate(0, 0)

    def _allocate(self, min_rows: int, min_bytes: int) -> None:
        """Begin anew, with at least so many rows and bytes. Memory that is not used yet costs nothing."""
        self._capacity = max(min(self._max_bytes // max(self._row_bytes, 1), _MAX_ROWS), min_rows, 1)
        self._room_bytes = max(self._max_bytes, self._capacity * self._row_bytes, min_bytes)
        self.columns, self._stored = [], []  # first, or there would be both for a moment
        self.columns = [np.empty((self._capacity, *shape), dtype) for dtype, shape in self._dtypes_and_shapes]
        if not self._has_strings:
            self._stored = [_as_bytes(column) for column in self.columns]
        self.is_enlarged = self._capacity * self._row_bytes > self._max_bytes or min_bytes > self._max_bytes
        self.spans: dict[int, tuple[int, int]] = {}
        self._places: collections.deque[_Place] = collections.deque()  # the one that came first leaves first
        self._next = 0
        self.num_bytes = 0

    def holds(self, chunk: SentChunk) -> bool:
        """Return whether a chunk is of the dtypes and shapes that this arena is for."""
        if chunk.kind is self._kind:
            return True
        if chunk.kind.dtypes_and_shapes != self._dtypes_and_shapes:
            return False
        self._kind = chunk.kind
        return True

    def fits(self, chunk: SentChunk) -> bool:
        """Return whether there would be room for a chunk, were the others to go."""
        return chunk.length <= self._capacity and chunk.num_bytes <= self._room_bytes

    def clear(self, chunks: Iterable[SentChunk]) -> None:
        """Give up all chunks; these will have room together."""
        self._before_loss()
        sizes = [(chunk.length, chunk.num_bytes) for chunk in chunks]
        self._allocate(sum([length for length, _ in sizes]), sum([num_bytes for _, num_bytes in sizes]))

    def put(self, key: int, chunk: SentChunk) -> None:
        """Decode a chunk that fits and is not there; it stays until there must be room for others.

        Raises:
            FormatError: it is damaged, and still not there.
        """
        length, num_bytes = chunk.length, chunk.num_bytes
        row = self._next
        start = row % self._capacity
        if start + length > self._capacity:  # the rows up to the end stay empty, for a chunk is in one piece
            row, start = row - start + self._capacity, 0
        if self._lacks(row + length, num_bytes):
            self._before_loss()
            self._give_up(row + max(length, self._capacity // _AT_ONCE), num_bytes)
        try:
            chunk.decode_into(self.columns, self._stored, start)
        except FormatError:
            self._drop_strings(start, start + length)  # of the columns before the damaged one
            raise
        self._next = row + length
        self.num_bytes += num_bytes
        self._places.append(_Place(key, row, num_bytes))
        self.spans[key] = start, start + length

    def _lacks(self, next_row: int, num_bytes: int) -> bool:
        """Return whether the chunk that came first must go, for rows before `next_row` or for so many bytes more."""
        return bool(self._places) and (
            next_row > self._places[0].row + self._capacity or self.num_bytes + num_bytes > self._room_bytes
        )

    def _give_up(self, next_row: int, num_bytes: int) -> None:
        while self._lacks(next_row, num_bytes):
            place = self._places.popleft()
            self.num_bytes -= place.num_bytes
            self._drop_strings(*self.spans.pop(place.key))

    def _drop_strings(self, start: int, stop: int) -> None:
        if self._has_strings:
            for column in self.columns:
                if column.dtype.kind == "O":
                    column[start:stop] = None


def row_bytes(dtype_and_shape: tuple[np.dtype[Any], tuple[int, ...]]) -> int:
    """Return what a row of a column occupies, the characters of strings not counted."""
    dtype, shape = dtype_and_shape
    return dtype.itemsize * math.prod(shape)


def _as_bytes(column: Array) -> Array:
    """Return the same memory as [rows, row bytes], uint8."""
    return column.reshape(len(column), math.prod(column.shape[1:])).view(np.uint8)
