"""Many windows to the bytes of many items, without a Python object per item.

An item lists the slices of chunks that form its columns. Items of one table that touch the same number of chunks differ
only in numbers, and protobuf accepts varints that are padded with continuation bytes to a fixed width. So their bytes
are copies of a template with fixed offsets, in which a few columns of bytes are overwritten:

    InsertStreamRequest.items
    └── PrioritizedItem    key, table, priority
        └── flat_trajectory
            └── columns             one per leaf of the step; they differ only in `index`
                └── chunk_slices    one per chunk that the window touches: chunk_key, offset, length, index

`decode_items` is the inverse, for a server in Python: it reads the columns of bytes, encodes the numbers again, and
compares.

Pure functions of arrays: thread-safe, no I/O. Source: reverb/cc/schema.proto; protobuf's encoding guide.
"""

from __future__ import annotations

import functools
import itertools
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from reverb_writer.protocol import tensors
from reverb_writer.protocol.tensors import LeafEncoder, varint

KEY_LIMIT = 1 << 63
"""Keys must be below this limit, so that a key is a varint of at most nine bytes."""

KEY_BITS = 62
"""Bits of a random first key, so that the keys counted up from it are below `KEY_LIMIT`."""

MAX_CHUNK_LENGTH = (1 << 14) - 1
"""Maximum number of steps in a chunk: offsets and lengths take two bytes as varints."""

_KEY_WIDTH = 9
_DOUBLE = struct.Struct("<d")
_SHIFTS = np.arange(0, 7 * _KEY_WIDTH, 7, dtype=np.uint64)
_MARKS = np.array([128] * (_KEY_WIDTH - 1) + [0], np.uint8)  # set in all bytes of a varint except the last

# Tags: field number << 3 | wire type (0 varint, 1 eight bytes, 2 length and bytes).
_REQUEST_CHUNKS, _REQUEST_ITEMS = b"\x0a", b"\x12"
_ITEM_KEY, _ITEM_TABLE, _ITEM_PRIORITY, _ITEM_TRAJECTORY = b"\x08", b"\x12", b"\x29", b"\x42"
_TRAJECTORY_COLUMNS, _COLUMN_SLICES, _COLUMN_SQUEEZE = b"\x0a", b"\x0a", b"\x10\x01"
_SLICE_KEY, _SLICE_OFFSET, _SLICE_LENGTH, _SLICE_INDEX = b"\x08", b"\x10", b"\x18", b"\x20"
_CHUNK_KEY, _CHUNK_RANGE, _CHUNK_DATA, _CHUNK_NUM_TENSORS = b"\x08", b"\x12", b"\x2a", b"\x30"
_CHUNK_UNCOMPRESSED_SIZE = b"\x38"
_RANGE_EPISODE, _RANGE_START, _RANGE_END = b"\x08", b"\x10", b"\x18"
_DATA_TENSORS = b"\x0a"


def encode_slices(
    chunk_keys: npt.NDArray[np.uint64],
    touched: npt.NDArray[np.int64],
    offsets: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64],
) -> npt.NDArray[Any]:
    """Encode the slices of n windows in c chunks, m slices per window: [n, m], for `encode_items`.

    Args:
        chunk_keys: [c] keys of the chunks, below `KEY_LIMIT`.
        touched: [n, m] indices into `chunk_keys`, in the order of the chunks' steps.
        offsets: [n, m] first used step of each chunk.
        lengths: [n, m] number of used steps of each chunk, >= 1; `offsets + lengths` is at most `MAX_CHUNK_LENGTH`.
    """
    whole = np.zeros(len(chunk_keys), _SLICE)
    whole["key"] = _varints(chunk_keys, _KEY_WIDTH).view(_SLICE["key"])[:, 0]
    whole["offset_tag"], whole["length_tag"] = _SLICE_OFFSET[0], _SLICE_LENGTH[0]
    as_one = np.dtype((np.void, _SLICE.itemsize))  # NumPy copies a record field by field
    slices = whole.view(as_one)[touched]
    records = slices.view(_SLICE)
    records["offset"] = _STEP_VARINTS[offsets]
    records["length"] = _STEP_VARINTS[lengths]
    return slices


def encode_items(
    table: str,
    keys: npt.NDArray[np.uint64],
    priorities: npt.NDArray[np.float64],
    slices: npt.NDArray[Any],
    num_columns: int,
) -> npt.NDArray[np.uint8]:
    """Encode n items of one table, each of which touches m chunks.

    Args:
        table: the table's name.
        keys: [n] item keys, below `KEY_LIMIT`.
        priorities: [n], finite and >= 0.
        slices: [n, m], from `encode_slices`.
        num_columns: leaves of the step, >= 1. Column i consists of slices of the chunks' tensors at index i.

    Returns:
        [n, size] bytes: each row is one `items` field of an InsertStreamRequest. Rows and results of `encode_chunk`,
        concatenated in any order, are a request.
    """
    n, m = slices.shape
    template = _item_template(table, m, num_columns)
    rows = np.empty((n, template.item.size), np.uint8)
    rows[:] = template.item
    rows[:, template.key_at : template.key_at + _KEY_WIDTH] = _varints(keys, _KEY_WIDTH)
    rows[:, template.priority_at : template.priority_at + 8] = priorities.astype("<f8").view(np.uint8).reshape(n, 8)
    strides = (rows.strides[0], template.column_size, template.slice_size)
    np.ndarray((n, num_columns, m), slices.dtype, rows, template.numbers_at, strides)[:] = slices[:, None]
    return rows


class DecodedItems(NamedTuple):
    """n items of one table, each of which touches m chunks; their columns are the chunks' tensors 0, 1, ..."""

    keys: npt.NDArray[np.uint64]  # [n]
    priorities: npt.NDArray[np.float64]  # [n]
    chunk_keys: npt.NDArray[np.uint64]  # [n, m]
    offsets: npt.NDArray[np.int64]  # [n, m] first used step of each chunk
    lengths: npt.NDArray[np.int64]  # [n, m] number of used steps of each chunk
    trajectory_at: int  # offset of the FlatTrajectory in each item


def decode_items(items: Sequence[bytes], table: str, num_slices: int, num_columns: int) -> DecodedItems | None:
    """Decode PrioritizedItems of one size from `encode_items`; return None if any has another form.

    `table`, `num_slices` and `num_columns` are those of the first item. Items have no tag and length of the request's
    field.
    """
    template = _item_template(table, num_slices, num_columns)
    begin = template.key_at - len(_ITEM_KEY)
    n, size = len(items), template.item.size - begin
    if len(items[0]) != size:
        return None
    data = b"".join(items)
    rows = np.frombuffer(data, np.uint8).reshape(n, size)
    keys = _numbers(rows[:, len(_ITEM_KEY) : len(_ITEM_KEY) + _KEY_WIDTH])
    priority_at = template.priority_at - begin
    priorities = rows[:, priority_at : priority_at + 8].copy().view("<f8")[:, 0]
    shape, strides = (n, num_slices, _SLICE.itemsize), (size, template.slice_size, 1)
    slices: npt.NDArray[np.uint8] = np.ndarray(shape, np.uint8, data, template.numbers_at - begin, strides)
    chunk_keys = _numbers(slices[..., :_KEY_WIDTH])
    offsets, lengths = (_numbers(slices[..., at : at + 2]).astype(np.int64) for at in _STEPS_AT)
    every = np.arange(chunk_keys.size).reshape(chunk_keys.shape)
    again = encode_slices(chunk_keys.ravel(), every, offsets, lengths)
    if not (lengths >= 1).all() or not np.array_equal(
        encode_items(table, keys, priorities, again, num_columns)[:, begin:], rows
    ):
        return None
    start = len(template.item) - begin - template.trajectory_bytes
    return DecodedItems(keys, priorities.astype(np.float64, copy=False), chunk_keys, offsets, lengths, start)


def encode_whole_chunks(chunk_key: int, lengths: Sequence[int], is_single: Sequence[bool]) -> bytes:
    """Encode the trajectory of an item whose columns are the tensors of one chunk: column i is tensor i, whole.

    Args:
        chunk_key: below `KEY_LIMIT`.
        lengths: per column, the number of its rows, >= 1.
        is_single: per column, whether it is one value without the axis of the rows.
    """
    key = _SLICE_KEY + varint.__wrapped__(chunk_key)
    columns = map(_whole_column, itertools.repeat(len(key)), itertools.count(), lengths, is_single)
    return b"".join([part for head, tail in columns for part in (head, key, tail)])


def encode_one_item(table: str, key: int, priority: float, trajectory: bytes) -> bytes:
    """Encode one item with a trajectory of `encode_whole_chunks`, as one `items` field of an InsertStreamRequest.

    `key` is below `KEY_LIMIT`; `priority` is finite and >= 0.
    """
    encoded_key, name = varint.__wrapped__(key), table.encode()
    fields = (
        *(_ITEM_KEY, encoded_key, _ITEM_TABLE, varint(len(name)), name, _ITEM_PRIORITY, _DOUBLE.pack(priority)),
        *(_ITEM_TRAJECTORY, varint(len(trajectory)), trajectory),
    )
    return b"".join((_REQUEST_ITEMS, varint(sum(map(len, fields))), *fields))


@functools.lru_cache(maxsize=65_536)
def _whole_column(key_bytes: int, index: int, length: int, is_single: bool) -> tuple[bytes, bytes]:
    """Return a column of one slice without the encoded key of its chunk: what is before the key, and after it."""
    tail = _SLICE_LENGTH + varint(length) + (_SLICE_INDEX + varint(index) if index else b"")
    squeeze = _COLUMN_SQUEEZE if is_single else b""
    slices = _COLUMN_SLICES + varint(key_bytes + len(tail))
    head = _TRAJECTORY_COLUMNS + varint(len(slices) + key_bytes + len(tail) + len(squeeze)) + slices
    return head, tail + squeeze


def encode_chunk(
    key: int,
    episode_id: int,
    start: int,
    columns: Sequence[npt.NDArray[Any]],
    spec: bytes = b"",
    kinds: npt.NDArray[np.uint8] | None = None,
    encoders: Sequence[LeafEncoder] = (),
) -> bytes:
    """Encode a chunk of the same steps of all columns [length, ...], as one `chunks` field of an InsertStreamRequest.

    `key` is below `KEY_LIMIT`. `episode_id` is unsigned 64-bit; servers count episodes by it. `start` is the index of
    the first step in its episode, < 2**31. The `spec`, a `spec_tensor` or empty, becomes the last tensor and is not
    counted as data. The `kinds` of the rows, [length], become the tensor before it, if the spec has their mark. With
    `encoders`, one per column, columns that do not shrink are mostly stored uncompressed.
    """
    parts: list[Any] = []
    size = 0
    hidden = () if kinds is None else (kinds,)
    for number, column in enumerate((*columns, *hidden)):
        header, encode_content = tensors.encoder(column.dtype, column.shape)
        content = encoders[number].parts(column, encode_content) if encoders else (encode_content(column),)
        content_bytes = sum(map(len, content))
        num_bytes = varint(content_bytes)
        parts += (_DATA_TENSORS, varint(len(header) + len(num_bytes) + content_bytes), header, num_bytes, *content)
        size += column.nbytes
    if spec:
        parts += _DATA_TENSORS, varint(len(spec)), spec
    num_data_bytes = sum(map(len, parts))
    last = start + len(columns[0]) - 1
    steps = b"".join((_RANGE_EPISODE, varint(episode_id), _RANGE_START, varint(start), _RANGE_END, varint(last)))
    encoded_key = varint.__wrapped__(key)  # random keys would evict the lengths from the cache
    head = _CHUNK_KEY, encoded_key, _CHUNK_RANGE, varint(len(steps)), steps, _CHUNK_DATA, varint(num_data_bytes)
    tail = _CHUNK_NUM_TENSORS, varint(len(columns) + len(hidden) + bool(spec)), _CHUNK_UNCOMPRESSED_SIZE, varint(size)
    num_bytes = varint(sum(map(len, (*head, *tail))) + num_data_bytes)
    return b"".join((_REQUEST_CHUNKS, num_bytes, *head, *parts, *tail))  # one copy of the contents


def _delimited(tag: bytes, body: bytes) -> bytes:
    return b"".join((tag, varint(len(body)), body))


def _varints(numbers: npt.NDArray[np.integer[Any]], width: int) -> npt.NDArray[np.uint8]:
    """Encode each number, below `1 << 7 * width`, as a varint of exactly `width` bytes: [...] -> [..., width]."""
    groups = numbers.astype(np.uint64, copy=False)[..., None] >> _SHIFTS[:width]
    return groups.astype(np.uint8) | _MARKS[-width:]


def _numbers(varints: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint64]:
    """Decode varints of one width: [..., width] -> [...]."""
    groups = (varints & 0x7F).astype(np.uint64) << _SHIFTS[: varints.shape[-1]]
    numbers: npt.NDArray[np.uint64] = groups.sum(-1, dtype=np.uint64)
    return numbers


_STEP_VARINTS = _varints(np.arange(MAX_CHUNK_LENGTH + 1), 2).view(np.uint16)[:, 0]
_SLICE = np.dtype(  # the numbers of a slice: its bytes after the first tag
    [("key", f"V{_KEY_WIDTH}"), ("offset_tag", "u1"), ("offset", "u2"), ("length_tag", "u1"), ("length", "u2")]
)
_STEPS_AT = _KEY_WIDTH + 1, _KEY_WIDTH + 4  # positions of offset and length in these bytes


class _ItemTemplate(NamedTuple):
    """The encoding of items of one table and number of slices, with offsets."""

    item: npt.NDArray[np.uint8]
    key_at: int
    priority_at: int
    numbers_at: int  # of the first slice
    column_size: int
    slice_size: int
    trajectory_bytes: int


@functools.lru_cache(maxsize=256)
def _item_template(table: str, num_slices: int, num_columns: int) -> _ItemTemplate:
    """Return the bytes of an item whose numbers are 0, and the offsets of the numbers."""
    key, step = b"\x80" * (_KEY_WIDTH - 1) + b"\0", b"\x80\0"
    numbers = key + _SLICE_OFFSET + step + _SLICE_LENGTH + step + _SLICE_INDEX
    # All columns have the same length, so that they have one stride.
    indices = _varints(np.arange(num_columns), 1 if num_columns <= 128 else 2)  # noqa: PLR2004  # one byte up to 127
    parts = [_delimited(_COLUMN_SLICES, _SLICE_KEY + numbers + index.tobytes()) for index in indices]
    columns = [_delimited(_TRAJECTORY_COLUMNS, part * num_slices) for part in parts]
    trajectory = b"".join(columns)
    head = _ITEM_KEY + key + _delimited(_ITEM_TABLE, table.encode()) + _ITEM_PRIORITY
    body = head + bytes(8) + _delimited(_ITEM_TRAJECTORY, trajectory)
    item = _delimited(_REQUEST_ITEMS, body)
    base = len(item) - len(body)
    return _ItemTemplate(
        np.frombuffer(item, np.uint8),
        key_at=base + len(_ITEM_KEY),
        priority_at=base + len(head),
        numbers_at=len(item) - len(trajectory) + columns[0].index(numbers),
        column_size=len(columns[0]),
        slice_size=len(parts[0]),
        trajectory_bytes=len(trajectory),
    )
