"""The parser of trajectories accepts only bytes that protobuf accepts, and reads the same numbers."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from typing import Any

import pytest
from damage import damaged
from google.protobuf.message import DecodeError

from reverb_writer.errors import FormatError
from reverb_writer.protocol import messages
from reverb_writer.protocol.trajectory_parsing import _parse_one_slice, _parse_uniform, parse_trajectory

MUTATIONS = int(os.environ.get("REVERB_WRITER_FUZZ", "20000"))


def _varint(value: int, width: int) -> list[int]:
    return [value >> 7 * place & 0x7F | (0x80 if place < width - 1 else 0) for place in range(width)]


def trajectory(num_columns: int, slices: Sequence[tuple[int, int, int]], *, squeeze: bool = False) -> bytes:
    """Return the bytes of an item in protobuf's canonical form, as dm-reverb's writers send it."""
    part = messages.FlatTrajectory.ChunkSlice
    columns = [
        messages.FlatTrajectory.Column(
            chunk_slices=[
                part(chunk_key=key, offset=offset, length=length, index=index) for key, offset, length in slices
            ],
            squeeze=squeeze,
        )
        for index in range(num_columns)
    ]
    return bytes(messages.FlatTrajectory(columns=columns).SerializeToString())


def padded(num_columns: int, slices: Sequence[tuple[int, int, int]]) -> bytes:
    """Return the bytes of an item as our observers send it: with an index of 0, and varints of a fixed width."""
    encoded = b""
    for index in range(num_columns):
        column = b""
        for key, offset, length in slices:
            numbers = [*_varint(key, 9), 0x10, *_varint(offset, 2), 0x18, *_varint(length, 2), 0x20, index]
            column += bytes([0x0A, 1 + len(numbers), 0x08, *numbers])
        encoded += b"\x0a" + (bytes([len(column)]) if len(column) < 128 else bytes(_varint(len(column), 2))) + column
    return encoded


REAL = [
    trajectory(1, [(11, 0, 3)]),
    trajectory(2, [(2**62, 5, 300)]),
    trajectory(6, [(2**64 - 1, 60, 4), (12, 0, 4)]),
    trajectory(3, [(9, 7, 1)], squeeze=True),
    trajectory(4, [(2**61 + number, 0, 20) for number in range(9)]),
    padded(1, [(11, 0, 3)]),
    padded(3, [(2**62, 5, 300), (2**62 + 1, 0, 2)]),
    padded(5, [(2**61 + number, 0, 20) for number in range(12)]),
]


def columns_of(flat: bytes) -> list[tuple[list[tuple[int, int, int]], int, bool]] | None:
    """Return each column's slices, tensor and mark as a scalar, as protobuf reads them; None if it does not."""
    try:
        read = messages.FlatTrajectory.FromString(flat)
    except DecodeError:
        return None
    columns = []
    for column in read.columns:
        tensors = {one.index for one in column.chunk_slices}
        if len(tensors) != 1 or min(tensors) < 0:
            return None
        slices = [(one.chunk_key, one.offset, one.length) for one in column.chunk_slices]
        columns.append((slices, tensors.pop(), column.squeeze))
    return columns


def parsed(flat: bytes) -> list[tuple[list[tuple[int, int, int]], int, bool]] | None:
    """Return the same, as our parser reads it; None if it refuses."""
    try:
        layout, slices = parse_trajectory(flat)
    except FormatError:
        return None
    found: dict[int, Any] = {}
    for group, its_slices in zip(layout.groups, slices, strict=True):
        for column, tensor in zip(group.columns, group.tensors, strict=True):
            found[column] = (list(its_slices), tensor, layout.is_scalar[column])
    return [found[column] for column in range(len(layout.is_scalar))]


def test_items_of_our_observers_are_read_by_their_first_column() -> None:
    assert _parse_one_slice(padded(1, [(11, 0, 3)])) is not None
    assert _parse_uniform(padded(128, [(2**61, 0, 20), (2**62, 0, 2)])) is not None


@pytest.mark.parametrize("flat", REAL)
def test_real_trajectories_are_read_as_protobuf_reads_them(flat: bytes) -> None:
    assert parsed(flat) == columns_of(flat) is not None


def test_mutated_trajectories_are_refused_or_read_as_protobuf_reads_them() -> None:
    rng = random.Random(9)  # noqa: S311  # repeatable
    num_accepted = 0
    for _ in range(MUTATIONS):
        flat = damaged(rng.choice(REAL), rng)
        if (ours := parsed(flat)) is not None:
            num_accepted += 1
            assert ours == columns_of(flat), flat.hex()
    assert num_accepted > MUTATIONS // 100
