"""From an item's bytes to integers: which rows of which chunks each of its columns is made of.

An item lists the slices of every column. Columns that were written together name the same rows of the same chunks and
differ only in which tensor of the chunk they mean; they are one group here, and are looked up and gathered as one. Our
writers make items of one group; TF-Agents', with a chunk for each column, make one a column.

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

__all__ = ["Group", "Layout", "Slice", "parse"]

Slice = tuple[int, int, int]
"""Chunk key, first row, number of rows."""


class Group(NamedTuple):
    """Columns of an item whose rows are the same rows of the same chunks.

    Attributes:
        columns: which columns of the item.
        tensors: for each, which tensor of the chunks.
    """

    columns: tuple[int, ...]
    tensors: tuple[int, ...]


class Layout(NamedTuple):
    """What items of one writer have in common.

    Attributes:
        groups: each column is in one.
        squeezed: for each column, whether its one row is given without the time dimension.
    """

    groups: tuple[Group, ...]
    squeezed: tuple[bool, ...]


_FIELD, _BYTE_INDEX = b"\x0a", b"\x20"  # of both columns and slices, field 1; of a slice, its index
_SQUEEZE = b"\x10\x01"
_INDICES = [bytes([index]) for index in range(128)]


def parse(flat_trajectory: bytes) -> tuple[Layout, Sequence[Sequence[Slice]]]:
    """Return an item's layout, and the slices of each of its groups.

    Raises:
        FormatError: it is no FlatTrajectory, has no column, or a column without rows.
    """
    return _parse_alike(flat_trajectory) or _parse_any(flat_trajectory)


def _parse_alike(flat: bytes) -> tuple[Layout, list[list[Slice]]] | None:  # noqa: PLR0911  # many ways to be unlike
    """Take apart what our writers write: all columns like the first, but for the index. None if it is anything else.

    The first column is read; the bytes that the others must then have are made and compared, which is ten times as
    fast as reading them.
    """
    if len(flat) < 3 or flat[0] != 0x0A:  # noqa: PLR2004  # a tag and a length of up to two bytes
        return None
    size, start = (flat[1], 2) if flat[1] < 0x80 else (flat[1] - 0x80 + flat[2] * 0x80, 3)  # noqa: PLR2004
    stop = start + size
    if stop + 1 < len(flat) and flat[stop + 1] <= min(size, 0x7F):  # the next column has no room for an index
        return None
    # The first column names tensor 0, so each of its slices is without an index. Split it where one would stand.
    slices: list[Slice] = []
    pieces = []
    at = start
    try:
        while at < stop and flat[at] == 0x0A:  # noqa: PLR2004
            length = flat[at + 1]
            body = flat[at + 2 : at + 2 + length]
            read = messages.FlatTrajectory.ChunkSlice.FromString(body)
            if read.index or read.offset < 0 or read.length < 1:
                return None
            slices.append((read.chunk_key, read.offset, read.length))
            pieces.append(b"".join((_FIELD, _INDICES[length + 2], body, _BYTE_INDEX)))
            at += 2 + length
    except (IndexError, DecodeError):
        return None
    squeeze = flat[at:stop]
    if not slices or stop > len(flat) or squeeze not in (b"", _SQUEEZE):
        return None
    if squeeze and sum(length for _, _, length in slices) != 1:
        return None
    head = _FIELD + varint(size + 2 * len(slices))
    others, rest = divmod(len(flat) - stop, len(head) + size + 2 * len(slices))
    if rest or others > 127:  # noqa: PLR2004  # an index of two bytes
        return None
    pieces[0] = head + pieces[0]
    pieces.append(squeeze)
    if others and flat[stop:] != b"".join([index.join(pieces) for index in _INDICES[1 : others + 1]]):
        return None
    return _alike(others + 1, bool(squeeze)), [slices]


@functools.lru_cache(maxsize=64)
def _alike(num_columns: int, squeezed: bool) -> Layout:
    columns = tuple(range(num_columns))
    return Layout((Group(columns, columns),), (squeezed,) * num_columns)


def _parse_any(flat: bytes) -> tuple[Layout, list[list[Slice]]]:
    try:
        trajectory = messages.FlatTrajectory.FromString(flat)
    except DecodeError as error:
        raise FormatError(f"an item whose trajectory cannot be read ({error}).") from None
    groups: dict[tuple[Slice, ...], int] = {}
    numbers: list[int] = []  # of each column: its group,
    tensors: list[int] = []  # which tensor of the chunks,
    squeezed: list[bool] = []
    for column in trajectory.columns:
        pieces = [(piece.chunk_key, piece.offset, piece.length, piece.index) for piece in column.chunk_slices]
        index = pieces[0][3] if pieces else -1
        num_rows = 0
        for _, offset, length, its_index in pieces:
            num_rows += length
            if offset < 0 or length < 1 or its_index != index:
                index = -1
        if index < 0:
            raise FormatError(f"column {len(numbers)} of an item is made of impossible slices: {pieces}"[:500])
        if column.squeeze and num_rows != 1:
            raise FormatError(f"column {len(numbers)} of an item is squeezed, but has more than one row.")
        numbers.append(groups.setdefault(tuple([piece[:3] for piece in pieces]), len(groups)))
        tensors.append(index)
        squeezed.append(column.squeeze)
    if not groups:
        raise FormatError("an item without columns.")
    return _grouped(tuple(numbers), tuple(tensors), tuple(squeezed)), [list(slices) for slices in groups]


@functools.lru_cache(maxsize=16)  # a layout may be as large as a message
def _grouped(numbers: tuple[int, ...], tensors: tuple[int, ...], squeezed: tuple[bool, ...]) -> Layout:
    """Return the layout of columns that are in these groups and are these tensors of their chunks."""
    members: list[list[int]] = [[] for _ in range(max(numbers) + 1)]
    for column, number in enumerate(numbers):
        members[number].append(column)
    groups = [Group(tuple(columns), tuple([tensors[column] for column in columns])) for columns in members]
    return Layout(tuple(groups), squeezed)
