"""Encoded chunks, which are checked at their first use, and rings of rows, into which chunks are decoded.

    [ chunk 8 | chunk 9 |  free  | chunk 4 | chunk 5 | chunk 6 | chunk 7 | ]
                        ^ next chunk       ^ evicted first

A ring has one array per column, and a memory limit. A window is a few ranges of rows, and a batch of windows is one
`take` per column. Chunks are evicted in the order of their insertion, so free memory is always in one piece. For
uniform sampling any order is equally good.

A missing or damaged chunk raises FormatError; a tensor that must not be decoded raises UnsafeDataError.
"""

from __future__ import annotations

import collections
import functools
import math
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from reverb_writer.errors import FormatError, UnsafeDataError
from reverb_writer.protocol import messages, tensors, views
from reverb_writer.protocol.signatures import NO_SPEC, StoredSpec, read_spec
from reverb_writer.protocol.tensors import EncodedTensor, decompress_into, varint

Array = npt.NDArray[Any]
_CHUNK_KEY = b"\x08"  # tag: field 1, a varint
DtypesAndShapes = Sequence[tuple[np.dtype[Any], tuple[int, ...]]]

_EVICTED_SHARE = 8  # evict an eighth of the ring at a time, because each eviction first copies rows of the batch
_MAX_ROWS = 1 << 27  # if rows have no bytes
_STRING_BYTES = 56  # size of a string object, without the pointer to it
_MAX_COLUMNS, _MAX_SHAPE_BYTES = 256, 8192  # limits of cached schemas


class ChunkSchema:
    """Dtypes and shapes of a chunk's columns. Equal small schemas are one shared object: compare with `is`."""

    def __init__(self, encoded_headers: Sequence[tuple[int, bytes]]) -> None:
        """Parse the headers of a chunk's tensors: dtypes and encoded shapes, see `tensors.parse_header`."""
        self.headers = [tensors.parse_header(*header) for header in encoded_headers]  # one per column
        if not all(header.shape and header.shape[0] for header in self.headers):
            raise FormatError("a tensor of a chunk has no rows.")
        # dtype and shape of each column, without the time dimension
        self.dtypes_and_shapes = [(header.dtype, header.shape[1:]) for header in self.headers]
        # number of rows that all columns have; valid items refer only to these
        self.length = min([header.shape[0] for header in self.headers])
        # decoded size in bytes, without the characters of strings
        self.num_bytes = sum([header.num_bytes for header in self.headers])
        self.has_strings = any(header.dtype.kind == "O" for header in self.headers)  # whether a column has strings
        have_equal_lengths = all(header.shape[0] == self.length for header in self.headers)
        # whether each tensor's content decompresses to the memory of a column of `length` rows
        self.is_raw = have_equal_lengths and not self.has_strings and sys.byteorder == "little"
        # indices of the columns of booleans
        self.boolean_columns = [number for number, header in enumerate(self.headers) if header.dtype.kind == "b"]


_cached_schema = functools.lru_cache(maxsize=256)(ChunkSchema)


class EncodedChunk:
    """Some tensors of a chunk, checked but not decoded.

    Attributes:
        schema: dtypes and shapes of these tensors.
        length: number of rows of every tensor.
        num_bytes: decoded size in bytes, including the characters of strings.
    """

    __slots__ = ("_contents", "_delta_encoded", "_strings", "length", "num_bytes", "schema")

    def __init__(self, chunk: Any, indices: Sequence[int], max_bytes: int) -> None:
        """Take tensors of a `messages.SampledChunk` or of its view; `max_bytes` limits each tensor, decoded."""
        stored = chunk.data.tensors
        if max(indices) >= len(stored):
            raise FormatError(f"an item refers to tensor {max(indices)} of a chunk of {len(stored)} tensors.")
        named = [stored[index] for index in indices]
        headers = tuple([(tensor.dtype, tensor.tensor_shape) for tensor in named])
        is_small = len(headers) <= _MAX_COLUMNS and sum([len(shape) for _, shape in headers]) <= _MAX_SHAPE_BYTES
        schema = _cached_schema(headers) if is_small else ChunkSchema(headers)
        self.schema, self.length, self.num_bytes = schema, schema.length, schema.num_bytes
        self._delta_encoded = chunk.delta_encoded  # whether integers are stored as differences between rows
        self._contents = [tensor.tensor_content for tensor in named]
        self._strings = [list(tensor.string_val) for tensor in named] if schema.has_strings else [()] * len(named)
        have_usual_sizes = [  # of snappy blocks and their length prefixes; other sizes may be valid
            content[: len(header.length_prefix)] == header.length_prefix and len(content) >= header.min_block_bytes
            for content, header in zip(self._contents, schema.headers, strict=True)
        ]
        if schema.has_strings or not all(have_usual_sizes):
            for tensor in self._tensors():
                tensor.check(max_bytes)
                if tensor.header.dtype.kind == "O":
                    self.num_bytes += len(tensor.content) + sum(map(len, tensor.strings))

    def decode_into(self, columns: Sequence[Array], columns_as_bytes: Sequence[Array], start: int) -> None:
        """Decode into columns [capacity, ...] in C order, from row `start` on; raise FormatError if data are damaged.

        `columns_as_bytes` is the same memory as uint8 [capacity, bytes of a row]; empty if a column has strings.
        """
        stop = start + self.length
        if self.schema.is_raw and not self._delta_encoded:
            for content, as_bytes in zip(self._contents, columns_as_bytes, strict=True):
                decompress_into(content, as_bytes[start:stop])
            for number in self.schema.boolean_columns:  # a stored byte may be neither 0 nor 1
                rows = columns_as_bytes[number][start:stop]
                np.not_equal(rows, 0, out=rows.view(np.bool_))
            return
        for tensor, column in zip(self._tensors(), columns, strict=True):
            if tensor.header.shape[0] == self.length:
                tensor.decode_into(column[start:stop], delta_encoded=self._delta_encoded)
            else:
                longer = np.empty(tensor.header.shape, tensor.header.dtype)
                tensor.decode_into(longer, delta_encoded=self._delta_encoded)
                column[start:stop] = longer[: self.length]

    def _tensors(self) -> Iterator[EncodedTensor]:
        return map(EncodedTensor, self.schema.headers, map(bytes, self._contents), self._strings)


class EncodedChunks:
    """The chunks of a sample, by key. Not thread-safe."""

    def __init__(self, encoded: Sequence[bytes | memoryview], max_bytes: int) -> None:
        """Keep ChunkData messages, which are parsed at their first use; `max_bytes` limits their decoded size."""
        self._encoded, self._max_bytes = encoded, max_bytes
        self._parsed: dict[int, Any] = {}
        self._chunks: dict[tuple[int, Sequence[int]], EncodedChunk] = {}  # by key and tensors

    def get(self, key: int, indices: Sequence[int]) -> EncodedChunk:
        """Return some tensors of a chunk, which count towards the limit."""
        of = key, indices
        found = self._chunks.get(of)
        if found is None:
            found = EncodedChunk(self._message(key), indices, self._max_bytes)
            if found.num_bytes > self._max_bytes:
                raise UnsafeDataError(
                    f"the chunks of a sample need {found.num_bytes} bytes, expected at most {self._max_bytes} more. "
                    "Raise `max_sample_bytes` if you trust the writer."
                )
            self._max_bytes -= found.num_bytes
            self._chunks[of] = found
        return found

    def spec(self, key: int) -> tuple[StoredSpec, int]:
        """Return the spec of a chunk's steps, and the number of the chunk's tensors; errors are as in `get`."""
        stored = self._message(key).data.tensors
        if not stored:
            return NO_SPEC, 0
        last = stored[-1]
        return read_spec(last.dtype, last.tensor_shape, bytes(last.tensor_content)), len(stored)

    def _message(self, key: int) -> Any:
        if key not in self._parsed:
            prefix = _CHUNK_KEY + varint(key)  # begins each chunk of every server; else all are parsed
            encoded = list(self._encoded)  # each access to an element of a repeated field copies it
            try:
                for one in [one for one in encoded if one[: len(prefix)] == prefix] or encoded:
                    chunk = views.chunk_of(one) or messages.SampledChunk.FromString(bytes(one))
                    self._parsed[chunk.chunk_key] = chunk
            except DecodeError as error:
                raise FormatError(f"a chunk that cannot be parsed ({error}).") from None
        if key not in self._parsed:
            raise FormatError(f"an item refers to chunk {key}, which its sample does not contain.")
        return self._parsed[key]


class ChunkRing:
    """Decoded chunks with the same columns. Not thread-safe.

    Attributes:
        rows_of: first row and row after the last row, by chunk key.
        columns: [capacity, ...] arrays; only the rows in `rows_of` are valid.
        num_bytes: decoded size of all chunks in bytes, including the characters of strings.
    """

    def __init__(self, dtypes_and_shapes: DtypesAndShapes, max_bytes: int, needed: Sequence[EncodedChunk] = ()) -> None:
        """Create an empty ring for columns of these dtypes and shapes.

        The ring has room for the chunks that are `needed` together, even beyond the memory limit. They are not put yet.
        """
        self._dtypes_and_shapes = list(dtypes_and_shapes)
        num_strings = sum(math.prod(shape) for dtype, shape in dtypes_and_shapes if dtype.kind == "O")
        self._has_strings = any(dtype.kind == "O" for dtype, _ in dtypes_and_shapes)  # also without a string in a row
        of_row = sum(map(row_bytes, dtypes_and_shapes))
        # Rows that were never written take no physical memory, except in arrays of strings: NumPy writes every pointer
        # of a new one, so room for many short strings would take memory at once.
        num_rows = min(max_bytes // max(of_row + _STRING_BYTES * num_strings, 1), _MAX_ROWS)
        self._capacity = max(num_rows, sum(chunk.length for chunk in needed), 1)
        self._capacity_bytes = max(max_bytes, self._capacity * of_row, sum(chunk.num_bytes for chunk in needed))
        self.columns = [np.empty((self._capacity, *shape), dtype) for dtype, shape in self._dtypes_and_shapes]
        self._columns_as_bytes: list[Array] = []  # the same memory as uint8, [rows, bytes of a row]
        if not self._has_strings:
            flat = [column.reshape(self._capacity, math.prod(column.shape[1:])) for column in self.columns]
            self._columns_as_bytes = [column.view(np.uint8) for column in flat]
        self.rows_of: dict[int, tuple[int, int]] = {}
        # Key, first row and decoded size of chunks in the order of `put`. Rows are counted from the first one ever put;
        # row r is in row r % capacity of the arrays.
        self._chunks: collections.deque[tuple[int, int, int]] = collections.deque()
        self._next_row = 0
        self.num_bytes = 0

    def accepts(self, chunk: EncodedChunk) -> bool:
        """Return whether a chunk has the dtypes and shapes of this ring's columns, and fits into the empty ring."""
        has_room = chunk.length <= self._capacity and chunk.num_bytes <= self._capacity_bytes
        return has_room and chunk.schema.dtypes_and_shapes == self._dtypes_and_shapes

    def put(self, key: int, chunk: EncodedChunk) -> bool:
        """Decode a chunk that `accepts` allows; return whether it had room. If it had none, call `evict_for` first.

        A damaged chunk raises FormatError, and is not in the ring.
        """
        length, num_bytes = chunk.length, chunk.num_bytes
        row = self._row_of_next(length)
        if self._must_evict(row + length, num_bytes):
            return False
        start = row % self._capacity
        try:
            chunk.decode_into(self.columns, self._columns_as_bytes, start)
        except FormatError:
            self._drop_strings(start, start + length)  # in the columns before the damaged column
            raise
        self._next_row = row + length
        self.num_bytes += num_bytes
        self._chunks.append((key, row, num_bytes))
        self.rows_of[key] = start, start + length
        return True

    def evict_for(self, chunk: EncodedChunk) -> list[int]:
        """Evict the oldest chunks until `chunk`, and probably a few more, have room; return the evicted keys."""
        evicted = []
        row = self._row_of_next(chunk.length) + max(chunk.length, self._capacity // _EVICTED_SHARE)
        while self._must_evict(row, chunk.num_bytes):
            key, _, num_bytes = self._chunks.popleft()
            self.num_bytes -= num_bytes
            self._drop_strings(*self.rows_of.pop(key))
            evicted.append(key)
        return evicted

    def clear(self) -> None:
        """Forget all chunks; the next one is put where the first one was."""
        for start, stop in self.rows_of.values():
            self._drop_strings(start, stop)
        self.rows_of.clear()
        self._chunks.clear()
        self._next_row = self.num_bytes = 0

    def _row_of_next(self, length: int) -> int:
        """Return the first row of the next chunk: the arrays' start, if the chunk would exceed their end."""
        start = self._next_row % self._capacity
        return self._next_row if start + length <= self._capacity else self._next_row - start + self._capacity

    def _must_evict(self, stop_row: int, num_bytes: int) -> bool:
        """Return whether the oldest chunk occupies rows before `stop_row`, or `num_bytes` more have no room."""
        return bool(self._chunks) and (
            stop_row > self._chunks[0][1] + self._capacity or self.num_bytes + num_bytes > self._capacity_bytes
        )

    def _drop_strings(self, start: int, stop: int) -> None:
        if self._has_strings:
            for column in self.columns:
                if column.dtype.kind == "O":
                    column[start:stop] = None


def row_bytes(dtype_and_shape: tuple[np.dtype[Any], tuple[int, ...]]) -> int:
    """Return the size of a column's row in bytes, without the characters of strings."""
    dtype, shape = dtype_and_shape
    return dtype.itemsize * math.prod(shape)
