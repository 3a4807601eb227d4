"""Windows as items: slices of sealed chunks. Functions of integers and arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from reverb_writer.errors import StructureError
from reverb_writer.protocol import tensors
from reverb_writer.protocol.item_encoding import encode_items, encode_slices
from reverb_writer.transport.in_flight import InsertRequest
from reverb_writer.writing.chunk_encoder import Chunk

Integers = npt.NDArray[np.int64]

_EPISODE_BITS = 40
"""No episode has `1 << 40` steps."""


class Windows(NamedTuple):
    """Windows of one kind, of several episodes."""

    tables: Sequence[str]  # each gets all of them, in the order given
    of: Integers  # [n] number of the episode, in ascending order
    starts: Integers  # [n] first step of each
    ends: Integers  # [n] step after its last one, in ascending order of each episode
    priorities: npt.NDArray[np.float64]  # [n]


class StreamUpdate(NamedTuple):
    """Arguments of one call of `InFlight.add`."""

    request: InsertRequest | None
    hold: list[int]
    release: list[int]


def stream_update(
    kinds: Sequence[Windows],
    chunks: Sequence[Sequence[Chunk]],
    needed_from: Sequence[int],
    tables: frozenset[str],
    first_key: int,
    num_columns: int,
) -> tuple[list[list[Chunk]], StreamUpdate]:
    """Put windows of several episodes into one request; marks the chunks that are held and counted from here on.

    Args:
        kinds: the windows of each kind.
        chunks: of each episode, in the order of their steps, without gaps; all that these and later windows need.
        needed_from: of each episode; chunks that end at or before this step count are in no later window.
        tables: all that the observer writes to.
        first_key: key of the first item; the others follow it.
        num_columns: columns of a step.

    Returns:
        The chunks that later windows need, of each episode, and what to write to the stream.
    """
    in_order = [chunk for of_episode in chunks for chunk in of_episode]
    # The steps of an episode follow those of the one before at a distance, so that one search finds any step's chunk.
    shifts = np.arange(len(chunks), dtype=np.int64) << _EPISODE_BITS
    chunk_shifts = np.repeat(shifts, [len(of_episode) for of_episode in chunks])
    chunk_starts = np.array([chunk.start for chunk in in_order], np.int64) + chunk_shifts
    chunk_stops = np.array([chunk.stop for chunk in in_order], np.int64) + chunk_shifts
    chunk_keys = np.array([chunk.key for chunk in in_order], np.uint64)
    rows: list[npt.NDArray[np.uint8]] = []
    is_needed = np.zeros(len(in_order), bool)
    key, num_bytes = first_key, 0
    for windows in kinds:
        if len(windows.ends):
            starts, ends = windows.starts + shifts[windows.of], windows.ends + shifts[windows.of]
            touched, widths, slices = _slices(starts, ends, chunk_starts, chunk_stops, chunk_keys)
            rows += _item_rows(windows, widths, slices, key, num_columns)
            is_needed[touched] = True
            key += len(windows.ends) * len(windows.tables)
    kept, release = [], []
    for of_episode, first in zip(chunks, needed_from, strict=True):
        kept.append([chunk for chunk in of_episode if chunk.stop > first])
        release += [chunk.key for chunk in of_episode if chunk.held and chunk.stop <= first]
    if not rows:
        return kept, StreamUpdate(None, [], release)
    needed: dict[int, bytes] = {}
    for number in is_needed.nonzero()[0].tolist():
        chunk = in_order[number]
        needed[chunk.key] = chunk.data
        num_bytes += 0 if chunk.counted else len(chunk.data)
        chunk.counted = True
    num_bytes += sum(row.nbytes for row in rows)
    hold = [chunk for of_episode in kept for chunk in of_episode if not chunk.held]
    for chunk in hold:
        chunk.held = True
    request = InsertRequest(tables, first_key, rows, needed, num_bytes)
    return kept, StreamUpdate(request, [chunk.key for chunk in hold], release)


def _slices(
    starts: Integers,
    ends: Integers,
    chunk_starts: Integers,
    chunk_stops: Integers,
    chunk_keys: npt.NDArray[np.uint64],
) -> tuple[Integers, Integers, npt.NDArray[Any]]:
    """Return which chunks each window touches [n, m], how many [n], and its slices of them [n, m]."""
    first = np.searchsorted(chunk_stops, starts, "right")
    last = np.searchsorted(chunk_starts, ends, "left") - 1
    widths = last - first + 1
    # Windows that touch fewer chunks than others repeat their last one, which is not encoded.
    touched = np.minimum(first[:, None] + np.arange(widths.max()), last[:, None])
    begins = chunk_starts[touched]
    offsets = np.maximum(starts[:, None] - begins, 0)
    lengths = np.minimum(ends[:, None], chunk_stops[touched]) - begins - offsets
    return touched, widths, encode_slices(chunk_keys, touched, offsets, lengths)


def _item_rows(
    windows: Windows, widths: Integers, slices: npt.NDArray[Any], first_key: int, num_columns: int
) -> list[npt.NDArray[np.uint8]]:
    """Return the items of all tables, each table's in the order of the windows, and of their keys."""
    tables, num_windows = windows.tables, len(windows.ends)
    keys = np.arange(first_key, first_key + len(tables) * num_windows, dtype=np.uint64).reshape(len(tables), -1)

    # Items are encoded in groups that touch equally many chunks: their bytes are alike.
    groups: dict[int, list[npt.NDArray[np.uint8]]] = {}
    rank = np.empty(num_windows, np.int64)  # of each window in its group
    for width in np.bincount(widths).nonzero()[0].tolist():
        of = (widths == width).nonzero()[0]
        rank[of] = np.arange(len(of))
        groups[width] = [
            encode_items(table, keys[t, of], windows.priorities[of], slices[of, :width], num_columns)
            for t, table in enumerate(tables)
        ]
    # But a FIFO table must see windows in the order of their ends, so groups are cut into runs again.
    cuts = [0, *((widths[1:] != widths[:-1]).nonzero()[0] + 1).tolist(), num_windows]
    runs = list(zip(cuts, cuts[1:], widths[cuts[:-1]].tolist(), rank[cuts[:-1]].tolist(), strict=False))
    return [groups[width][t][at : at + stop - start] for t in range(len(tables)) for start, stop, width, at in runs]


def check_dtypes(dtypes: Sequence[np.dtype[Any]], paths: Sequence[str]) -> None:
    """Refuse leaves that Reverb cannot store."""
    for dtype, path in zip(dtypes, paths, strict=True):
        try:
            tensors.dtype_number(dtype)
        except StructureError as error:
            raise StructureError(f"leaf `{path}`: {error}") from None
