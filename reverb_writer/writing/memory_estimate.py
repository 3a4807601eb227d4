"""Estimated memory of tables that are full.

A step is stored once, in a chunk, however many items refer to it. If the oldest item is removed first, N items of L
steps that start S steps apart hold N x S + (L - S) steps in long episodes. With any other remover the remaining items
may not overlap: then each holds the chunks it touches.

Beside the steps, Reverb keeps objects: for each item, for each slice that an item has of each column, and for each
column of a chunk. Their sizes are measured: docs/decisions.md#memory-estimate. Arrays are counted
uncompressed; snappy often makes them much smaller.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

import tree

from reverb_writer.tables import TableConfig
from reverb_writer.windows import WindowSpec
from reverb_writer.writing.window_kinds import chunk_length_for

PROCESS_BYTES = 600_000_000  # of both processes with empty tables, and of streams
_ITEM_BYTES = 600
_SLICE_BYTES = 145  # of each column
_CHUNK_BYTES = 1400  # of each column
_PAYLOAD = 1.15
_SAVED_ITEM_BYTES = 600  # while a checkpoint is written, items are copied, and chunks are not
_SAVED_SLICE_BYTES = 85


@dataclass(frozen=True)
class Estimate:
    """The estimated memory of a full table.

    Attributes:
        table: its name.
        steps: number of steps in the table, in episodes of the configured length or long ones; None if unknown.
        step_bytes: size of one step, uncompressed; None if the signature does not tell.
        total_bytes: size of the full table; None if it is unknown.
        save_bytes: size of the copy that exists while a checkpoint is written; None if it is unknown.
    """

    table: str
    steps: int | None
    step_bytes: int | None
    total_bytes: int | None = None
    save_bytes: int | None = None


class _PerItem(NamedTuple):
    """How much of a stream an item has: slices and chunks of each column, and steps."""

    slices: float
    chunks: float
    steps: float


def need(estimates: Sequence[Estimate], *, saves: bool) -> tuple[int, int, list[str]]:
    """Return the estimated memory of a server with these tables, which `saves` checkpoints or does not.

    The numbers are the bytes in all, and the bytes that are needed only while a checkpoint is written; the names are
    those of the tables of unknown size.
    """
    save_bytes = sum(one.save_bytes or 0 for one in estimates) if saves else 0
    total = PROCESS_BYTES + save_bytes + sum(one.total_bytes or 0 for one in estimates)
    return total, save_bytes, [one.table for one in estimates if one.total_bytes is None]


def estimate(
    config: TableConfig, sequence_length: int | None = None, stride_length: int = 1, episode_length: int | None = None
) -> Estimate:
    """Return the estimated memory of a table when it is full.

    `sequence_length` is None for that of the signature, `episode_length` for long episodes.
    """
    specs = tree.flatten(config.signature) if config.signature is not None else []
    sizes = [_leaf_bytes(spec) for spec in specs]
    step_bytes = sum(size for size in sizes if size is not None) if sizes and None not in sizes else None
    length = sequence_length or next((spec.shape[0] for spec in specs if spec.shape), None)
    if length is None:
        return Estimate(config.name, None, step_bytes)
    stride = min(stride_length, length)
    chunk = chunk_length_for([WindowSpec(length, stride)], math.inf if step_bytes is None else step_bytes)
    if config.remover == "fifo":
        item = _shared(length, stride, chunk, episode_length)
        steps = math.ceil(config.max_size * item.steps) + (length - stride if episode_length is None else 0)
    else:  # each item that is left may be the last one of its episode
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
    """Return what an item has where the items of an episode share its chunks."""
    if stride == length:
        return _PerItem(1, 1, length)
    windows = None if episode is None else max(1, (episode - length) // stride + 1)
    period = chunk // math.gcd(stride, chunk)
    num_starts = period if windows is None else min(period, windows)
    slices = fmean((k * stride % chunk + length - 1) // chunk + 1 for k in range(num_starts))
    if windows is None:
        return _PerItem(slices, stride / chunk, stride)
    chunks = math.ceil(((windows - 1) * stride + length) / chunk) / windows
    return _PerItem(slices, chunks, chunks * chunk)


def _leaf_bytes(spec: Any) -> int | None:
    """Return the bytes of a leaf of one step; None if its shape is unknown or it holds objects."""
    if spec.shape is None or None in spec.shape[1:] or spec.dtype.hasobject:
        return None
    return int(math.prod(spec.shape[1:]) * spec.dtype.itemsize)
