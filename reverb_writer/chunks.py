"""Finished chunks, and windows as slices of them. Pure functions of integers and arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from reverb_writer.wire.in_flight import ItemRows
from reverb_writer.wire.items import encode_items, encode_slices

__all__ = ["Chunk", "encode_windows"]

Integers = npt.NDArray[np.int64]


@dataclass(slots=True)
class Chunk:
    """Steps `start` to `stop` of an episode, all columns of them, encoded.

    Attributes:
        key: the chunk's.
        start: step count before its first step.
        stop: step count after its last step.
        data: as `encode_chunk` makes it.
        held: whether the server has been told to keep it for items to come.
        counted: whether a request has its bytes on its account.
    """

    key: int
    start: int
    stop: int
    data: bytes
    held: bool = False
    counted: bool = False


def encode_windows(
    chunks: Sequence[Chunk],
    starts: Integers,
    ends: Integers,
    priorities: npt.NDArray[np.float64],
    tables: Sequence[str],
    first_key: int,
    num_columns: int,
) -> tuple[list[ItemRows], dict[int, bytes]]:
    """Encode windows as items.

    Args:
        chunks: in the order of their steps, without gaps.
        starts: [n] first step of each window.
        ends: [n] step after its last one, in ascending order; all steps are in `chunks`.
        priorities: [n].
        tables: each gets all windows, in the order given.
        first_key: items get this key and those that follow it, `n * len(tables)` of them.
        num_columns: tensors of a chunk.

    Returns:
        The items, and the chunks that they name, by key.
    """
    chunk_starts = np.array([chunk.start for chunk in chunks], np.int64)
    chunk_stops = np.array([chunk.stop for chunk in chunks], np.int64)
    first = np.searchsorted(chunk_stops, starts, "right")
    last = np.searchsorted(chunk_starts, ends, "left") - 1
    widths = last - first + 1
    # Windows that touch fewer chunks than others repeat their last one, which is not encoded.
    touched = np.minimum(first[:, None] + np.arange(widths.max()), last[:, None])
    begins = chunk_starts[touched]
    offsets = np.maximum(starts[:, None] - begins, 0)
    lengths = np.minimum(ends[:, None], chunk_stops[touched]) - begins - offsets
    slices = encode_slices(np.array([chunk.key for chunk in chunks], np.uint64), touched, offsets, lengths)
    keys = np.arange(first_key, first_key + len(tables) * len(ends), dtype=np.uint64).reshape(len(tables), -1)

    # Items are encoded in groups that touch equally many chunks: their bytes are alike.
    groups: dict[int, list[npt.NDArray[np.uint8]]] = {}
    rank = np.empty(len(ends), np.int64)  # of each window in its group
    for width in np.flatnonzero(np.bincount(widths)).tolist():
        of = np.flatnonzero(widths == width)
        rank[of] = np.arange(len(of))
        groups[width] = [
            encode_items(table, keys[t, of], priorities[of], slices[of, :width], num_columns)
            for t, table in enumerate(tables)
        ]
    # But a FIFO table must see windows in the order of their ends, so groups are cut into runs again.
    cuts = [0, *(np.flatnonzero(np.diff(widths)) + 1).tolist(), len(ends)]
    runs = list(zip(cuts, cuts[1:], widths[cuts[:-1]].tolist(), rank[cuts[:-1]].tolist(), strict=False))
    rows = [
        (first_key + t * len(ends) + start, groups[width][t][at : at + stop - start])
        for t in range(len(tables))
        for start, stop, width, at in runs
    ]
    needed = np.zeros(len(chunks), bool)
    needed[touched] = True
    return rows, {chunks[i].key: chunks[i].data for i in np.flatnonzero(needed).tolist()}
