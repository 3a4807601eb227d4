"""Find the contents of a chunk's tensors without parsing it, given the dtypes and shapes that the tensors should have.

Chunks of one writer differ only in their keys, their ranges of steps and their contents. The bytes in between are
predicted and compared: that makes no copy and no protobuf object, either of which costs more than decompressing the
contents. A chunk whose bytes are not exactly as predicted is left to protobuf.

Pure: no I/O. Source: reverb/cc/schema.proto (ChunkData); protobuf's encoding guide.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from reverb_writer.protocol.tensors import varint

TensorsField = tuple[int, int, bytes]
"""Offsets in a chunk at which its tensors begin and end, and the bytes after them, the chunk's trailer."""

_SEQUENCE_RANGE, _DATA, _TENSOR = 0x12, 0x2A, b"\x0a"  # tags: fields 2 and 5 of a chunk, field 1 of its data
_MORE = 0x80
_MAX_TRAILER_BYTES = 32
_PREFIX_BYTES = 250  # memory of a `TensorPrefix`, roughly, without the shape


class TensorPrefix(NamedTuple):
    """The first bytes of a tensor of a known size."""

    prefix: bytes  # the bytes, the tensor's tag included, up to and including the length prefix of its content
    content_start: int  # offset of the content from the tag
    stop: int  # offset of the tensor's end from the tag


class ExpectedTensor:
    """Predicts the first bytes of tensors of one dtype and shape."""

    def __init__(
        self, dtype_number: int, encoded_shape: bytes, length_prefix: bytes, min_content_bytes: int, max_bytes: int
    ) -> None:
        """Compute what tensors of all sizes share.

        Args:
            dtype_number: the tensors' `messages.DataType`.
            encoded_shape: the tensors' shape, as an encoded TensorShapeProto.
            length_prefix: the first bytes of each content.
            min_content_bytes: size of the shortest valid content.
            max_bytes: memory limit of `prefixes`; one prefix is kept, however large.
        """
        shape = b"".join((b"\x12", varint(len(encoded_shape)), encoded_shape))
        self._header = b"".join((b"\x08", varint(dtype_number), shape, b"\x22"))
        self._length_prefix, self._min_content_bytes = length_prefix, min_content_bytes
        self._max_prefixes = max(max_bytes // (_PREFIX_BYTES + len(shape)), 1)
        # by size of the tensor in bytes, for sizes that `add_size` has computed
        self.prefixes: dict[int, TensorPrefix] = {}

    def add_size(self, size: int) -> TensorPrefix | None:
        """Compute, keep and return the prefix of a tensor of `size` bytes; None if no valid tensor has that size."""
        rest = size - len(self._header)
        length = rest - 1
        while length >= 0 and len(varint(length)) + length > rest:
            length -= 1
        if length < self._min_content_bytes or len(varint(length)) + length != rest:
            return None
        before = b"".join((_TENSOR, varint(size), self._header, varint(length)))
        if len(self.prefixes) >= self._max_prefixes:
            self.prefixes.clear()
        found = self.prefixes[size] = TensorPrefix(before + self._length_prefix, len(before), len(before) + length)
        return found


def find_tensors_field(encoded: bytes, at: int) -> TensorsField | None:
    """Return where the tensors of a ChunkData are, whose key ends at `at`.

    None if its fields are not in the order in which servers write them.
    """
    try:
        if encoded[at] != _SEQUENCE_RANGE or encoded[at + 1] >= _MORE:
            return None
        at += 2 + encoded[at + 1]
        if encoded[at] != _DATA:
            return None
        size, at = _read_varint(encoded, at + 1)
    except IndexError:
        return None
    stop = at + size
    return (at, stop, encoded[stop:]) if at <= stop <= len(encoded) <= stop + _MAX_TRAILER_BYTES else None


def find_contents(
    encoded: bytes, at: int, stop: int, expected: Sequence[ExpectedTensor]
) -> list[tuple[int, int]] | None:
    """Return the offsets at which the contents of a chunk's tensors begin and end, between `at` and `stop`.

    None if a tensor is not as expected.
    """
    contents = []
    try:
        for tensor in expected:
            size = encoded[at + 1]
            if size >= _MORE:
                size, _ = _read_varint(encoded, at + 1)
            prefix = tensor.prefixes.get(size) or tensor.add_size(size)
            if prefix is None or not encoded.startswith(prefix.prefix, at):
                return None
            contents.append((at + prefix.content_start, at + prefix.stop))
            at += prefix.stop
    except IndexError:
        return None
    return contents if at == stop else None


def _read_varint(encoded: bytes, at: int) -> tuple[int, int]:
    """Return a varint below 2**28 and the offset at which it ends; -1 for a larger one, which no size equals."""
    number = encoded[at]
    if number < _MORE:
        return number, at + 1
    number += (encoded[at + 1] - 1) << 7
    if encoded[at + 1] < _MORE:
        return number, at + 2
    number += (encoded[at + 2] - 1) << 14
    if encoded[at + 2] < _MORE:
        return number, at + 3
    number += (encoded[at + 3] - 1) << 21
    return (number, at + 4) if encoded[at + 3] < _MORE else (-1, at)
