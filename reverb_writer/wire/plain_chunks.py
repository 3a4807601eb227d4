"""Where the contents of a chunk are, if it is written like one before.

The chunks that one writer sends differ in their keys, their places in an episode and their contents only. The bytes
between those are compared, and the contents found where they must be: no copy and no object of protobuf, which would
cost more than to decompress them. What is not exactly as expected is left to protobuf.

Pure: no I/O. Source: reverb/cc/schema.proto (ChunkData); protobuf's encoding guide.
"""

from __future__ import annotations

from collections.abc import Sequence

from reverb_writer.wire.tensors import varint

__all__ = ["Frame", "find_contents", "find_frame", "opening"]

Frame = tuple[int, int, bytes]
"""Where the tensors of a chunk begin and end, and the bytes after them."""

_SEQUENCE_RANGE, _DATA, _TENSOR = 0x12, 0x2A, 0x0A  # tags: fields 2 and 5 of a chunk, field 1 of its data
_MORE = 0x80
_MAX_REST = 32


def opening(dtype_number: int, encoded_shape: bytes) -> bytes:
    """Return the bytes of a plain tensor before the length of its content."""
    return b"".join((b"\x08", varint(dtype_number), b"\x12", varint(len(encoded_shape)), encoded_shape, b"\x22"))


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


def find_contents(
    sent: bytes, at: int, stop: int, expected: Sequence[tuple[bytes, bytes, int]]
) -> list[memoryview] | None:
    """Return the contents of tensors, views of `sent`; None if they are not as expected.

    Args:
        sent: a chunk.
        at: where its tensors begin.
        stop: where they end, at most the end of the chunk.
        expected: of each tensor the bytes before the length of its content, those with which the content begins, and
            how long it is at least.
    """
    view = memoryview(sent)
    contents = []
    try:
        for opening, announced, least in expected:
            if sent[at] != _TENSOR:
                return None
            size, at = sent[at + 1], at + 2
            if size >= _MORE:
                size, at = _size(sent, at - 1)
            end = at + size
            if not sent.startswith(opening, at):
                return None
            at += len(opening) + 1
            length = sent[at - 1]
            if length >= _MORE:
                length, at = _size(sent, at - 1)
            if at + length != end or length < least or not sent.startswith(announced, at):
                return None
            contents.append(view[at:end])
            at = end
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
