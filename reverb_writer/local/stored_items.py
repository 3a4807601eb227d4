"""The items of a server, and their encoding as samples.

A sample consists of the item's own bytes, which never change, the bytes of its chunks, and a tail of fixed width with
the numbers of the draw. The tails of all samples of a response are made at once:

    entry = item's head | chunk | chunk | ... | tail: priority, times sampled, probability, size of the table

Head and tail both have a SampleInfo that contains a PrioritizedItem; every protobuf parser merges the two. A varint may
be padded, so numbers of any size have the same width.

Source: Reverb 0.14 (`reverb_service.proto`, `schema.proto`); protobuf's encoding guide.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from reverb_writer.local.chunk_store import Chunk
from reverb_writer.local.read_items import Slices
from reverb_writer.protocol.messages import Timestamp
from reverb_writer.protocol.responses import Samples
from reverb_writer.protocol.tensors import varint
from reverb_writer.protocol.trajectory_parsing import ItemLayout, Parsed

_KEY, _TABLE, _PRIORITY, _TIMES_SAMPLED = b"\x08", b"\x12", b"\x29", b"\x30"  # fields 1, 2, 5, 6 of a PrioritizedItem
_INSERTED_AT, _TRAJECTORY = b"\x3a", b"\x42"  # and fields 7, 8
_ITEM, _PROBABILITY, _TABLE_SIZE, _RATE_LIMITED = b"\x0a", b"\x11", b"\x18", b"\x20"  # fields 1 to 4 of a SampleInfo
_INFO, _END = b"\x0a", b"\x18\x01"  # fields 1 and 3 of a SampleEntry
_ENTRY = b"\x0a"  # field 1 of a SampleStreamResponse
_RESPONSE_BYTES = 1 << 20
_MAX_ENTRY_BYTES = 64 << 20  # messages of gRPC have at most 2 GB
# Approximate memory of an item's objects without its trajectory, and of each parsed slice of the trajectory.
_ITEM_BYTES, _SLICE_BYTES = 830, 170
_DOUBLE = struct.Struct("<d")

# A tail: tag and length of the info, tag and length of the item, and the fields. Varints have five bytes of 7 bits.
_TAIL = np.dtype(
    [
        ("tags", "V5"),  # info, its length, item, its length, priority
        ("priority", "<f8"),
        ("times_tag", "V1"),
        ("times", "u1", 5),
        ("probability_tag", "V1"),
        ("probability", "<f8"),
        ("size_tag", "V1"),
        ("size", "u1", 5),
        ("limited_tag", "V1"),
        ("limited", "u1"),
        ("end", "V2"),
    ]
)
_SHIFTS = np.arange(0, 35, 7, dtype=np.uint64)
_MORE = np.array([0x80] * 4 + [0], np.uint8)


def _tail_template() -> npt.NDArray[Any]:
    item_bytes = 1 + 8 + 1 + 5
    info_bytes = 2 + item_bytes + 1 + 8 + 1 + 5 + 1 + 1
    template = np.zeros((), _TAIL)
    template["tags"] = b"".join((_INFO, bytes([info_bytes]), _ITEM, bytes([item_bytes]), _PRIORITY))
    template["times_tag"], template["probability_tag"], template["size_tag"] = _TIMES_SAMPLED, _PROBABILITY, _TABLE_SIZE
    template["limited_tag"], template["end"] = _RATE_LIMITED, _END
    return template


_TEMPLATE = _tail_template()


class SharedChunks:
    """The common data of some items of one table, and the chunks to which these items refer.

    Attributes:
        table: name of the table.
        layout: layout of the items' columns.
        chunks: each chunk once, in the order of the items' references.
        num_items: number of the items, including waiting items; the table counts them.
        num_stored: number of the items in the table; the table counts them.
        item_bytes: memory of an item, without its chunks.
        sample_bytes: approximate size of a sample of an item in a response.
    """

    __slots__ = ("chunks", "item_bytes", "layout", "num_items", "num_stored", "sample_bytes", "table")

    def __init__(
        self,
        table: str,
        layout: ItemLayout,
        chunks: Sequence[Chunk],
        num_items: int,
        trajectory_bytes: int,
        num_slices: int,
    ) -> None:
        """Take the chunks of items with `num_slices` slices each, none of which is in the table yet."""
        self.table, self.layout, self.chunks = table, layout, chunks
        self.num_items, self.num_stored = num_items, 0
        self.item_bytes = trajectory_bytes + _ITEM_BYTES + _SLICE_BYTES * num_slices
        self.sample_bytes = sum([len(chunk.encoded) for chunk in chunks]) + trajectory_bytes + _TAIL.itemsize


class Item:
    """The data of an item: slices of chunks.

    Attributes:
        key: random, unsigned 64 bits.
        priority: priority at insertion; `ItemRows` has the present one.
        shared: its chunks, its table and its layout.
        inserted_at: time of its insertion, in nanoseconds since 1970; 0 before.
    """

    __slots__ = ("_parts", "_slices", "_trajectory", "inserted_at", "key", "priority", "shared")

    def __init__(self, key: int, priority: float, trajectory: bytes, slices: Slices, shared: SharedChunks) -> None:
        """Make an item that is in no table yet; `trajectory` is a FlatTrajectory, `slices` its parsed slices."""
        self.key, self.priority, self.shared = key, priority, shared
        self._trajectory, self._slices = trajectory, slices
        self.inserted_at = 0
        self._parts: tuple[bytes, ...] = ()

    @property
    def flat_trajectory(self) -> Parsed:
        """The rows of its chunks, for readers in this process."""
        return self.shared.layout, self._slices

    def encode(self, priority: float, times_sampled: int) -> bytes:
        """Return its PrioritizedItem."""
        numbers = (_PRIORITY, _DOUBLE.pack(priority), _TIMES_SAMPLED, varint(times_sampled))
        return b"".join((*self._constant(), *numbers))

    def head(self) -> bytes:
        """Return the part of its SampleInfo that does not change."""
        constant = b"".join(self._constant())
        return b"".join((_ITEM, varint(len(constant)), constant))

    def parts(self) -> tuple[bytes, ...]:
        """Return a field of a response, a SampleEntry without its tail; the parts are kept for the next sample."""
        if not self._parts:
            head = self.head()
            info = b"".join((_INFO, varint(len(head)), head))
            data = [chunk.encoded for chunk in self.shared.chunks]
            num_bytes = len(info) + sum(map(len, data)) + _TAIL.itemsize
            self._parts = (b"".join((_ENTRY, varint(num_bytes), info)), *data)
        return self._parts

    @property
    def info(self) -> Item:
        """The item itself, which has the fields of a SampleInfo that readers in this process need."""
        return self

    item = info

    @property
    def data(self) -> list[bytes]:
        """The ChunkData of its chunks."""
        return [chunk.data for chunk in self.shared.chunks]

    def _constant(self) -> tuple[bytes, ...]:
        """Return the fields of its PrioritizedItem that do not change."""
        name = self.shared.table.encode()
        seconds, nanos = divmod(self.inserted_at, 1_000_000_000)
        inserted_at = Timestamp(seconds=seconds, nanos=nanos).SerializeToString()
        return (
            _KEY, varint(self.key), _TABLE, varint(len(name)), name, _INSERTED_AT, varint(len(inserted_at)),
            inserted_at, _TRAJECTORY, varint(len(self._trajectory)), self._trajectory,
        )  # fmt: skip


def encode_responses(samples: Samples, *, rate_limited: bool) -> Iterator[bytes]:
    """Return SampleStreamResponses with these samples, of a reasonable size each.

    `rate_limited` is whether the request had to wait for the rate limiter.
    """
    parts: list[bytes] = []
    num_bytes = 0
    for item, tail in zip(samples, _tails(samples, rate_limited), strict=True):
        is_large = item.shared.sample_bytes > _MAX_ENTRY_BYTES
        if parts and (is_large or num_bytes >= _RESPONSE_BYTES):
            yield b"".join(parts)
            parts, num_bytes = [], 0
        if is_large:
            yield from _split(item, tail)
        else:
            parts += [*item.parts(), tail]
            num_bytes += item.shared.sample_bytes
    if parts:
        yield b"".join(parts)


def _tails(samples: Samples, rate_limited: bool) -> list[bytes]:
    """Return the tail of each sample."""
    tails = np.repeat(_TEMPLATE, len(samples))
    tails["priority"], tails["probability"], tails["limited"] = samples.priorities, samples.probabilities, rate_limited
    numbers = np.array([samples.times_sampled, samples.table_sizes], np.uint64)
    digits = (numbers[:, :, None] >> _SHIFTS & 0x7F).astype(np.uint8) | _MORE
    tails["times"], tails["size"] = digits
    found: list[bytes] = tails.view(f"V{_TAIL.itemsize}").tolist()
    return found


def _split(item: Item, tail: bytes) -> Iterator[bytes]:
    """Return responses with one entry each, which together are one sample; the first response has its numbers."""
    head = item.head()
    fields: list[bytes] = [_INFO, varint(len(head)), head, tail[: -len(_END)]]
    num_bytes = 0
    for chunk in item.shared.chunks:
        if num_bytes and num_bytes + len(chunk.encoded) > _MAX_ENTRY_BYTES:
            yield _response(fields)
            fields, num_bytes = [], 0
        fields.append(chunk.encoded)
        num_bytes += len(chunk.encoded)
    yield _response([*fields, _END])


def _response(fields: list[bytes]) -> bytes:
    return b"".join((_ENTRY, varint(sum(map(len, fields))), *fields))
