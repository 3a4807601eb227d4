"""The items of a server, and how they go out as samples.

A sample's bytes are the item's own, which never change, those of its chunks, and a tail of fixed width with the numbers
of the draw. The tails of all samples of a response are made at once:

    entry = item's head | chunk | chunk | ... | tail: priority, times sampled, probability, size of the table

Both head and tail have a SampleInfo with a PrioritizedItem in it: every protobuf parser merges the two. A varint may be
padded, so numbers of any size have one width.

Source: Reverb 0.14 (`reverb_service.proto`, `schema.proto`); protobuf's encoding guide.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from reverb_writer.local.chunk_store import Chunk
from reverb_writer.protocol.tensors import varint

_KEY, _TABLE, _PRIORITY, _TIMES_SAMPLED = b"\x08", b"\x12", b"\x29", b"\x30"  # fields 1, 2, 5, 6 of a PrioritizedItem
_INSERTED_AT, _TRAJECTORY = b"\x3a", b"\x42"  # and fields 7, 8
_ITEM, _PROBABILITY, _TABLE_SIZE, _RATE_LIMITED = b"\x0a", b"\x11", b"\x18", b"\x20"  # fields 1 to 4 of a SampleInfo
_INFO, _END = b"\x0a", b"\x18\x01"  # fields 1 and 3 of a SampleEntry
_ENTRY = b"\x0a"  # field 1 of a SampleStreamResponse
_RESPONSE_BYTES = 1 << 20
_MAX_ENTRY_BYTES = 64 << 20  # gRPC's messages end at 2 GB
_ITEM_BYTES = 700  # what the objects that belong to an item take beside its trajectory, roughly
_DOUBLE = struct.Struct("<d")

# A tail: tag and length of the info, tag and length of the item, and the fields. Varints have five bytes, of 7 bits.
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


class Item:
    """What is sampled: slices of chunks.

    Attributes:
        key: random, unsigned 64 bits.
        table: its name.
        priority: that it has now.
        times_sampled: how often it went out.
        chunks: that its trajectory names, each once, in the order in which it names them.
        num_bytes: memory that it takes, without its chunks.
        sampled: once it is stamped, the parts of a sample's bytes but for the tail.
        entry_bytes: of a sample's SampleEntry, unless it is split; likewise.
    """

    __slots__ = (
        "_trajectory",
        "chunks",
        "entry_bytes",
        "key",
        "num_bytes",
        "num_constant",
        "priority",
        "sampled",
        "table",
        "times_sampled",
    )

    def __init__(self, key: int, table: str, priority: float, chunks: Sequence[Chunk], trajectory: bytes) -> None:
        """Make an item that is in no table yet; `trajectory` is a FlatTrajectory."""
        self.key, self.table, self.priority = key, table, priority
        self.chunks, self._trajectory = chunks, trajectory
        self.times_sampled = 0
        self.num_bytes = len(trajectory) + _ITEM_BYTES
        self.sampled: tuple[bytes, ...] = ()
        self.entry_bytes = self.num_constant = 0

    def stamp(self, inserted_at: bytes) -> None:
        """Note when it came into its table, a Timestamp as bytes."""
        name, trajectory = self.table.encode(), self._trajectory
        constant = b"".join(
            (
                _KEY, varint(self.key), _TABLE, varint(len(name)), name, _INSERTED_AT, varint(len(inserted_at)),
                inserted_at, _TRAJECTORY, varint(len(trajectory)), trajectory,
            )
        )  # fmt: skip
        self.num_constant = len(constant)
        length = varint(len(constant))
        info = b"".join((_INFO, varint(1 + len(length) + len(constant)), _ITEM, length, constant))
        data = [chunk.encoded for chunk in self.chunks]
        self.entry_bytes = len(info) + sum(map(len, data)) + _TAIL.itemsize
        self.sampled = (b"".join((_ENTRY, varint(self.entry_bytes), info)), *data)
        self._trajectory = b""

    def encode(self) -> bytes:
        """Return its PrioritizedItem."""
        constant = self.sampled[0][-self.num_constant :]
        return b"".join((constant, _PRIORITY, _DOUBLE.pack(self.priority), _TIMES_SAMPLED, varint(self.times_sampled)))


class Draws:
    """Items that were drawn, one after the other, with the numbers that they had then.

    Attributes:
        items: that were drawn.
        rate_limited: whether the one who asked had to wait for the rate limiter.
    """

    def __init__(self) -> None:
        """Begin without any."""
        self.items: list[Item] = []
        self.rate_limited = False
        self._priorities: list[float] = []
        self._times: list[int] = []
        self._probabilities: list[float] = []
        self._sizes: list[int] = []

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self.items)

    def add(self, items: Sequence[Item], times: Sequence[int], probabilities: Sequence[float], table_size: int) -> None:
        """Add draws.

        Args:
            items: that were drawn.
            times: how often each was drawn, this time included.
            probabilities: that each had.
            table_size: items in their table.
        """
        self.items += items
        self._priorities += [item.priority for item in items]
        self._times += times
        self._probabilities += probabilities
        self._sizes += [table_size] * len(items)

    def tails(self) -> list[bytes]:
        """Return the tail of each."""
        tails = np.repeat(_TEMPLATE, len(self.items))
        tails["priority"], tails["probability"], tails["limited"] = (
            self._priorities,
            self._probabilities,
            self.rate_limited,
        )
        numbers = np.array((self._times, self._sizes), np.uint64)
        tails["times"], tails["size"] = (numbers[:, :, None] >> _SHIFTS & 0x7F).astype(np.uint8) | _MORE
        found: list[bytes] = tails.view(f"V{_TAIL.itemsize}").tolist()
        return found


def encode_responses(draws: Draws) -> Iterator[bytes]:
    """Return SampleStreamResponses with these samples, each of a size that is worth a message."""
    parts: list[bytes] = []
    num_bytes = 0
    for item, tail in zip(draws.items, draws.tails(), strict=True):
        if item.entry_bytes > _MAX_ENTRY_BYTES:
            if parts:
                yield b"".join(parts)
                parts, num_bytes = [], 0
            yield from _split(item, tail)
            continue
        parts += item.sampled
        parts.append(tail)
        num_bytes += item.entry_bytes
        if num_bytes >= _RESPONSE_BYTES:
            yield b"".join(parts)
            parts, num_bytes = [], 0
    if parts:
        yield b"".join(parts)


def _split(item: Item, tail: bytes) -> Iterator[bytes]:
    """Return responses with one entry each, which are one sample together; the first one has its numbers."""
    head, *data = item.sampled
    info = head[-(item.num_constant + len(varint(item.num_constant)) + 1) :]
    info = b"".join((_INFO, varint(len(info)), info))
    fields: list[bytes] = [info, tail[: -len(_END)]]
    num_bytes = 0
    for chunk in data:
        if num_bytes and num_bytes + len(chunk) > _MAX_ENTRY_BYTES:
            yield _response(fields)
            fields, num_bytes = [], 0
        fields.append(chunk)
        num_bytes += len(chunk)
    yield _response([*fields, _END])


def _response(fields: list[bytes]) -> bytes:
    return b"".join((_ENTRY, varint(sum(map(len, fields))), *fields))
