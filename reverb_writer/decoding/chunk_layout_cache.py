"""What earlier chunks say about where the tensors of the next ones are, so that most chunks need not be parsed."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import NamedTuple

from reverb_writer.decoding.chunk_schema import ChunkSchema
from reverb_writer.protocol.chunk_layout import ExpectedTensor

ChunkTensors = tuple[int, Sequence[int]]
"""The key of a chunk, and the indices of some of its tensors."""

MAX_LAYOUT_BYTES = 16 << 20
_MAX_SCHEMAS = 16
_LAYOUT_BYTES, _CONTENT_BYTES = 450, 130


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
