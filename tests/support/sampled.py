"""Responses as a server sends them, made by hand: several writers' ways to lay out an item's columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensor_codec

from reverb_writer.protocol import messages

Slices = Sequence[tuple[int, int, int, int]]
"""Of a column: chunk key, offset, length, index."""


def chunk(key: int, columns: Sequence[Any], *, delta_encoded: bool = False) -> Any:
    made = messages.ChunkData(chunk_key=key, data_tensors_len=len(columns), delta_encoded=delta_encoded)
    made.sequence_range.episode_id, made.sequence_range.end = 77, 4
    for column in columns:
        made.data.tensors.add().ParseFromString(tensor_codec.encode(np.asarray(column)))
    return made


def item(key: int, columns: Sequence[Slices], is_scalar: Sequence[int] = ()) -> Any:
    trajectory = messages.FlatTrajectory()
    for number, slices in enumerate(columns):
        column = trajectory.columns.add(squeeze=number in is_scalar)
        for chunk_key, offset, length, index in slices:
            column.chunk_slices.add(chunk_key=chunk_key, offset=offset, length=length, index=index)
    return messages.PrioritizedItem(key=key, table="replay", priority=1.5, times_sampled=2, flat_trajectory=trajectory)


def response(*samples: tuple[Any, Sequence[Any]]) -> bytes:
    made = messages.SampleStreamResponse()
    for one, chunks in samples:
        entry = made.entries.add(data=chunks, end_of_sequence=True)
        entry.info.item.CopyFrom(one)
        entry.info.probability = 0.25
        entry.info.table_size = 4
    encoded: bytes = made.SerializeToString()
    return encoded


def together(key: int, chunk_keys: Sequence[int], slices: Sequence[tuple[int, int]], num_columns: int) -> Any:
    """Return an item as our writers make it: every column the same slices, the index its number."""
    return item(
        key,
        [
            [(chunk_key, offset, length, index) for chunk_key, (offset, length) in zip(chunk_keys, slices, strict=True)]
            for index in range(num_columns)
        ],
    )
