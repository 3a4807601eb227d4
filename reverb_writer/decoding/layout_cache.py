"""What is kept of the items of one layout: their decoded chunks, and which rows of them each item is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from reverb_writer.decoding.chunk_ring import Arena
from reverb_writer.decoding.encoded_chunk import SentChunk, SentChunks
from reverb_writer.errors import FormatError
from reverb_writer.protocol.trajectory_parsing import Layout, Slice

__all__ = ["Part", "Rows", "Shelf"]

Rows = tuple[tuple[int, ...], ...]
"""Which rows of its arena each part of an item is: of slice after slice, first row and their number."""

_ENTRY_BYTES, _INT_BYTES = 200, 40


class Part(NamedTuple):
    """Some columns of a group, and where they are kept.

    Attributes:
        group: whose slices they have.
        columns: which columns of the item.
        tensors: for each, which tensor of the chunks.
        arena: their decoded chunks.
        max_rows: how many one sample may have.
    """

    group: int
    columns: tuple[int, ...]
    tensors: tuple[int, ...]
    arena: Arena
    max_rows: int


class Shelf:
    """The items of one layout. Not thread-safe.

    Attributes:
        layout: of them.
        parts: every column is in one.
        known: by trajectory, which rows of each part's arena an item is.
    """

    def __init__(self, layout: Layout, max_known_bytes: int) -> None:
        """Know nothing, and have no parts yet; `known` takes so many bytes at most."""
        self.layout = layout
        self.parts: list[Part] = []
        self.known: dict[bytes, Rows] = {}
        self._known_bytes, self._max_known_bytes = 0, max_known_bytes

    def remember(self, trajectory: bytes, rows: Rows) -> None:
        """Know an item until a chunk goes."""
        num_bytes = len(trajectory) + sum([_ENTRY_BYTES + _INT_BYTES * len(of_part) for of_part in rows])
        if self._known_bytes + num_bytes > self._max_known_bytes:
            self.forget()
        self._known_bytes += num_bytes
        self.known[trajectory] = rows

    def forget(self) -> None:
        """Know no item any more."""
        self.known.clear()
        self._known_bytes = 0

    def rows(self, slices_of: Sequence[Sequence[Slice]]) -> Rows | None:
        """Return which rows an item is, given each group's slices; None if chunks lack some, or they are too many."""
        rows_of = []
        for part in self.parts:
            spans = part.arena.spans
            rows: list[int] = []
            num_rows = 0
            for key, offset, length in slices_of[part.group]:
                span = spans.get(key)
                if span is None or span[0] + offset + length > span[1]:
                    return None
                rows += (span[0] + offset, length)
                num_rows += length
            if num_rows > part.max_rows:
                return None
            rows_of.append(tuple(rows))  # unlike lists, of no concern to the garbage collector
        return tuple(rows_of)

    def missing(self, slices_of: Sequence[Sequence[Slice]], chunks: SentChunks) -> list[dict[int, SentChunk]] | None:
        """Return the chunks of an item that each part lacks, by key; None if they are of other dtypes or shapes.

        Raises:
            FormatError: a slice is of rows that its chunk does not have.
            UnsafeDataError: see `SentChunks.get`.
        """
        missing = []
        for part in self.parts:
            arena = part.arena
            of_part: dict[int, SentChunk] = {}
            for key, offset, length in slices_of[part.group]:
                span = arena.spans.get(key)
                if span:
                    chunk_length = span[1] - span[0]
                else:
                    chunk = of_part.get(key)
                    if chunk is None:
                        chunk = of_part[key] = chunks.get(key, part.tensors)
                        if not arena.holds(chunk):
                            return None
                    chunk_length = chunk.length
                if offset + length > chunk_length:
                    raise FormatError(f"an item names rows {offset}+{length} of a chunk of {chunk_length}.")
            missing.append(of_part)
        return missing

    def fits(self, missing: Sequence[Mapping[int, SentChunk]]) -> bool:
        """Return whether each of the chunks that are missing has room in its arena as it is."""
        for part, of_part in zip(self.parts, missing, strict=True):
            for chunk in of_part.values():
                if not part.arena.fits(chunk):
                    return False
        return True

    def make_room(self, slices_of: Sequence[Sequence[Slice]], chunks: SentChunks) -> None:
        """Let the arenas that lack chunks of an item have room for all of them together.

        One that was enlarged for another item loses that, so what exceeds the cache is of one item.
        """
        for part in self.parts:
            keys = dict.fromkeys([key for key, _, _ in slices_of[part.group]])
            if part.arena.is_enlarged or not keys.keys() <= part.arena.spans.keys():
                part.arena.clear([chunks.get(key, part.tensors) for key in keys])
