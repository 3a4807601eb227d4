"""The chunks that came with a sample: parsed when they are asked for, decoded into the place where they will stay."""

from __future__ import annotations

import collections
import contextlib
import functools
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from reverb_writer.errors import FormatError, UnsafeDataError
from reverb_writer.protocol import messages, tensors
from reverb_writer.protocol.chunk_layout import Expected, find_contents, find_frame
from reverb_writer.protocol.tensors import decompress_into, varint

__all__ = ["MAX_PLACE_BYTES", "DtypesAndShapes", "Lessons", "SentChunk", "SentChunks"]

Array = npt.NDArray[Any]
DtypesAndShapes = Sequence[tuple[np.dtype[Any], tuple[int, ...]]]

_CHUNK_KEY = b"\x08"  # field 1, a varint
_MAX_SHARED_COLUMNS, _MAX_SHARED_BYTES = 256, 8192
_MAX_PARTS = 1024  # columns of all of them
_MAX_KINDS = 16
_MAX_HEAD_BYTES = 2 << 20  # of one kind
MAX_PLACE_BYTES = 16 << 20
_PLACE_BYTES, _CONTENT_BYTES = 450, 130

_Asked = tuple[int, Sequence[int]]
"""The key of a chunk, and which of its tensors are asked for."""

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

    def part(self, indices: Sequence[int]) -> Kind:
        """Return the kind of some of the columns."""
        found = self._parts.get(indices)
        if found is None:
            if sum(map(len, self._parts)) + len(indices) > _MAX_PARTS:
                self._parts.clear()
            found = self._parts[indices] = _kind_of(tuple([self._sent_heads[index] for index in indices]))
        return found

    def expected(self) -> list[Expected]:
        """Return how the tensor of each column is written, for `find_contents`."""
        max_bytes = _MAX_HEAD_BYTES // len(self.heads)
        return [
            Expected(*sent, head.announced, head.min_content, max_bytes)
            for sent, head in zip(self._sent_heads, self.heads, strict=True)
        ]

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
                decompress_into(content, of_column[start:stop])
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

    A chunk comes with each of its items, and is the same each time. Should it not be, its contents are refused, or read
    as of the kind that it was before: never more of them than that kind has rows.

    Attributes:
        begin: the chunk's first bytes, its key.
        size: of the chunk, bytes.
        kind: of the tensors that were asked for.
        contents: where each of them begins and ends.
    """

    begin: bytes
    size: int
    kind: Kind
    contents: tuple[tuple[int, int], ...]

    @property
    def num_bytes(self) -> int:
        """What it takes in memory, roughly."""
        return _PLACE_BYTES + _CONTENT_BYTES * len(self.contents)


class Lessons:
    """What chunks so far teach about those to come: their places, and at most 2 MB for each of up to 16 kinds."""

    def __init__(self, max_place_bytes: int = MAX_PLACE_BYTES) -> None:
        """Know nothing; remember so many bytes of places at most."""
        self._max_place_bytes = max_place_bytes
        self._kinds: dict[bytes, Kind] = {}  # of all tensors of a chunk, by the bytes after them
        self._expected: dict[Kind, list[Expected]] = {}
        self._places: collections.OrderedDict[_Asked, _Place] = collections.OrderedDict()
        self._place_bytes = 0

    def kind(self, rest: bytes) -> Kind | None:
        """Return the kind of the last chunk with these bytes after its tensors."""
        return self._kinds.get(rest)

    def learn_kind(self, rest: bytes, kind: Kind) -> None:
        """Expect chunks with these bytes after their tensors to be of this kind."""
        if len(self._kinds) >= _MAX_KINDS:
            self._kinds.clear()
        self._kinds[rest] = kind

    def expected(self, kind: Kind) -> list[Expected]:
        """Return how the tensors of a kind are written. Chunks of two lengths take turns, and both are remembered."""
        found = self._expected.get(kind)
        if found is None:
            if len(self._expected) >= _MAX_KINDS:
                self._expected.clear()
            found = self._expected[kind] = kind.expected()
        return found

    def place(self, asked: _Asked) -> _Place | None:
        """Return where some tensors of a chunk were the last time."""
        return self._places.get(asked)

    def learn_place(self, asked: _Asked, place: _Place) -> None:
        """Expect some tensors of a chunk where they are now."""
        before = self._places.pop(asked, None)
        self._place_bytes += place.num_bytes - (before.num_bytes if before else 0)
        self._places[asked] = place
        while self._place_bytes > self._max_place_bytes:
            _, first = self._places.popitem(last=False)
            self._place_bytes -= first.num_bytes


class SentChunks:
    """The chunks of a sample, by key."""

    def __init__(self, sent: Sequence[bytes], max_bytes: int, lessons: Lessons | None = None) -> None:
        """Parse nothing yet.

        Args:
            sent: the bytes of each ChunkData.
            max_bytes: bound on all tensors together that are asked for, decoded.
            lessons: what the chunks of the samples before taught; it learns from these.
        """
        self._given = sent
        self._parsed: dict[int, Any] = {}
        self._chunks: dict[_Asked, SentChunk] = {}
        self._max_bytes = max_bytes
        self._lessons = lessons or Lessons()

    @functools.cached_property
    def _sent(self) -> list[bytes]:
        return list(self._given)  # each look into a repeated field makes a copy

    def get(self, key: int, indices: Sequence[int]) -> SentChunk:
        """Return a chunk, as far as the tensors `indices` are concerned.

        Raises:
            FormatError: it did not come, or is damaged.
            UnsafeDataError: one of its tensors must not be decoded, or the chunks are too large together.
        """
        asked = key, indices
        found = self._chunks.get(asked)
        if found is None:
            found = self.peek(key, indices)
            self._max_bytes -= found.num_bytes
            self._chunks[asked] = found
        return found

    def peek(self, key: int, indices: Sequence[int]) -> SentChunk:
        """Return and raise what `get` does for a chunk that will not be decoded: it does not count for the bound."""
        asked = key, indices
        found = self._look_up(asked) or self._find(asked)
        if found.num_bytes > self._max_bytes:
            raise UnsafeDataError(
                f"the chunks of a sample need {found.num_bytes} bytes, expected at most {self._max_bytes} more. "
                "Raise `max_sample_bytes` if you trust the writer."
            )
        return found

    def _look_up(self, asked: _Asked) -> SentChunk | None:
        """Return a chunk that came before."""
        place = self._lessons.place(asked)
        if place:
            for sent in self._sent:
                if len(sent) == place.size and sent.startswith(place.begin):
                    for (start, _), head in zip(place.contents, place.kind.heads, strict=True):
                        if not sent.startswith(head.announced, start):
                            return None
                    return SentChunk(place.kind, _views(sent, place.contents))
        return None

    def _find(self, asked: _Asked) -> SentChunk:
        """Take apart the chunk that begins with its key, as every server writes it; all of them if there is none."""
        key, indices = asked
        begin = _CHUNK_KEY + varint(key)
        likely = [sent for sent in self._sent if sent.startswith(begin)]
        frame = find_frame(likely[0], len(begin)) if len(likely) == 1 and key not in self._parsed else None
        if frame:
            at, stop, rest = frame
            kind = self._lessons.kind(rest)
            found = kind and find_contents(likely[0], at, stop, self._lessons.expected(kind))
            if kind and found and max(indices) < len(found):
                contents = tuple([found[index] for index in indices])
                place = _Place(begin, len(likely[0]), kind.part(indices), contents)
                self._lessons.learn_place(asked, place)
                return SentChunk(place.kind, _views(likely[0], contents))
        if key not in self._parsed:
            self._parse(key, likely or self._sent)
        chunk = self._parsed[key]
        parsed = SentChunk.of(chunk, indices, self._max_bytes)
        if frame and parsed.is_plain:
            with contextlib.suppress(FormatError, UnsafeDataError):  # a tensor that nobody asked for
                whole = SentChunk.of(chunk, range(len(chunk.data.tensors)), self._max_bytes)
                is_likely_again = whole.is_plain and whole.kind.is_small
                if is_likely_again and find_contents(likely[0], at, stop, self._lessons.expected(whole.kind)):
                    self._lessons.learn_kind(rest, whole.kind)
        return parsed

    def _parse(self, key: int, likely: Sequence[bytes]) -> None:
        try:
            for sent in likely:
                chunk = messages.SampledChunk.FromString(sent)
                self._parsed[chunk.chunk_key] = chunk
        except DecodeError as error:
            raise FormatError(f"a chunk that cannot be read ({error}).") from None
        if key not in self._parsed:
            raise FormatError(f"an item names chunk {key}, which did not come with it.")


def _views(sent: bytes, contents: Sequence[tuple[int, int]]) -> list[memoryview]:
    view = memoryview(sent)
    return [view[start:stop] for start, stop in contents]
