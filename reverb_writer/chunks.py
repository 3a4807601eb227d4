"""Finished chunks, and windows as slices of them. Pure functions of integers and arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from reverb_writer.wire.items import KEY_LIMIT, encode_items

__all__ = ["Chunk", "ItemRows", "encode_windows"]

ItemRows = tuple[list[int], npt.NDArray[np.uint8]]
"""Keys of items, and one encoded item a row."""

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
    num_columns: int,
    random: np.random.Generator,
) -> tuple[list[ItemRows], dict[int, bytes]]:
    """Encode windows as items, with keys drawn for them.

    Args:
        chunks: in the order of their steps, without gaps.
        starts: [n] first step of each window.
        ends: [n] step after its last one, in ascending order; all steps are in `chunks`.
        priorities: [n].
        tables: each gets all windows, in the order given.
        num_columns: tensors of a chunk.
        random: for the keys.

    Returns:
        The items, and the chunks that they name, by key.
    """
    chunk_starts = np.array([chunk.start for chunk in chunks], np.int64)
    chunk_stops = np.array([chunk.stop for chunk in chunks], np.int64)
    chunk_keys = np.array([chunk.key for chunk in chunks], np.uint64)
    first = np.searchsorted(chunk_stops, starts, "right")
    touched = np.searchsorted(chunk_starts, ends, "left") - first
    keys = random.integers(KEY_LIMIT, size=(len(tables), len(ends)), dtype=np.uint64)
    needed: dict[int, bytes] = {}
    # Items are encoded in groups that touch equally many chunks: their bytes are alike.
    groups: dict[int, list[npt.NDArray[np.uint8]]] = {}
    rank = np.empty(len(ends), np.int64)  # of each window in its group
    for width in np.unique(touched).tolist():
        of = np.flatnonzero(touched == width)
        rank[of] = np.arange(len(of))
        ids = first[of][:, None] + np.arange(width)
        offsets = np.maximum(starts[of][:, None] - chunk_starts[ids], 0)
        lengths = np.minimum(ends[of][:, None], chunk_stops[ids]) - chunk_starts[ids] - offsets
        needed |= {chunks[at].key: chunks[at].data for at in np.unique(ids).tolist()}
        groups[width] = [
            encode_items(table, keys[t, of], priorities[of], chunk_keys[ids], offsets, lengths, num_columns)
            for t, table in enumerate(tables)
        ]
    # But a FIFO table must see windows in the order of their ends, so groups are cut into runs again.
    cuts = [0, *(np.flatnonzero(np.diff(touched)) + 1).tolist(), len(ends)]
    widths, ranks = touched[cuts[:-1]].tolist(), rank[cuts[:-1]].tolist()
    rows = []
    for t, drawn in enumerate(keys.tolist()):
        for start, stop, width, at in zip(cuts, cuts[1:], widths, ranks, strict=False):
            rows.append((drawn[start:stop], groups[width][t][at : at + stop - start]))
    return rows, needed
