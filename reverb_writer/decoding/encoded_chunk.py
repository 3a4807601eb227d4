"""The encoded chunks of a sample: checked when they are asked for, and decoded into the arrays that will hold them.

A chunk that is missing or damaged raises FormatError, a tensor that must not be decoded UnsafeDataError.
"""

from __future__ import annotations

import collections
import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from reverb_writer.decoding.chunk_schema import ChunkSchema, schema_of
from reverb_writer.errors import FormatError, UnsafeDataError
from reverb_writer.protocol import messages
from reverb_writer.protocol.chunk_layout import ExpectedTensor, TensorsField, find_contents, find_tensors_field
from reverb_writer.protocol.specs import read_spec
from reverb_writer.protocol.tensors import EncodedTensor, decompress_into, varint

ChunkTensors = tuple[int, Sequence[int]]
"""The key of a chunk, and the indices of some of its tensors."""

MAX_LAYOUT_BYTES = 16 << 20
_MAX_SCHEMAS = 16
_LAYOUT_BYTES, _CONTENT_BYTES = 450, 130


Array = npt.NDArray[Any]
_CHUNK_KEY = b"\x08"  # tag: field 1, a varint


class ChunkLayout(NamedTuple):
    """Where the contents of some tensors of a chunk are.

    A server sends a chunk with each of its items, and always the same bytes. If the bytes do differ, the contents are
    refused, or decoded with the schema of the earlier ones: never more of them than that schema has rows.
    """

    prefix: bytes  # the chunk's first bytes, which hold its key
    size: int  # of the encoded chunk in bytes
    schema: ChunkSchema  # of the tensors
    contents: tuple[tuple[int, int], ...]  # offsets at which the content of each tensor begins and ends

    @property
    def num_bytes(self) -> int:
        """Return the memory that a layout takes, roughly."""
        return _LAYOUT_BYTES + _CONTENT_BYTES * len(self.contents)


class ChunkLayoutCache:
    """Layouts of chunks that were seen, and the last 16 schemas, of at most 2 MB each. Not thread-safe."""

    def __init__(self, max_layout_bytes: int = MAX_LAYOUT_BYTES) -> None:
        """Create an empty cache; `max_layout_bytes` is the memory limit of the layouts."""
        self._max_layout_bytes = max_layout_bytes
        self._schemas: dict[bytes, ChunkSchema] = {}  # of all tensors of a chunk, by the chunk's trailer
        self._expected: dict[ChunkSchema, list[ExpectedTensor]] = {}
        self._layouts: collections.OrderedDict[ChunkTensors, ChunkLayout] = collections.OrderedDict()
        self._layout_bytes = 0

    def schema(self, trailer: bytes) -> ChunkSchema | None:
        """Return the schema of the last chunk that had these bytes after its tensors."""
        return self._schemas.get(trailer)

    def add_schema(self, trailer: bytes, schema: ChunkSchema) -> None:
        """Keep the schema of a chunk that has these bytes after its tensors."""
        if len(self._schemas) >= _MAX_SCHEMAS:
            self._schemas.clear()
        self._schemas[trailer] = schema

    def expected_tensors(self, schema: ChunkSchema) -> list[ExpectedTensor]:
        """Return `schema.expected_tensors()`, kept for the schemas used last: chunks of two lengths may alternate."""
        found = self._expected.get(schema)
        if found is None:
            if len(self._expected) >= _MAX_SCHEMAS:
                self._expected.clear()
            found = self._expected[schema] = schema.expected_tensors()
        return found

    def layout(self, of: ChunkTensors) -> ChunkLayout | None:
        """Return where these tensors of a chunk were when it was last seen."""
        return self._layouts.get(of)

    def add_layout(self, of: ChunkTensors, layout: ChunkLayout) -> None:
        """Keep where these tensors of a chunk are; evict the oldest layouts if there is no room."""
        replaced = self._layouts.pop(of, None)
        self._layout_bytes += layout.num_bytes - (replaced.num_bytes if replaced else 0)
        self._layouts[of] = layout
        while self._layout_bytes > self._max_layout_bytes:
            _, oldest = self._layouts.popitem(last=False)
            self._layout_bytes -= oldest.num_bytes


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

    @property
    def is_raw(self) -> bool:
        """Return whether each tensor's content decompresses to the memory of a column."""
        return self.schema.is_raw and not self._delta_encoded

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
        if self.is_raw:
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


class _Located(NamedTuple):
    """Where a chunk of a sample is."""

    prefix: bytes  # the first bytes of its message
    candidates: Sequence[bytes]  # the messages that it may be
    field: TensorsField | None  # where its tensors are, if there is one candidate of the usual form
    schema: Any  # of all its tensors, if `contents` are known
    contents: Sequence[tuple[int, int]] | None  # offsets at which the content of each tensor begins and ends


class EncodedChunks:
    """The chunks of a sample, by key. Not thread-safe."""

    def __init__(self, encoded: Sequence[bytes], max_bytes: int, layouts: ChunkLayoutCache | None = None) -> None:
        """Keep ChunkData messages, to be parsed when they are asked for; `layouts` are of earlier samples' chunks.

        `max_bytes` limits the decoded size of all tensors together that `get` returns.
        """
        self._encoded_field = encoded
        self._parsed: dict[int, Any] = {}
        self._located: dict[int, _Located] = {}
        self._chunks: dict[ChunkTensors, EncodedChunk] = {}
        self._max_bytes = max_bytes
        self._layouts = layouts or ChunkLayoutCache()

    @functools.cached_property
    def _encoded(self) -> list[bytes]:
        return list(self._encoded_field)  # each access to an element of a repeated field makes a copy of it

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
        of = key, indices
        found = self._find_by_layout(of) or self._find(of)
        if found.num_bytes > self._max_bytes:
            raise UnsafeDataError(
                f"the chunks of a sample need {found.num_bytes} bytes, expected at most {self._max_bytes} more. "
                "Raise `max_sample_bytes` if you trust the writer."
            )
        return found

    def _find_by_layout(self, of: ChunkTensors) -> EncodedChunk | None:
        """Return the tensors of a chunk that was seen before, if it still has the same layout."""
        layout = self._layouts.layout(of)
        if layout:
            for encoded in self._encoded:
                if len(encoded) == layout.size and encoded.startswith(layout.prefix):
                    for (start, _), header in zip(layout.contents, layout.schema.headers, strict=True):
                        if not encoded.startswith(header.length_prefix, start):
                            return None
                    return EncodedChunk(layout.schema, _views(encoded, layout.contents))
        return None

    def spec(self, key: int) -> bytes:
        """Return the encoded spec of a chunk's steps; empty if it carries none. Errors as of `get`."""
        found = self._locate(key)
        if found.contents is not None:
            (start, stop), header = found.contents[-1], found.schema.encoded_headers[-1]
            return read_spec(*header, found.candidates[0][start:stop])
        tensors = self._parse(key, found.candidates).data.tensors
        return read_spec(tensors[-1].dtype, tensors[-1].tensor_shape, tensors[-1].tensor_content) if tensors else b""

    def _find(self, of: ChunkTensors) -> EncodedChunk:
        """Return the tensors of a chunk that is new; without parsing it if its schema has been seen."""
        key, indices = of
        prefix, candidates, field, known, contents = self._locate(key)
        if contents is not None and max(indices) < len(contents):
            chosen = tuple([contents[index] for index in indices])
            layout = ChunkLayout(prefix, len(candidates[0]), known.select(indices), chosen)
            self._layouts.add_layout(of, layout)
            return EncodedChunk(layout.schema, _views(candidates[0], chosen))
        chunk = self._parse(key, candidates)
        parsed = EncodedChunk.parse(chunk, indices, self._max_bytes)
        if field and parsed.is_raw:
            with contextlib.suppress(FormatError, UnsafeDataError):  # of a tensor that the item does not name
                whole = EncodedChunk.parse(chunk, range(len(chunk.data.tensors)), self._max_bytes).schema
                start, stop, trailer = field
                # A spec has one row, whatever the others have: the tensors that an item names are looked at again.
                is_usual = not whole.has_strings and whole.is_cacheable
                if is_usual and find_contents(candidates[0], start, stop, self._layouts.expected_tensors(whole)):
                    self._layouts.add_schema(trailer, whole)
        return parsed

    def _locate(self, key: int) -> _Located:
        """Find a chunk among those of the sample, and its tensors if its schema has been seen."""
        located = self._located.get(key)
        if located is None:
            prefix = _CHUNK_KEY + varint(key)  # with which every server begins a chunk; if none does so, all are parsed
            candidates = [encoded for encoded in self._encoded if encoded.startswith(prefix)]
            is_unique = len(candidates) == 1 and key not in self._parsed
            field = find_tensors_field(candidates[0], len(prefix)) if is_unique else None
            schema = self._layouts.schema(field[2]) if field else None
            contents = None
            if field and schema:
                expected = self._layouts.expected_tensors(schema)
                contents = find_contents(candidates[0], field[0], field[1], expected)
            located = self._located[key] = _Located(prefix, candidates or self._encoded, field, schema, contents)
        return located

    def _parse(self, key: int, candidates: Sequence[bytes]) -> Any:
        if key not in self._parsed:
            try:
                for encoded in candidates:
                    chunk = messages.SampledChunk.FromString(encoded)
                    self._parsed[chunk.chunk_key] = chunk
            except DecodeError as error:
                raise FormatError(f"a chunk that cannot be parsed ({error}).") from None
        if key not in self._parsed:
            raise FormatError(f"an item names chunk {key}, which did not come with it.")
        return self._parsed[key]


def _views(encoded: bytes, contents: Sequence[tuple[int, int]]) -> list[memoryview]:
    view = memoryview(encoded)
    return [view[start:stop] for start, stop in contents]
