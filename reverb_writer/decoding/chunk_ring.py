"""A cache of decoded chunks: a ring of rows, one array for each column, with a memory limit.

    [ chunk 8 | chunk 9 |  free  | chunk 4 | chunk 5 | chunk 6 | chunk 7 | ]
                        ^ next chunk       ^ evicted first

A window is a few ranges of rows, and a batch of windows is one `take` for each column. Chunks are evicted in the order
in which they were put, so free memory is always in one piece. For uniform sampling this order is as good as any.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from reverb_writer.decoding.encoded_chunk import ChunkSchema, DtypesAndShapes, EncodedChunk
from reverb_writer.errors import FormatError

Array = npt.NDArray[Any]

_EVICTED_SHARE = 8  # this part of the ring is evicted at a time: before each eviction, rows of the batch are copied
_MAX_ROWS = 1 << 27  # if rows have no bytes
_STRING_BYTES = 56  # of the object that a string is, beside its pointer


class ChunkRing:
    """Decoded chunks with the same columns. Not thread-safe.

    Attributes:
        rows_of: first row and row after the last, by chunk key.
        columns: [capacity, ...] arrays; only the rows in `rows_of` are valid.
        num_bytes: decoded size of all chunks, the characters of strings included.
    """

    def __init__(self, dtypes_and_shapes: DtypesAndShapes, max_bytes: int) -> None:
        """Create an empty ring for columns of these dtypes and shapes; `reset` may exceed its memory limit."""
        self._dtypes_and_shapes = list(dtypes_and_shapes)
        self._row_bytes = sum(map(row_bytes, dtypes_and_shapes))
        self._max_bytes = max_bytes
        num_strings = sum(math.prod(shape) for dtype, shape in dtypes_and_shapes if dtype.kind == "O")
        self._has_strings = num_strings > 0
        # NumPy writes every pointer of a new array of strings, so room for very short ones would cost memory at once.
        self._likely_row_bytes = self._row_bytes + _STRING_BYTES * num_strings
        self._schema: ChunkSchema | None = None  # the last schema that `accepts` found to be right
        self.reset(())

    def accepts(self, chunk: EncodedChunk) -> bool:
        """Return whether a chunk has the dtypes and shapes of this ring's columns."""
        if chunk.schema is self._schema:
            return True
        if chunk.schema.dtypes_and_shapes != self._dtypes_and_shapes:
            return False
        self._schema = chunk.schema
        return True

    def fits(self, chunk: EncodedChunk) -> bool:
        """Return whether an empty ring of this size would have room for a chunk."""
        return chunk.length <= self._capacity and chunk.num_bytes <= self._capacity_bytes

    def reset(self, chunks: Iterable[EncodedChunk]) -> None:
        """Evict all chunks and allocate arrays in which `chunks` have room together; they are not put yet."""
        sizes = [(chunk.length, chunk.num_bytes) for chunk in chunks]
        min_rows, min_bytes = sum([length for length, _ in sizes]), sum([num_bytes for _, num_bytes in sizes])
        # Rows that were never written take no physical memory, but for strings.
        self._capacity = max(min(self._max_bytes // max(self._likely_row_bytes, 1), _MAX_ROWS), min_rows, 1)
        self._capacity_bytes = max(self._max_bytes, self._capacity * self._row_bytes, min_bytes)
        self.columns, self._columns_as_bytes = [], []  # first: old and new arrays must not exist at the same time
        self.columns = [np.empty((self._capacity, *shape), dtype) for dtype, shape in self._dtypes_and_shapes]
        if not self._has_strings:  # the same memory as uint8, [rows, bytes of a row]
            flat = [column.reshape(self._capacity, math.prod(column.shape[1:])) for column in self.columns]
            self._columns_as_bytes = [column.view(np.uint8) for column in flat]
        self.rows_of: dict[int, tuple[int, int]] = {}
        # Key, first row and decoded size of chunks in the order of `put`. Rows are counted since the ring was reset;
        # row r is in row r % capacity of the arrays.
        self._chunks: collections.deque[tuple[int, int, int]] = collections.deque()
        self._next_row = 0
        self.num_bytes = 0

    def put(self, key: int, chunk: EncodedChunk) -> bool:
        """Decode a chunk that `accepts` and `fits` allow; return whether there was room for it, else `evict_for` it.

        A chunk that is damaged, which is a FormatError, is not in the ring.
        """
        length, num_bytes = chunk.length, chunk.num_bytes
        row = self._row_of_next(length)
        if self._must_evict(row + length, num_bytes):
            return False
        start = row % self._capacity
        try:
            chunk.decode_into(self.columns, self._columns_as_bytes, start)
        except FormatError:
            self._drop_strings(start, start + length)  # of the columns before the damaged one
            raise
        self._next_row = row + length
        self.num_bytes += num_bytes
        self._chunks.append((key, row, num_bytes))
        self.rows_of[key] = start, start + length
        return True

    def evict_for(self, chunk: EncodedChunk) -> list[int]:
        """Evict the oldest chunks, until there is room for `chunk` and probably for a few more; return their keys."""
        evicted = []
        row = self._row_of_next(chunk.length) + max(chunk.length, self._capacity // _EVICTED_SHARE)
        while self._must_evict(row, chunk.num_bytes):
            key, _, num_bytes = self._chunks.popleft()
            self.num_bytes -= num_bytes
            self._drop_strings(*self.rows_of.pop(key))
            evicted.append(key)
        return evicted

    def _row_of_next(self, length: int) -> int:
        """Return where the next chunk begins: at the arrays' start, if it would exceed their end."""
        start = self._next_row % self._capacity
        return self._next_row if start + length <= self._capacity else self._next_row - start + self._capacity

    def _must_evict(self, stop_row: int, num_bytes: int) -> bool:
        """Return whether the oldest chunk occupies rows before `stop_row`, or `num_bytes` more exceed the limit."""
        return bool(self._chunks) and (
            stop_row > self._chunks[0][1] + self._capacity or self.num_bytes + num_bytes > self._capacity_bytes
        )

    def _drop_strings(self, start: int, stop: int) -> None:
        if self._has_strings:
            for column in self.columns:
                if column.dtype.kind == "O":
                    column[start:stop] = None


def row_bytes(dtype_and_shape: tuple[np.dtype[Any], tuple[int, ...]]) -> int:
    """Return the size of a column's row, without the characters of strings."""
    dtype, shape = dtype_and_shape
    return dtype.itemsize * math.prod(shape)
