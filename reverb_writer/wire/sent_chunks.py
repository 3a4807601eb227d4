"""The chunks that came with a sample: parsed when they are asked for, decoded into the place where they will stay."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from reverb_writer.errors import FormatError, UnsafeDataError
from reverb_writer.wire import messages, tensors
from reverb_writer.wire.plain_chunks import Expected, find_contents, find_frame
from reverb_writer.wire.tensors import varint

__all__ = ["DtypesAndShapes", "Lessons", "SentChunk", "SentChunks"]

Array = npt.NDArray[Any]
DtypesAndShapes = Sequence[tuple[np.dtype[Any], tuple[int, ...]]]

_CHUNK_KEY = b"\x08"  # field 1, a varint
_MAX_SHARED_COLUMNS, _MAX_SHARED_BYTES = 256, 8192
_MAX_KINDS, _MAX_PARTS = 256, 1024
_MAX_PLACES = 1 << 14

_Head = tuple[int, bytes]
"""A tensor's dtype, as a number, and its shape, as a TensorShapeProto."""


class Kind:
    """What chunks of one kind have in common. They share theirs: is it the same object, they are alike.

    Attributes:
        heads: of each column.
        dtypes_and_shapes: of each column, without the time dimension.
        length: rows that all columns have. What only some have no good item names.
        num_bytes: what they occupy decoded, without the characters of strings.
        has_strings: whether there are strings.
        is_small: whether it may be kept.
        is_plain: whether what is stored are the bytes of `length` rows of each column, as they are in memory.
        booleans: which columns are.
        expected: of each column, how its tensor is written, for `find_contents`.
    """

    def __init__(self, heads: Sequence[_Head]) -> None:
        """Compare the columns; a FormatError if one has no rows."""
        self._sent_heads = heads
        self._parts: dict[Sequence[int], Kind] = {}
        self.heads = [tensors.head_of(*head) for head in heads]
        if not all(head.shape and head.shape[0] for head in self.heads):
            raise FormatError("a tensor of a chunk has no rows.")
        self.dtypes_and_shapes = [(head.dtype, head.shape[1:]) for head in self.heads]
        self.length = min([head.shape[0] for head in self.heads])
        self.num_bytes = sum([head.num_bytes for head in self.heads])
        self.has_strings = any(head.dtype.kind == "O" for head in self.heads)
        self.is_small = _is_small(heads)
        is_even = all(head.shape[0] == self.length for head in self.heads)
        self.is_plain = is_even and not self.has_strings and sys.byteorder == "little"
        self.booleans = [number for number, head in enumerate(self.heads) if head.dtype.kind == "b"]
        self.expected = [
            Expected(*sent, head.announced, head.min_content) for sent, head in zip(heads, self.heads, strict=True)
        ]

    def part(self, indices: Sequence[int]) -> Kind:
        """Return the kind of some of the columns."""
        found = self._parts.get(indices)
        if found is None:
            if len(self._parts) >= _MAX_PARTS:
                self._parts.clear()
            found = self._parts[indices] = _kind_of(tuple([self._sent_heads[index] for index in indices]))
        return found

    def is_likely(self, contents: Sequence[bytes | memoryview]) -> bool:
        """Return whether snappy blocks announce the sizes that they should, and may hold as much.

        If not they need not be wrong: a size can be written in more than one way.
        """
        return all(
            [  # noqa: C419  # twice as fast as one by one
                content[: len(head.announced)] == head.announced and len(content) >= head.min_content
                for content, head in zip(contents, self.heads, strict=True)
            ]
        )


def _kind_of(heads: tuple[_Head, ...]) -> Kind:
    return _shared_kind(heads) if _is_small(heads) else Kind(heads)


def _is_small(heads: Sequence[_Head]) -> bool:
    return len(heads) <= _MAX_SHARED_COLUMNS and sum([len(shape) for _, shape in heads]) <= _MAX_SHARED_BYTES


_shared_kind = functools.lru_cache(maxsize=256)(Kind)


class SentChunk:
    """Some tensors of a chunk, of which all but the content is known.

    Attributes:
        kind: what chunks like this one have in common.
        length: rows.
        num_bytes: what it occupies decoded, the characters of strings included.
    """

    __slots__ = ("_contents", "_delta_encoded", "_strings", "kind", "length", "num_bytes")

    def __init__(
        self,
        kind: Kind,
        contents: Sequence[bytes | memoryview],
        strings: Sequence[Sequence[bytes]] = (),
        *,
        delta_encoded: bool = False,
    ) -> None:
        """Compare nothing; `strings` are needed if the kind has some."""
        self.kind, self._contents, self._strings, self._delta_encoded = kind, contents, strings, delta_encoded
        self.length = kind.length
        self.num_bytes = kind.num_bytes
        if kind.has_strings:
            self.num_bytes += sum(
                len(tensor.content) + sum(map(len, tensor.strings))
                for tensor in self._tensors()
                if tensor.head.dtype.kind == "O"
            )

    @classmethod
    def of(cls, chunk: Any, indices: Sequence[int], max_bytes: int) -> SentChunk:
        """Look at some tensors of a `reverb_writer.sampled.Chunk`; see `SentChunks`."""
        sent = chunk.data.tensors
        if max(indices) >= len(sent):
            raise FormatError(f"an item names tensor {max(indices)} of a chunk of {len(sent)}.")
        named = [sent[index] for index in indices]
        kind = _kind_of(tuple([(tensor.dtype, tensor.tensor_shape) for tensor in named]))
        contents = [tensor.tensor_content for tensor in named]
        strings = [list(tensor.string_val) for tensor in named] if kind.has_strings else ()
        found = cls(kind, contents, strings, delta_encoded=chunk.delta_encoded)
        if kind.has_strings or not kind.is_likely(contents):
            for tensor in found._tensors():
                tensor.check(max_bytes)
        return found

    @property
    def is_plain(self) -> bool:
        """Return whether its contents are stored as they are, in all columns."""
        return self.kind.is_plain and not self._delta_encoded

    def decode_into(self, columns: Sequence[Array], stored: Sequence[Array], start: int) -> None:
        """Decode into the rows from `start` on of columns [capacity, ...] of these dtypes and shapes, in C order.

        Args:
            columns: where to.
            stored: the same memory as bytes [capacity, row bytes], uint8; empty if the columns have strings.
            start: first row.

        Raises:
            FormatError: a tensor is damaged.
        """
        stop = start + self.length
        if self.is_plain:
            for content, of_column in zip(self._contents, stored, strict=True):
                tensors.decompress_into(content, of_column[start:stop])
            for number in self.kind.booleans:  # 0 or 1, whatever was stored
                np.not_equal(stored[number][start:stop], 0, out=stored[number][start:stop].view(np.bool_))
            return
        for tensor, column in zip(self._tensors(), columns, strict=True):
            if tensor.head.shape[0] == self.length:
                tensor.decode_into(column[start:stop], delta_encoded=self._delta_encoded)
            else:
                whole = np.empty(tensor.head.shape, tensor.head.dtype)
                tensor.decode_into(whole, delta_encoded=self._delta_encoded)
                column[start:stop] = whole[: self.length]

    def _tensors(self) -> Iterator[tensors.Tensor]:
        strings = self._strings or [()] * len(self._contents)
        return map(tensors.Tensor, self.kind.heads, map(bytes, self._contents), strings)


class _Place(NamedTuple):
    """Where in a chunk its contents are.

    A chunk comes with each of its items, and is the same each time. Should it not be, its contents are refused or read
    as others than were meant; nothing else is reached by them.
    """

    begin: bytes
    size: int
    kind: Kind
    contents: tuple[tuple[int, int], ...]


class Lessons:
    """What the chunks so far taught about those to come, bounded.

    Attributes:
        kinds: of all tensors of a chunk, by the bytes after them.
        places: by key, and the tensors that were asked for.
    """

    def __init__(self) -> None:
        """Know nothing."""
        self.kinds: dict[bytes, Kind] = {}
        self.places: dict[tuple[int, Sequence[int]], _Place] = {}

    def learn_kind(self, rest: bytes, kind: Kind) -> None:
        if len(self.kinds) >= _MAX_KINDS:
            self.kinds.clear()
        self.kinds[rest] = kind

    def learn_place(self, key: int, indices: Sequence[int], place: _Place) -> None:
        if len(self.places) >= _MAX_PLACES:
            del self.places[next(iter(self.places))]
        self.places[key, indices] = place


class SentChunks:
    """The chunks of a sample, by key."""

    def __init__(self, sent: Sequence[bytes], max_bytes: int, lessons: Lessons | None = None) -> None:
        """Parse nothing yet.

        Args:
            sent: the bytes of each ChunkData.
            max_bytes: bound on all tensors together that are asked for, decoded.
            lessons: what the chunks of the samples before taught; it learns from these.
        """
        self._sent = list(sent)  # each look into a repeated field makes a copy
        self._parsed: dict[int, Any] = {}
        self._chunks: dict[tuple[int, Sequence[int]], SentChunk] = {}
        self._max_bytes = max_bytes
        self._lessons = lessons or Lessons()

    def get(self, key: int, indices: Sequence[int]) -> SentChunk:
        """Return a chunk, as far as the tensors `indices` are concerned.

        Raises:
            FormatError: it did not come, or is damaged.
            UnsafeDataError: one of its tensors must not be decoded, or the chunks are too large together.
        """
        asked = key, indices
        found = self._chunks.get(asked)
        if found is None:
            found = self._look_up(asked) or self._find(key, indices)
            if found.num_bytes > self._max_bytes:
                raise UnsafeDataError(
                    f"the chunks of a sample need {found.num_bytes} bytes, expected at most {self._max_bytes} more. "
                    "Raise `max_sample_bytes` if you trust the writer."
                )
            self._max_bytes -= found.num_bytes
            self._chunks[asked] = found
        return found

    def _look_up(self, asked: tuple[int, Sequence[int]]) -> SentChunk | None:
        """Return a chunk that came before."""
        place = self._lessons.places.get(asked)
        if place:
            for sent in self._sent:
                if len(sent) == place.size and sent.startswith(place.begin):
                    view = memoryview(sent)
                    contents = [view[start:stop] for start, stop in place.contents]
                    return SentChunk(place.kind, contents) if place.kind.is_likely(contents) else None
        return None

    def _find(self, key: int, indices: Sequence[int]) -> SentChunk:
        """Take apart the chunk that begins with its key, as every server writes it; all of them if there is none."""
        begin = _CHUNK_KEY + varint(key)
        likely = [sent for sent in self._sent if sent.startswith(begin)]
        frame = find_frame(likely[0], len(begin)) if len(likely) == 1 and key not in self._parsed else None
        if frame:
            at, stop, rest = frame
            kind = self._lessons.kinds.get(rest)
            places = kind and find_contents(likely[0], at, stop, kind.expected)
            if kind and places and max(indices) < len(places):
                named = tuple([places[index] for index in indices])
                self._lessons.learn_place(key, indices, _Place(begin, len(likely[0]), kind.part(indices), named))
                view = memoryview(likely[0])
                return SentChunk(kind.part(indices), [view[start:stop] for start, stop in named])
        if key not in self._parsed:
            self._parse(key, likely or self._sent)
        chunk = self._parsed[key]
        found = SentChunk.of(chunk, indices, self._max_bytes)
        if frame and found.is_plain:
            with contextlib.suppress(FormatError, UnsafeDataError):  # a tensor that nobody asked for
                whole = SentChunk.of(chunk, range(len(chunk.data.tensors)), self._max_bytes)
                if whole.is_plain and whole.kind.is_small and find_contents(likely[0], at, stop, whole.kind.expected):
                    self._lessons.learn_kind(rest, whole.kind)
        return found

    def _parse(self, key: int, likely: Sequence[bytes]) -> None:
        try:
            for sent in likely:
                chunk = messages.SampledChunk.FromString(sent)
                self._parsed[chunk.chunk_key] = chunk
        except DecodeError as error:
            raise FormatError(f"a chunk that cannot be read ({error}).") from None
        if key not in self._parsed:
            raise FormatError(f"an item names chunk {key}, which did not come with it.")
