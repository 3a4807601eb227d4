"""Windows as items: slices of sealed chunks. Pure functions of integers and arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from reverb_writer.errors import StructureError
from reverb_writer.protocol import tensors
from reverb_writer.protocol.item_encoding import encode_items, encode_slices
from reverb_writer.transport.in_flight import InsertRequest, ItemRows
from reverb_writer.writing.chunk_builder import Chunk

__all__ = ["StreamUpdate", "Windows", "check_dtypes", "encode_windows", "stream_update"]

Integers = npt.NDArray[np.int64]


class Windows(NamedTuple):
    """Windows of one kind.

    Attributes:
        tables: each gets all of them, in the order given.
        starts: [n] first step of each.
        ends: [n] step after its last one, in ascending order.
        priorities: [n].
    """

    tables: Sequence[str]
    starts: Integers
    ends: Integers
    priorities: npt.NDArray[np.float64]


class StreamUpdate(NamedTuple):
    """Arguments of one call of `InsertStream.write`."""

    request: InsertRequest | None
    hold: list[int]
    release: list[int]


def stream_update(
    chunks: Sequence[Chunk],
    num_released: int,
    windows: Sequence[Windows],
    tables: frozenset[str],
    first_key: int,
    num_columns: int,
) -> tuple[list[Chunk], StreamUpdate]:
    """Put windows into a request.

    Args:
        chunks: in the order of their steps, without gaps; all that these and later windows need.
        num_released: how many of them, the oldest ones, no later window can hold.
        windows: of each kind.
        tables: names of all tables that the writer of these windows writes to.
        first_key: of the items; the others have those that follow it.
        num_columns: tensors of a chunk.

    Returns:
        The chunks that later windows need, and what to write to the stream.
    """
    rows: list[ItemRows] = []
    needed: dict[int, bytes] = {}
    key = first_key
    for kind in windows:
        if len(kind.ends):
            encoded, of_kind = encode_windows(
                chunks, kind.starts, kind.ends, kind.priorities, kind.tables, key, num_columns
            )
            rows += encoded
            needed |= of_kind
            key += len(kind.ends) * len(kind.tables)
    gone, kept = chunks[:num_released], list(chunks[num_released:])
    release = [chunk.key for chunk in gone if chunk.held]
    if not rows:
        return kept, StreamUpdate(None, [], release)
    hold = [chunk.key for chunk in kept if not chunk.held]
    new = (chunk for chunk in chunks if not chunk.counted and chunk.key in needed)
    num_bytes = sum(row.nbytes for _, row in rows) + sum(len(chunk.data) for chunk in new)
    kept = [chunk._replace(held=True, counted=chunk.counted or chunk.key in needed) for chunk in kept]
    return kept, StreamUpdate(InsertRequest(tables, first_key, rows, needed, num_bytes), hold, release)


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


def check_dtypes(dtypes: Sequence[np.dtype[Any]], paths: Sequence[str]) -> None:
    """Refuse leaves that Reverb cannot store.

    Raises:
        StructureError: names the leaf.
    """
    for dtype, path in zip(dtypes, paths, strict=True):
        try:
            tensors.dtype_number(dtype)
        except StructureError as error:
            raise StructureError(f"leaf `{path}`: {error}") from None
