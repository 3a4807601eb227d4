"""Where the contents of a chunk are, if it is written like one before.

The chunks that one writer sends differ in their keys, their places in an episode and their contents only. The bytes
between those are compared, and the contents found where they must be: no copy and no object of protobuf, which would
cost more than to decompress them. What is not exactly as expected is left to protobuf.

Pure: no I/O. Source: reverb/cc/schema.proto (ChunkData); protobuf's encoding guide.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from reverb_writer.protocol.tensors import varint

__all__ = ["Expected", "Frame", "find_contents", "find_frame"]

Frame = tuple[int, int, bytes]
"""Where the tensors of a chunk begin and end, and the bytes after them."""

_SEQUENCE_RANGE, _DATA, _TENSOR = 0x12, 0x2A, b"\x0a"  # tags: fields 2 and 5 of a chunk, field 1 of its data
_MORE = 0x80
_MAX_REST = 32
_HEAD_BYTES = 250  # what a head takes, roughly, without the shape


class Head(NamedTuple):
    """What a tensor of a known size begins with, and where its content is, counted from its tag."""

    written: bytes
    content_at: int
    stop: int


class Expected:
    """How a tensor of one dtype and shape is written.

    Attributes:
        heads: by size of the tensor, as far as such have been seen.
    """

    def __init__(
        self, dtype_number: int, encoded_shape: bytes, announced: bytes, min_content: int, max_bytes: int
    ) -> None:
        """Have seen no size yet.

        Args:
            dtype_number: of the tensor.
            encoded_shape: of the tensor, a TensorShapeProto.
            announced: what a content begins with.
            min_content: how long a content is at least.
            max_bytes: bound on the heads that are kept; one is, however large.
        """
        shape = b"".join((b"\x12", varint(len(encoded_shape)), encoded_shape))
        self._opening = b"".join((b"\x08", varint(dtype_number), shape, b"\x22"))
        self._announced, self._min_content = announced, min_content
        self._max_heads = max(max_bytes // (_HEAD_BYTES + len(shape)), 1)
        self.heads: dict[int, Head] = {}

    def learn(self, size: int) -> Head | None:
        """Return the head of a tensor of so many bytes; None if none is written so."""
        rest = size - len(self._opening)
        length = rest - 1
        while length >= 0 and len(varint(length)) + length > rest:
            length -= 1
        if length < self._min_content or len(varint(length)) + length != rest:
            return None
        before = b"".join((_TENSOR, varint(size), self._opening, varint(length)))
        if len(self.heads) >= self._max_heads:
            self.heads.clear()
        head = self.heads[size] = Head(before + self._announced, len(before), len(before) + length)
        return head


def find_frame(sent: bytes, at: int) -> Frame | None:
    """Return where the tensors of a ChunkData are; None if it is not plain.

    Args:
        sent: the chunk.
        at: where its key ends.
    """
    try:
        if sent[at] != _SEQUENCE_RANGE or sent[at + 1] >= _MORE:
            return None
        at += 2 + sent[at + 1]
        if sent[at] != _DATA:
            return None
        size, at = _size(sent, at + 1)
    except IndexError:
        return None
    stop = at + size
    return (at, stop, sent[stop:]) if at <= stop <= len(sent) <= stop + _MAX_REST else None


def find_contents(sent: bytes, at: int, stop: int, expected: Sequence[Expected]) -> list[tuple[int, int]] | None:
    """Return where the contents of tensors begin and end; None if they are not as expected.

    Args:
        sent: a chunk.
        at: where its tensors begin.
        stop: where they end, at most the end of the chunk.
        expected: how each is written.
    """
    contents = []
    try:
        for tensor in expected:
            size = sent[at + 1]
            if size >= _MORE:
                size, _ = _size(sent, at + 1)
            head = tensor.heads.get(size) or tensor.learn(size)
            if head is None or not sent.startswith(head.written, at):
                return None
            contents.append((at + head.content_at, at + head.stop))
            at += head.stop
    except IndexError:
        return None
    return contents if at == stop else None


def _size(sent: bytes, at: int) -> tuple[int, int]:
    """Return a varint below 2**28, and where it ends; -1 for a larger one, which fits nothing."""
    size = sent[at]
    if size < _MORE:
        return size, at + 1
    size += (sent[at + 1] - 1) << 7
    if sent[at + 1] < _MORE:
        return size, at + 2
    size += (sent[at + 2] - 1) << 14
    if sent[at + 2] < _MORE:
        return size, at + 3
    size += (sent[at + 3] - 1) << 21
    return (size, at + 4) if sent[at + 3] < _MORE else (-1, at)
