"""The encoded chunks of a sample: checked when they are asked for, and decoded into the arrays that will hold them.

A chunk that is missing or damaged raises FormatError, a tensor that must not be decoded UnsafeDataError.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from reverb_writer.decoding.chunk_schema import ChunkSchema, schema_of
from reverb_writer.errors import FormatError, UnsafeDataError
from reverb_writer.protocol import messages
from reverb_writer.protocol.specs import read_spec
from reverb_writer.protocol.tensors import EncodedTensor, decompress_into, varint

ChunkTensors = tuple[int, Sequence[int]]
"""The key of a chunk, and the indices of some of its tensors."""

Array = npt.NDArray[Any]
_CHUNK_KEY = b"\x08"  # tag: field 1, a varint


class EncodedChunk:
    """Some tensors of a chunk, checked but not decoded."""

    __slots__ = ("_contents", "_delta_encoded", "_strings", "length", "num_bytes", "schema")

    def __init__(
        self,
        schema: ChunkSchema,
        contents: Sequence[bytes | memoryview],
        strings: Sequence[Sequence[bytes]] = (),
        *,
        delta_encoded: bool = False,
    ) -> None:
        """Store the tensors; nothing is checked here. `strings` may be omitted if the schema has none.

        `delta_encoded` tells whether integers are stored as differences between rows.
        """
        self.schema, self._contents, self._strings, self._delta_encoded = schema, contents, strings, delta_encoded
        self.length = schema.length
        self.num_bytes = schema.num_bytes  # decoded size, the characters of strings included
        if schema.has_strings:
            self.num_bytes += sum(
                len(tensor.content) + sum(map(len, tensor.strings))
                for tensor in self._tensors()
                if tensor.header.dtype.kind == "O"
            )

    @classmethod
    def parse(cls, chunk: Any, indices: Sequence[int], max_bytes: int) -> EncodedChunk:
        """Return some tensors of a `reverb_writer.sampled.Chunk`, checked; `max_bytes` limits each decoded tensor."""
        tensors = chunk.data.tensors
        if max(indices) >= len(tensors):
            raise FormatError(f"an item names tensor {max(indices)} of a chunk of {len(tensors)}.")
        named = [tensors[index] for index in indices]
        schema = schema_of(tuple([(tensor.dtype, tensor.tensor_shape) for tensor in named]))
        contents = [tensor.tensor_content for tensor in named]
        strings = [list(tensor.string_val) for tensor in named] if schema.has_strings else ()
        parsed = cls(schema, contents, strings, delta_encoded=chunk.delta_encoded)
        if schema.has_strings or not schema.has_usual_sizes(contents):
            for tensor in parsed._tensors():
                tensor.check(max_bytes)
        return parsed

    def decode_into(self, columns: Sequence[Array], columns_as_bytes: Sequence[Array], start: int) -> None:
        """Decode into the rows from `start` on.

        Args:
            columns: [capacity, ...] of these dtypes and shapes, in C order.
            columns_as_bytes: the same memory as uint8 [capacity, bytes of a row]; empty if a column has strings.
            start: first row.

        Raises:
            FormatError: a tensor is damaged. The values of the rows are undefined then.
        """
        stop = start + self.length
        if self.schema.is_raw and not self._delta_encoded:
            for content, as_bytes in zip(self._contents, columns_as_bytes, strict=True):
                decompress_into(content, as_bytes[start:stop])
            for number in self.schema.boolean_columns:  # any stored byte becomes 0 or 1
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
        strings = self._strings or [()] * len(self._contents)
        return map(EncodedTensor, self.schema.headers, map(bytes, self._contents), strings)


class EncodedChunks:
    """The chunks of a sample, by key. Not thread-safe."""

    def __init__(self, encoded: Sequence[bytes], max_bytes: int) -> None:
        """Keep ChunkData messages, to be parsed when they are asked for.

        `max_bytes` limits the decoded size of all tensors together that `get` returns.
        """
        self._encoded, self._max_bytes = encoded, max_bytes
        self._parsed: dict[int, Any] = {}
        self._chunks: dict[ChunkTensors, EncodedChunk] = {}

    def get(self, key: int, indices: Sequence[int]) -> EncodedChunk:
        """Return some tensors of a chunk, to be decoded.

        Raises:
            FormatError: the sample lacks the chunk, or the chunk is damaged.
            UnsafeDataError: one of the tensors must not be decoded, or the chunks are too large together.
        """
        of = key, indices
        found = self._chunks.get(of)
        if found is None:
            found = self.peek(key, indices)
            self._max_bytes -= found.num_bytes
            self._chunks[of] = found
        return found

    def peek(self, key: int, indices: Sequence[int]) -> EncodedChunk:
        """Return and raise what `get` does, but do not count the chunk towards the limit: it will not be decoded."""
        found = EncodedChunk.parse(self._message(key), indices, self._max_bytes)
        if found.num_bytes > self._max_bytes:
            raise UnsafeDataError(
                f"the chunks of a sample need {found.num_bytes} bytes, expected at most {self._max_bytes} more. "
                "Raise `max_sample_bytes` if you trust the writer."
            )
        return found

    def spec(self, key: int) -> bytes:
        """Return the encoded spec of a chunk's steps; empty if it carries none. Errors as of `get`."""
        tensors = self._message(key).data.tensors
        return read_spec(tensors[-1].dtype, tensors[-1].tensor_shape, tensors[-1].tensor_content) if tensors else b""

    def _message(self, key: int) -> Any:
        if key not in self._parsed:
            prefix = _CHUNK_KEY + varint(key)  # with which every server begins a chunk; if none does so, all are parsed
            encoded = list(self._encoded)  # each access to an element of a repeated field makes a copy of it
            try:
                for one in [one for one in encoded if one.startswith(prefix)] or encoded:
                    chunk = messages.SampledChunk.FromString(one)
                    self._parsed[chunk.chunk_key] = chunk
            except DecodeError as error:
                raise FormatError(f"a chunk that cannot be parsed ({error}).") from None
        if key not in self._parsed:
            raise FormatError(f"an item names chunk {key}, which did not come with it.")
        return self._parsed[key]
