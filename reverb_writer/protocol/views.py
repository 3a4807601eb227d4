"""Large responses, requests and chunks without copies: the bytes in them are views of the message that has arrived.

Protobuf copies the bytes of a field twice, into its own memory and out of it, for each message in a message. A large
sample takes longer to copy than to decode. So large messages are read here if they have the usual form: known fields,
each in its place and each once. Any other message is left to protobuf, which also knows what is damaged.

Source: protobuf's encoding guide; `messages` has the fields.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from google.protobuf.message import DecodeError

from reverb_writer.protocol import messages
from reverb_writer.protocol.tensors import varint

MIN_BYTES: Final = 65_536
"""Messages of this size are worth a view, and also those whose entries or chunks have it on average."""

_VARINT, _BYTES = 0, 2  # wire types
_MAX_TAG = 0x7F  # of fields up to 15
_MAX_SHIFT = 63
_MAX_FIELDS = 4096  # of one message; a field of two bytes takes a hundred times its size
_MAX_NUMBER = 1 << 31

# Tags: field number << 3 | wire type.
_ENTRY, _CHUNK = 0x0A, 0x0A
_INFO, _DATA, _END = 0x0A, 0x12, 0x18
_KEY, _RANGE, _IS_DELTA, _TENSORS, _NUM_TENSORS, _SIZE = 0x08, 0x12, 0x20, 0x2A, 0x30, 0x38
_TENSOR = 0x0A
_DTYPE, _SHAPE, _CONTENT = 0x08, 0x12, 0x22


class EntryView(NamedTuple):
    """A `messages.SampledResponse`'s entry."""

    info: Any
    data: list[memoryview]
    end_of_sequence: bool


class RequestView(NamedTuple):
    """A `messages.StoredRequest`."""

    chunks: list[memoryview]
    items: Sequence[bytes]
    keep_chunk_keys: Sequence[int]


class TensorView(NamedTuple):
    """A `messages.SampledChunk`'s tensor."""

    dtype: int
    tensor_shape: bytes
    tensor_content: memoryview
    string_val: tuple[()] = ()


class ChunkParts(NamedTuple):
    """A ChunkData with encoded tensors, which nothing has checked."""

    chunk_key: int
    sequence_range: Any
    delta_encoded: bool
    tensors: list[memoryview]


class _Tensors(NamedTuple):
    tensors: list[TensorView]


@dataclass(frozen=True, slots=True)
class ChunkView:
    """A `messages.SampledChunk`."""

    chunk_key: int
    sequence_range: Any
    delta_encoded: bool
    data: _Tensors


class _UnusualError(Exception):
    """The message has not the usual form."""


def entries_of(message: bytes) -> list[EntryView] | None:
    """Return the entries of a SampleStreamResponse as views; None if protobuf should read it."""
    if len(message) < MIN_BYTES:
        return None
    try:
        found = _fields(memoryview(message))
        if len(message) < MIN_BYTES * len(found):
            return None
        return [_entry(entry) for entry in _repeated(found, _ENTRY)]
    except (_UnusualError, IndexError, DecodeError):
        return None


def request_of(message: bytes) -> RequestView | None:
    """Return an InsertStreamRequest with its chunks as views; None if protobuf should read it."""
    if len(message) < MIN_BYTES:
        return None
    chunks: list[memoryview] = []
    others: list[bytes | memoryview] = []
    try:
        for tag, value in _fields(memoryview(message)):
            if tag == _CHUNK:
                chunks.append(value)
            elif tag & 7 == _BYTES:
                others += bytes([tag]), varint(len(value)), value
            else:
                raise _UnusualError  # noqa: TRY301  # as the errors of `_fields`
        if len(message) < MIN_BYTES * len(chunks):
            return None
        request = messages.StoredRequest.FromString(b"".join(others))
    except (_UnusualError, IndexError, DecodeError):
        return None
    return RequestView(chunks, request.items, request.keep_chunk_keys)


def chunk_of(encoded: bytes | memoryview) -> ChunkView | None:
    """Return a ChunkData as a view; None if protobuf should read it."""
    parts = chunk_parts(encoded)
    if parts is None:
        return None
    try:
        return ChunkView(
            parts.chunk_key, parts.sequence_range, parts.delta_encoded, _Tensors([*map(_tensor, parts.tensors)])
        )
    except (_UnusualError, IndexError):
        return None


def chunk_parts(encoded: bytes | memoryview) -> ChunkParts | None:
    """Return a ChunkData whose tensors are not read; None if protobuf should read it."""
    if len(encoded) < MIN_BYTES:
        return None
    try:
        fields = _once(memoryview(encoded), {_KEY, _RANGE, _IS_DELTA, _TENSORS, _NUM_TENSORS, _SIZE})
        steps = messages.SequenceRange.FromString(bytes(fields.get(_RANGE, b"")))
        tensors = _repeated(_fields(fields.get(_TENSORS, memoryview(b""))), _TENSOR)
    except (_UnusualError, IndexError, DecodeError):
        return None
    return ChunkParts(fields.get(_KEY, 0), steps, bool(fields.get(_IS_DELTA, 0)), tensors)


def _entry(encoded: memoryview) -> EntryView:
    infos: list[memoryview] = []  # a server may send an info in parts, which are merged
    data: list[memoryview] = []
    is_end = 0
    for tag, value in _fields(encoded):
        if tag == _INFO:
            infos.append(value)
        elif tag == _DATA:
            data.append(value)
        elif tag == _END:
            is_end = value
        else:
            raise _UnusualError
    return EntryView(messages.SampledInfo.FromString(b"".join(infos)), data, bool(is_end))


def _tensor(encoded: memoryview) -> TensorView:
    fields = _once(encoded, {_DTYPE, _SHAPE, _CONTENT})
    dtype = fields.get(_DTYPE, 0)
    if dtype >= _MAX_NUMBER:
        raise _UnusualError
    return TensorView(dtype, bytes(fields.get(_SHAPE, b"")), fields.get(_CONTENT, memoryview(b"")))


def _repeated(fields: Sequence[tuple[int, Any]], tag: int) -> list[memoryview]:
    if any(found != tag for found, _ in fields):
        raise _UnusualError
    return [value for _, value in fields]


def _once(encoded: memoryview, tags: set[int]) -> dict[int, Any]:
    fields = _fields(encoded)
    found = dict(fields)
    if len(found) < len(fields) or not found.keys() <= tags:
        raise _UnusualError
    return found


def _fields(encoded: memoryview) -> list[tuple[int, Any]]:
    """Return tag and value of each field, in order; a value is an integer or a view.

    Raises:
        _UnusualError: a field has a high number, or is neither a varint nor bytes; or bytes are missing; or there are
            very many fields.
        IndexError: bytes are missing.
    """
    fields: list[tuple[int, Any]] = []
    at, stop = 0, len(encoded)
    while at < stop:
        tag, value = encoded[at], encoded[at + 1]
        at += 2
        if value & 0x80:
            value &= 0x7F
            shift = 7
            while True:
                byte = encoded[at]
                at += 1
                value |= (byte & 0x7F) << shift
                if byte < 0x80:  # noqa: PLR2004  # the last byte
                    break
                shift += 7
                if shift > _MAX_SHIFT:
                    raise _UnusualError
            if value >> 64:
                raise _UnusualError
        kind = tag & 7
        if kind == _BYTES:
            end = at + value
            if end > stop:
                raise _UnusualError
            fields.append((tag, encoded[at:end]))
            at = end
        else:
            fields.append((tag, value))
        if tag > _MAX_TAG or kind not in (_VARINT, _BYTES) or len(fields) > _MAX_FIELDS:
            raise _UnusualError
    return fields
