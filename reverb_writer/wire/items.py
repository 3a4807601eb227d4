"""Many windows -> the bytes of many items, without an object for any of them.

An item names the slices of chunks that its columns are made of. Items of one table whose windows touch equally many
chunks differ only in numbers, and protobuf lets a varint be padded with continuation bytes to a fixed width. So their
bytes are one template with fixed offsets, repeated, with a few columns of bytes written over:

    InsertStreamRequest.items
    └── PrioritizedItem    key, table, priority
        └── flat_trajectory
            └── columns             one a leaf of the step, all alike but for `index`
                └── chunk_slices    one a chunk that the window touches: chunk_key, offset, length, index

Pure functions of arrays: thread-safe, no I/O. Source: reverb/cc/schema.proto; protobuf's encoding guide.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from reverb_writer.wire import tensors
from reverb_writer.wire.tensors import varint

__all__ = ["KEY_LIMIT", "MAX_CHUNK_LENGTH", "encode_chunk", "encode_items", "encode_keep_keys"]

KEY_LIMIT = 1 << 63
"""Keys are drawn below this, so that nine bytes hold one as a varint."""

MAX_CHUNK_LENGTH = (1 << 14) - 1
"""Steps in a chunk: offsets and lengths take two bytes."""

_KEY_WIDTH = 9
_STEP_WIDTH = 2
_SHIFTS = np.arange(0, 7 * _KEY_WIDTH, 7, dtype=np.uint64)
_SLICE_NUMBERS = _KEY_WIDTH + 2 * (1 + _STEP_WIDTH)

# Tags: field number << 3 | wire type (0 varint, 1 eight bytes, 2 length and bytes).
_REQUEST_CHUNKS, _REQUEST_ITEMS, _REQUEST_KEEP_KEYS = b"\x0a", b"\x12", b"\x1a"
_ITEM_KEY, _ITEM_TABLE, _ITEM_PRIORITY, _ITEM_TRAJECTORY = b"\x08", b"\x12", b"\x29", b"\x42"
_TRAJECTORY_COLUMNS, _COLUMN_SLICES, _COLUMN_SQUEEZE = b"\x0a", b"\x0a", b"\x10"
_SLICE_KEY, _SLICE_OFFSET, _SLICE_LENGTH, _SLICE_INDEX = b"\x08", b"\x10", b"\x18", b"\x20"
_CHUNK_KEY, _CHUNK_RANGE, _CHUNK_DATA, _CHUNK_NUM_TENSORS = b"\x08", b"\x12", b"\x2a", b"\x30"
_CHUNK_UNCOMPRESSED_SIZE = b"\x38"
_RANGE_EPISODE, _RANGE_START, _RANGE_END = b"\x08", b"\x10", b"\x18"
_DATA_TENSORS = b"\x0a"


def encode_items(
    table: str,
    keys: npt.NDArray[np.uint64],
    priorities: npt.NDArray[np.float64],
    chunk_keys: npt.NDArray[np.uint64],
    offsets: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64],
    num_columns: int,
    *,
    squeeze: bool = False,
) -> npt.NDArray[np.uint8]:
    """Encode n items of one table whose windows touch m chunks each.

    Every item has `num_columns` columns; column i is made of the tensors at index i of the chunks.

    Args:
        table: the table's name.
        keys: [n] item keys, below `KEY_LIMIT`.
        priorities: [n], finite and >= 0.
        chunk_keys: [n, m] keys of the chunks, in the order of their steps, below `KEY_LIMIT`.
        offsets: [n, m] first step used of each chunk.
        lengths: [n, m] number of steps used of each chunk, >= 1; `offsets + lengths` is at most `MAX_CHUNK_LENGTH`.
        num_columns: leaves of the step, >= 1.
        squeeze: whether readers drop the time dimension (for columns of one row).

    Returns:
        [n, size] bytes: each row is one `items` field of an InsertStreamRequest. Owned by the caller. Rows put one
        after the other, with `encode_chunk`'s and `encode_keep_keys`'s bytes in any order, are a request.
    """
    n, m = chunk_keys.shape
    layout = _layout(table, m, num_columns, squeeze)
    rows = np.tile(layout.template, (n, 1))
    rows[:, layout.key_at : layout.key_at + _KEY_WIDTH] = _varints(keys, _KEY_WIDTH)
    priority = np.ascontiguousarray(priorities, "<f8").view(np.uint8).reshape(n, 8)
    rows[:, layout.priority_at : layout.priority_at + 8] = priority

    numbers = np.empty((n, m, _SLICE_NUMBERS), np.uint8)
    numbers[:, :, :9] = _varints(chunk_keys, _KEY_WIDTH)
    numbers[:, :, 9] = _SLICE_OFFSET[0]
    numbers[:, :, 10:12] = _varints(offsets, _STEP_WIDTH)
    numbers[:, :, 12] = _SLICE_LENGTH[0]
    numbers[:, :, 13:15] = _varints(lengths, _STEP_WIDTH)
    for block in layout.blocks:
        columns = rows[:, block.start : block.stop].reshape(n, block.num_columns, -1)
        for j in range(m):
            at = block.numbers_at + j * block.slice_size
            columns[:, :, at : at + _SLICE_NUMBERS] = numbers[:, j, None, :]
    return rows


def encode_chunk(
    key: int,
    episode_id: int,
    start: int,
    columns: Sequence[npt.NDArray[Any]],
    layouts: Sequence[tuple[bytes, Callable[[npt.NDArray[Any]], Any]]] | None = None,
) -> bytes:
    """Encode one chunk that holds the same steps of every column.

    Args:
        key: the chunk's key, below `KEY_LIMIT`.
        episode_id: unsigned 64-bit; readers of a table count episodes by it.
        start: index of the first step in its episode, < 2**31.
        columns: arrays [length, ...], one a leaf; read before the call returns, not kept.
        layouts: `tensors.layout` of each column, for callers that encode many alike; None to look them up.

    Returns:
        One `chunks` field of an InsertStreamRequest.
    """
    parts: list[bytes] = []
    size = 0
    if layouts is None:
        layouts = [tensors.layout(column.dtype, column.shape) for column in columns]
    for column, (header, content_of) in zip(columns, layouts, strict=True):
        content = content_of(column)
        num_bytes = varint(len(content))
        parts += _DATA_TENSORS, varint(len(header) + len(num_bytes) + len(content)), header, num_bytes, content
        size += column.nbytes
    data = b"".join(parts)
    last = start + len(columns[0]) - 1
    steps = b"".join((_RANGE_EPISODE, varint(episode_id), _RANGE_START, varint(start), _RANGE_END, varint(last)))
    head = b"".join((_CHUNK_KEY, varint(key), _CHUNK_RANGE, varint(len(steps)), steps, _CHUNK_DATA, varint(len(data))))
    tail = b"".join((_CHUNK_NUM_TENSORS, varint(len(columns)), _CHUNK_UNCOMPRESSED_SIZE, varint(size)))
    return b"".join((_REQUEST_CHUNKS, varint(len(head) + len(data) + len(tail)), head, data, tail))


def encode_keep_keys(keys: Sequence[int]) -> bytes:
    """Encode the keys of the chunks that later items of the stream may still name."""
    if not keys:
        return b""
    return _delimited(_REQUEST_KEEP_KEYS, _varints(np.array(keys, np.uint64), _KEY_WIDTH).tobytes())


def _delimited(tag: bytes, body: bytes) -> bytes:
    return b"".join((tag, varint(len(body)), body))


def _varints(numbers: npt.NDArray[np.integer[Any]], width: int) -> npt.NDArray[np.uint8]:
    """Encode each number as a varint of exactly `width` bytes: [...] -> [..., width]."""
    groups = (numbers.astype(np.uint64, copy=False)[..., None] >> _SHIFTS[:width]).astype(np.uint8)
    groups[..., :-1] |= 128
    groups[..., -1:] &= 127
    return groups


def _column(index: int, num_slices: int, squeeze: bool) -> tuple[bytes, int, int]:
    """Return a column with zeros for numbers, where the first slice's numbers stand, and how far slices are apart."""
    key, step = b"\x80" * (_KEY_WIDTH - 1) + b"\0", b"\x80" * (_STEP_WIDTH - 1) + b"\0"
    body = _SLICE_KEY + key + _SLICE_OFFSET + step + _SLICE_LENGTH + step + _SLICE_INDEX + varint(index)
    part = _delimited(_COLUMN_SLICES, body)
    column = _delimited(_TRAJECTORY_COLUMNS, part * num_slices + (_COLUMN_SQUEEZE + b"\x01" if squeeze else b""))
    return column, column.index(part) + len(part) - len(body) + len(_SLICE_KEY), len(part)


class _Block(NamedTuple):
    """Columns that are equal in size: where they stand in the item, and the numbers in them."""

    start: int
    stop: int
    num_columns: int
    numbers_at: int
    slice_size: int


class _Layout(NamedTuple):
    template: npt.NDArray[np.uint8]
    key_at: int
    priority_at: int
    blocks: list[_Block]


@functools.lru_cache(maxsize=256)
def _layout(table: str, num_slices: int, num_columns: int, squeeze: bool) -> _Layout:
    """Return the bytes of an item with zeros for numbers, and where the numbers stand."""
    columns = [_column(index, num_slices, squeeze) for index in range(num_columns)]
    trajectory = b"".join([column for column, _, _ in columns])
    key = _ITEM_KEY + b"\x80" * (_KEY_WIDTH - 1) + b"\0"
    head = key + _delimited(_ITEM_TABLE, table.encode()) + _ITEM_PRIORITY
    body = head + bytes(8) + _delimited(_ITEM_TRAJECTORY, trajectory)
    item = _delimited(_REQUEST_ITEMS, body)
    base = len(item) - len(body)
    blocks = []
    at = len(item) - len(trajectory)
    # An index takes one byte up to 127, then two.
    for first, last in ((0, min(num_columns, 128)), (128, num_columns)):
        if first < last:
            column, numbers_at, slice_size = columns[first]
            stop = at + (last - first) * len(column)
            blocks.append(_Block(at, stop, last - first, numbers_at, slice_size))
            at = stop
    return _Layout(np.frombuffer(item, np.uint8), base + len(_ITEM_KEY), base + len(head), blocks)
