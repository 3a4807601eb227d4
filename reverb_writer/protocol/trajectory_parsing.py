"""An item's encoded trajectory to integers: the chunks and rows that form each column.

A trajectory lists the chunk slices of every column. Columns that were written together list the same rows of the same
chunks, and differ only in the index of the tensor within the chunk. Such columns form a group, and are looked up and
gathered together. Items of our writers have one group. TF-Agents' writer writes one chunk per column, so its items have
one group per column.

Pure: no I/O. Source: reverb/cc/schema.proto (FlatTrajectory); protobuf's encoding guide.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

from google.protobuf.message import DecodeError

from reverb_writer.errors import FormatError
from reverb_writer.protocol import messages
from reverb_writer.protocol.tensors import varint

Slice = tuple[int, int, int]
"""Chunk key, first row, number of rows."""


class ColumnGroup(NamedTuple):
    """Columns of an item that consist of the same rows of the same chunks."""

    columns: tuple[int, ...]  # indices of the columns in the item
    tensors: tuple[int, ...]  # per column, the index of its tensor in the chunks


class ItemLayout(NamedTuple):
    """The places of an item's columns in chunks. Items of one writer have equal layouts."""

    groups: tuple[ColumnGroup, ...]  # every column is in exactly one group
    is_scalar: tuple[bool, ...]  # per column, whether readers get its only row without the time dimension


_FIELD, _INDEX = b"\x0a", b"\x20"  # tags: field 1, of both columns and slices; a slice's index
_ZERO_INDEX = b"\x20\x00"
_SQUEEZE = b"\x10\x01"
_INDICES = [bytes([index]) for index in range(128)]


Parsed = tuple[ItemLayout, Sequence[Sequence[Slice]]]
"""An item's layout, and the slices of each group."""


def parse_trajectory(flat_trajectory: bytes) -> Parsed:
    """Parse an encoded FlatTrajectory; raise FormatError if it is damaged, has no columns, or a column has no rows."""
    return _parse_one_slice(flat_trajectory) or _parse_uniform(flat_trajectory) or _parse_any(flat_trajectory)


def _parse_one_slice(flat: bytes) -> tuple[ItemLayout, list[list[Slice]]] | None:
    """Parse a trajectory of one slice per column, as in most items of our writers; return None for any other.

    The columns have the same bytes, except for the last byte, which is the index. Our writers send an index of 0 for
    the first column. Reverb sends protobuf's canonical form, without this index.
    """
    size = flat[1] + 2 if len(flat) > 1 and flat[1] < 0x7E else 0  # noqa: PLR2004  # one byte has the length, also with an index
    if not 6 <= size <= len(flat) or flat[3:4] != _INDICES[size - 4] or not flat[:1] == flat[2:3] == _FIELD:  # noqa: PLR2004
        return None
    if flat[size - 2 : size] == _ZERO_INDEX:
        body = flat[4 : size - 2]
        num_columns = min(len(flat) // size, 128)
        expected = flat[: size - 1].join(_index_bytes(num_columns))
    else:
        body = flat[4:size]
        num_columns = min((len(flat) + 2) // (size + 2), 128)
        before_index = b"".join((_FIELD, _INDICES[size], _FIELD, _INDICES[size - 2], body, _INDEX))
        expected = before_index.join([flat[:size], *_index_bytes(num_columns)[2:]])
    if flat != expected:
        return None
    try:
        read = messages.FlatTrajectory.ChunkSlice.FromString(body)
    except DecodeError:
        return None
    key, first, num_rows = read.chunk_key, read.offset, read.length
    if read.index or first < 0 or num_rows < 1:
        return None
    return _uniform_layout(num_columns, is_scalar=False), [[(key, first, num_rows)]]


@functools.cache
def _index_bytes(num_columns: int) -> list[bytes]:
    return [b"", *_INDICES[:num_columns]]


def _parse_uniform(flat: bytes) -> tuple[ItemLayout, list[list[Slice]]] | None:
    """Parse a trajectory whose columns differ only in the index, as in items of our writers; return None for any other.

    The bytes of all columns after the first are computed and compared, which is ten times as fast as parsing.
    """
    if len(flat) < 4 or flat[0] != 0x0A or flat[1] & flat[2] > 0x7F:  # noqa: PLR2004  # not a tag and a length of two bytes or fewer
        return None
    size, start = (flat[1], 2) if flat[1] < 0x80 else (flat[1] - 0x80 + flat[2] * 0x80, 3)  # noqa: PLR2004
    stop = start + size
    # The first column refers to tensor 0. All its slices lack an index (protobuf's canonical form), or all end in an
    # explicit 0 (the form of our writers).
    first_stop = start + 2 + flat[start + 1] if start + 1 < len(flat) else 0
    index_bytes = 2 if flat[first_stop - 2 : first_stop] == _ZERO_INDEX else 0
    added = 2 - index_bytes  # additional bytes of a slice in the other columns
    if stop + 1 < len(flat) and flat[stop + 1] < min(size + added, 0x80):  # the next column has no room for an index
        return None
    column = _split_column(flat[start:stop], index_bytes) if stop <= len(flat) else None
    if column is None:
        return None
    slices, pieces, squeeze = column
    size += added * len(slices)
    head = _FIELD + varint(size)
    others, rest = divmod(len(flat) - stop, len(head) + size)
    if rest or others > 127:  # noqa: PLR2004  # an index of two bytes
        return None
    pieces[0] = head + pieces[0]
    pieces.append(squeeze)
    if others and flat[stop:] != b"".join([index.join(pieces) for index in _INDICES[1 : others + 1]]):
        return None
    return _uniform_layout(others + 1, is_scalar=bool(squeeze)), [slices]


def _split_column(column: bytes, index_bytes: int) -> tuple[list[Slice], list[bytes], bytes] | None:
    """Return a column's slices, its bytes split at the places of the index, and its mark as a scalar.

    Return None if the column is damaged or refers to another tensor than 0.
    """
    slices: list[Slice] = []
    pieces = []
    at = 0
    try:
        while at < len(column) and column[at] == 0x0A:  # noqa: PLR2004
            length = column[at + 1]
            stop = at + 2 + length
            body = column[at + 2 : stop - index_bytes]
            if length > 0x7F or stop > len(column) or (index_bytes and column[stop - 2 : stop] != _ZERO_INDEX):  # noqa: PLR2004
                return None
            # Without the index's bytes, the body is whole fields: protobuf reads an index that is appended to it.
            read = messages.FlatTrajectory.ChunkSlice.FromString(body)
            if read.index or read.offset < 0 or read.length < 1:
                return None
            slices.append((read.chunk_key, read.offset, read.length))
            pieces.append(b"".join((_FIELD, _INDICES[len(body) + 2], body, _INDEX)))
            at = stop
    except (IndexError, DecodeError):
        return None
    squeeze = column[at:]
    if not slices or squeeze not in (b"", _SQUEEZE) or (squeeze and sum([part[2] for part in slices]) != 1):
        return None
    return slices, pieces, squeeze


@functools.lru_cache(maxsize=64)
def _uniform_layout(num_columns: int, is_scalar: bool) -> ItemLayout:
    columns = tuple(range(num_columns))
    return ItemLayout((ColumnGroup(columns, columns),), (is_scalar,) * num_columns)


def _parse_any(flat: bytes) -> tuple[ItemLayout, list[list[Slice]]]:
    try:
        trajectory = messages.FlatTrajectory.FromString(flat)
    except DecodeError as error:
        raise FormatError(f"an item whose trajectory cannot be parsed ({error}).") from None
    groups: dict[tuple[Slice, ...], int] = {}
    group_of: list[int] = []  # per column, as `tensors` and `is_scalar`
    tensors: list[int] = []
    is_scalar: list[bool] = []
    for column in trajectory.columns:
        slices = [(part.chunk_key, part.offset, part.length, part.index) for part in column.chunk_slices]
        index = slices[0][3] if slices else -1
        num_rows = 0
        for _, offset, length, slice_index in slices:
            num_rows += length
            if offset < 0 or length < 1 or slice_index != index:
                index = -1
        if index < 0:
            raise FormatError(f"column {len(group_of)} of an item consists of impossible slices: {slices}"[:500])
        if column.squeeze and num_rows != 1:
            raise FormatError(f"column {len(group_of)} of an item is marked as a scalar, but has more than one row.")
        group_of.append(groups.setdefault(tuple([part[:3] for part in slices]), len(groups)))
        tensors.append(index)
        is_scalar.append(column.squeeze)
    if not groups:
        raise FormatError("an item without columns.")
    return _grouped_layout(tuple(group_of), tuple(tensors), tuple(is_scalar)), [list(slices) for slices in groups]


@functools.lru_cache(maxsize=16)  # a layout may be as large as a message
def _grouped_layout(group_of: tuple[int, ...], tensors: tuple[int, ...], is_scalar: tuple[bool, ...]) -> ItemLayout:
    """Return the layout of columns from each column's group, tensor index and mark as a scalar."""
    members: list[list[int]] = [[] for _ in range(max(group_of) + 1)]
    for column, group in enumerate(group_of):
        members[group].append(column)
    groups = [ColumnGroup(tuple(columns), tuple([tensors[column] for column in columns])) for columns in members]
    return ItemLayout(tuple(groups), is_scalar)
