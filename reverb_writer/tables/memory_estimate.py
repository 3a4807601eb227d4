"""Estimated memory of full tables.

A step is stored once, in a chunk, even if many items refer to it. If the oldest item is removed first, N items of L
steps that start S steps apart hold N x S + (L - S) steps of long episodes. With any other remover the remaining items
may not overlap; each item then holds the chunks that it touches.

Reverb also keeps an object per item, per item and column and slice, and per chunk and column. Their sizes are
measured: docs/decisions.md#memory-estimate. Arrays are counted uncompressed; snappy often makes them much smaller.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

import tree

from reverb_writer.protocol.chunk_length import chunk_length_for
from reverb_writer.tables import TableConfig
from reverb_writer.windows import WindowSpec

PROCESS_BYTES = 600_000_000  # both processes with empty tables, and streams
_ITEM_BYTES = 600
_SLICE_BYTES = 145  # per column
_CHUNK_BYTES = 1400  # per column
_PAYLOAD = 1.15
_SAVED_ITEM_BYTES = 600  # a checkpoint copies items, but no chunks
_SAVED_SLICE_BYTES = 85


@dataclass(frozen=True)
class Estimate:
    """The estimated memory of a full table.

    Attributes:
        table: its name.
        steps: number of steps in the table, in episodes of the configured length or in long ones; None if unknown.
        step_bytes: size of one step, uncompressed; None if unknown from the signature.
        total_bytes: size of the full table; None if unknown.
        save_bytes: size of the copy that exists while a checkpoint is written; None if unknown.
    """

    table: str
    steps: int | None
    step_bytes: int | None
    total_bytes: int | None = None
    save_bytes: int | None = None


class _PerItem(NamedTuple):
    """An item's part of a stream: slices and chunks per column, and steps."""

    slices: float
    chunks: float
    steps: float


def need(estimates: Sequence[Estimate], *, saves: bool) -> tuple[int, int, list[str]]:
    """Return the estimated memory of a server: total bytes, the part needed only while a checkpoint is written, names.

    The names are the tables of unknown size. `saves` is whether the server writes checkpoints.
    """
    save_bytes = sum(one.save_bytes or 0 for one in estimates) if saves else 0
    total = PROCESS_BYTES + save_bytes + sum(one.total_bytes or 0 for one in estimates)
    return total, save_bytes, [one.table for one in estimates if one.total_bytes is None]


def estimate(
    config: TableConfig, sequence_length: int | None = None, stride_length: int = 1, episode_length: int | None = None
) -> Estimate:
    """Return the estimated memory of a full table.

    `sequence_length` is None for the signature's length; `episode_length` is None for long episodes.
    """
    specs = tree.flatten(config.signature) if config.signature is not None else []
    sizes = [_leaf_bytes(spec) for spec in specs]
    step_bytes = sum(size for size in sizes if size is not None) if sizes and None not in sizes else None
    length = sequence_length or next((spec.shape[0] for spec in specs if spec.shape), None)
    if length is None:
        return Estimate(config.name, None, step_bytes)
    stride = min(stride_length, length)
    chunk = chunk_length_for(WindowSpec(length, stride), math.inf if step_bytes is None else step_bytes)
    if config.remover == "fifo":
        item = _shared(length, stride, chunk, episode_length)
        steps = math.ceil(config.max_size * item.steps) + (length - stride if episode_length is None else 0)
    else:  # each remaining item may be the last one of its episode
        slices = _shared(length, stride, chunk, None).slices
        item = _PerItem(slices, slices, max(slices * chunk, length))
        steps = math.ceil(config.max_size * item.steps)
    if step_bytes is None:
        return Estimate(config.name, steps, None)
    objects = _ITEM_BYTES + len(specs) * (_SLICE_BYTES * item.slices + _CHUNK_BYTES * item.chunks)
    total_bytes = config.max_size * (objects + _PAYLOAD * item.steps * step_bytes)
    save_bytes = config.max_size * (_SAVED_ITEM_BYTES + len(specs) * _SAVED_SLICE_BYTES * item.slices)
    return Estimate(config.name, steps, step_bytes, math.ceil(total_bytes), math.ceil(save_bytes))


def _shared(length: int, stride: int, chunk: int, episode: int | None) -> _PerItem:
    """Return an item's part of the stream if the items of an episode share its chunks."""
    if stride == length:
        return _PerItem(1, length / max(chunk, length), length)
    windows = None if episode is None else max(1, (episode - length) // stride + 1)
    period = chunk // math.gcd(stride, chunk)
    num_starts = period if windows is None else min(period, windows)
    slices = fmean((k * stride % chunk + length - 1) // chunk + 1 for k in range(num_starts))
    if windows is None:
        return _PerItem(slices, stride / chunk, stride)
    chunks = math.ceil(((windows - 1) * stride + length) / chunk) / windows
    return _PerItem(slices, chunks, chunks * chunk)


def _leaf_bytes(spec: Any) -> int | None:
    """Return the bytes of a leaf of one step; None if the shape is unknown or the leaf holds objects."""
    if spec.shape is None or None in spec.shape[1:] or spec.dtype.hasobject:
        return None
    return int(math.prod(spec.shape[1:]) * spec.dtype.itemsize)
