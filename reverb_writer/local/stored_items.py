"""The items of a server, and how one goes out as a sample.

An item's trajectory stays the bytes in which it came. A sample is put together of those, of the bytes of its chunks,
and of the few numbers that change: priority, times sampled, probability and size of the table.

Source: Reverb 0.14 (`reverb_service.proto`, `schema.proto`); protobuf's encoding guide.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from reverb_writer.local.chunk_store import Chunk
from reverb_writer.protocol.tensors import varint

_KEY, _TABLE, _PRIORITY, _TIMES_SAMPLED = b"\x08", b"\x12", b"\x29", b"\x30"  # fields 1, 2, 5, 6 of a PrioritizedItem
_INSERTED_AT, _TRAJECTORY = b"\x3a", b"\x42"  # and fields 7, 8
_ITEM, _PROBABILITY, _TABLE_SIZE, _RATE_LIMITED = (
    b"\x0a",
    b"\x11",
    b"\x18",
    b"\x20\x01",
)  # fields 1 to 4 of a SampleInfo
_INFO, _END = b"\x0a", b"\x18\x01"  # fields 1 and 3 of a SampleEntry
_ENTRY = b"\x0a"  # field 1 of a SampleStreamResponse
_RESPONSE_BYTES = 1 << 20
_MAX_ENTRY_BYTES = 64 << 20  # gRPC's messages end at 2 GB
_ITEM_BYTES = 700  # what the objects that belong to an item take beside its trajectory, roughly
_DOUBLE = struct.Struct("<d")


class Item:
    """What is sampled: slices of chunks.

    Attributes:
        key: random, unsigned 64 bits.
        table: its name.
        priority: that it has now.
        times_sampled: how often it went out.
        chunks: that its trajectory names, each once, in the order in which it names them.
        trajectory: a FlatTrajectory.
        inserted_at: a Timestamp, as bytes.
        num_bytes: memory that it takes, without its chunks.
        data_bytes: of its chunks as they go out.
    """

    __slots__ = (
        "_head",
        "_tail",
        "chunks",
        "data_bytes",
        "inserted_at",
        "key",
        "num_bytes",
        "priority",
        "table",
        "times_sampled",
        "trajectory",
    )

    def __init__(self, key: int, table: str, priority: float, chunks: Sequence[Chunk], trajectory: bytes) -> None:
        """Make an item that is in no table yet."""
        self.key, self.table, self.priority = key, table, priority
        self.chunks, self.trajectory = chunks, trajectory
        self.times_sampled = 0
        name = table.encode()
        self._head = b"".join((_KEY, varint(key), _TABLE, varint(len(name)), name, _PRIORITY))
        self.data_bytes = sum([len(chunk.encoded) for chunk in chunks])
        self.num_bytes = len(trajectory) + _ITEM_BYTES
        self.inserted_at = b""
        self._tail = b""

    def stamp(self, inserted_at: bytes) -> None:
        """Note when it came into its table."""
        self.inserted_at = inserted_at
        self._tail = b"".join(
            (_INSERTED_AT, varint(len(inserted_at)), inserted_at, _TRAJECTORY, varint(len(self.trajectory)))
        )

    def encode(self) -> bytes:
        """Return its PrioritizedItem."""
        return b"".join(self._parts())

    def _parts(self) -> tuple[bytes, ...]:
        times = varint(self.times_sampled)
        return (self._head, _DOUBLE.pack(self.priority), _TIMES_SAMPLED, times, self._tail, self.trajectory)


class Sample:
    """One draw of an item, as it was at that moment.

    Attributes:
        info: its SampleInfo, as a field of a SampleEntry.
        chunks: of the item.
        num_bytes: of its SampleEntry, unless it is split.
    """

    __slots__ = ("chunks", "info", "num_bytes")

    def __init__(self, item: Item, probability: float, table_size: int, *, rate_limited: bool) -> None:
        """Draw an item.

        Args:
            item: that was drawn, its `times_sampled` counting this draw.
            probability: that it had.
            table_size: items in its table.
            rate_limited: whether the one who asked had to wait for the rate limiter.
        """
        encoded = item.encode()
        parts = (
            _ITEM, varint(len(encoded)), encoded, _PROBABILITY, _DOUBLE.pack(probability), _TABLE_SIZE,
            varint(table_size), _RATE_LIMITED if rate_limited else b"",
        )  # fmt: skip
        body = b"".join(parts)
        self.info = b"".join((_INFO, varint(len(body)), body))
        self.chunks = item.chunks
        self.num_bytes = len(self.info) + item.data_bytes + len(_END)


def encode_responses(samples: Iterable[Sample]) -> Iterator[bytes]:
    """Return SampleStreamResponses with these samples, each of a size that is worth a message."""
    parts: list[bytes] = []
    num_bytes = 0
    for sample in samples:
        if sample.num_bytes > _MAX_ENTRY_BYTES:
            if parts:
                yield b"".join(parts)
                parts, num_bytes = [], 0
            yield from _split(sample)
            continue
        parts += _ENTRY, varint(sample.num_bytes), sample.info
        parts += [chunk.encoded for chunk in sample.chunks]
        parts.append(_END)
        num_bytes += sample.num_bytes
        if num_bytes >= _RESPONSE_BYTES:
            yield b"".join(parts)
            parts, num_bytes = [], 0
    if parts:
        yield b"".join(parts)


def _split(sample: Sample) -> Iterator[bytes]:
    """Return responses with one entry each, which are one sample together."""
    fields: list[Any] = [sample.info]
    num_bytes = 0
    for chunk in sample.chunks:
        if num_bytes and num_bytes + len(chunk.encoded) > _MAX_ENTRY_BYTES:
            yield _response(fields)
            fields, num_bytes = [], 0
        fields.append(chunk.encoded)
        num_bytes += len(chunk.encoded)
    yield _response([*fields, _END])


def _response(fields: list[bytes]) -> bytes:
    return b"".join((_ENTRY, varint(sum(map(len, fields))), *fields))
