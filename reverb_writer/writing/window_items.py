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
from reverb_writer.writing.chunk_encoder import Chunk

Integers = npt.NDArray[np.int64]

_EPISODE_BITS = 40
"""No episode has `1 << 40` steps."""


class Windows(NamedTuple):
    """Windows of one kind."""

    tables: Sequence[str]  # each gets all of them, in the order given
    starts: Integers  # [n] first step of each
    ends: Integers  # [n] step after its last one, in ascending order
    priorities: npt.NDArray[np.float64]  # [n]


class EpisodeWindows(NamedTuple):
    """Complete windows of one episode."""

    windows: Sequence[Windows]  # of each kind
    chunks: Sequence[Chunk]  # in the order of their steps, without gaps; all that these and later windows need
    num_released: int  # how many of them, the oldest ones, no later window can hold

    @property
    def num_items(self) -> int:
        """Items that the windows make."""
        return sum(len(kind.ends) * len(kind.tables) for kind in self.windows)


class StreamUpdate(NamedTuple):
    """Arguments of one call of `Delivery.write`."""

    request: InsertRequest | None
    hold: list[int]
    release: list[int]


def stream_update(
    episodes: Sequence[EpisodeWindows], tables: frozenset[str], first_key: int, num_columns: int
) -> tuple[list[list[Chunk]], StreamUpdate]:
    """Put the windows of episodes, all of the same kinds, into one request; keys count from `first_key` on.

    Returns:
        The chunks that later windows need, of each episode, and what to write to the stream.
    """
    chunks = [chunk for episode in episodes for chunk in episode.chunks]
    chunk_starts = np.array([chunk.start for chunk in chunks], np.int64)
    chunk_stops = np.array([chunk.stop for chunk in chunks], np.int64)
    # The steps of an episode follow those of the one before at a distance, so that one search finds any step's chunk.
    if len(episodes) > 1:
        shifts = np.arange(len(episodes), dtype=np.int64) << _EPISODE_BITS
        shift = np.repeat(shifts, [len(episode.chunks) for episode in episodes])
        chunk_starts, chunk_stops = chunk_starts + shift, chunk_stops + shift
    chunk_keys = np.array([chunk.key for chunk in chunks], np.uint64)
    rows: list[ItemRows] = []
    is_needed = np.zeros(len(chunks), bool)
    key = first_key
    for kinds in zip(*(episode.windows for episode in episodes), strict=True):
        windows = kinds[0] if len(kinds) == 1 else _joined(kinds, shifts)
        if len(windows.ends):
            touched, widths, slices = _slices(windows, chunk_starts, chunk_stops, chunk_keys)
            rows += _item_rows(windows, widths, slices, key, num_columns)
            is_needed[touched] = True
            key += len(windows.ends) * len(windows.tables)
    needed = {chunks[i].key: chunks[i].data for i in is_needed.nonzero()[0].tolist()}
    release = [chunk.key for episode in episodes for chunk in episode.chunks[: episode.num_released] if chunk.held]
    kept = [list(episode.chunks[episode.num_released :]) for episode in episodes]
    if not rows:
        return kept, StreamUpdate(None, [], release)
    hold = [chunk.key for of_episode in kept for chunk in of_episode if not chunk.held]
    new_bytes = sum(len(chunk.data) for chunk in chunks if not chunk.counted and chunk.key in needed)
    num_bytes = new_bytes + sum(row.nbytes for _, row in rows)
    kept = [
        [chunk._replace(held=True, counted=chunk.counted or chunk.key in needed) for chunk in of_episode]
        for of_episode in kept
    ]
    return kept, StreamUpdate(InsertRequest(tables, first_key, rows, needed, num_bytes), hold, release)


def _joined(kinds: Sequence[Windows], shifts: Integers) -> Windows:
    """Return windows of one kind, of several episodes whose steps are shifted."""
    counts = [len(windows.ends) for windows in kinds]
    tables, starts, ends, priorities = zip(*kinds, strict=True)
    shift = np.repeat(shifts, counts)
    return Windows(tables[0], np.concatenate(starts) + shift, np.concatenate(ends) + shift, np.concatenate(priorities))


def _slices(
    windows: Windows, chunk_starts: Integers, chunk_stops: Integers, chunk_keys: npt.NDArray[np.uint64]
) -> tuple[Integers, Integers, npt.NDArray[Any]]:
    """Return which chunks each window touches [n, m], how many [n], and its slices of them [n, m]."""
    first = np.searchsorted(chunk_stops, windows.starts, "right")
    last = np.searchsorted(chunk_starts, windows.ends, "left") - 1
    widths = last - first + 1
    # Windows that touch fewer chunks than others repeat their last one, which is not encoded.
    touched = np.minimum(first[:, None] + np.arange(widths.max()), last[:, None])
    begins = chunk_starts[touched]
    offsets = np.maximum(windows.starts[:, None] - begins, 0)
    lengths = np.minimum(windows.ends[:, None], chunk_stops[touched]) - begins - offsets
    return touched, widths, encode_slices(chunk_keys, touched, offsets, lengths)


def _item_rows(
    windows: Windows, widths: Integers, slices: npt.NDArray[Any], first_key: int, num_columns: int
) -> list[ItemRows]:
    """Return the items of all tables, each table's in the order of the windows."""
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
    return [
        (first_key + t * num_windows + start, groups[width][t][at : at + stop - start])
        for t in range(len(tables))
        for start, stop, width, at in runs
    ]


def check_dtypes(dtypes: Sequence[np.dtype[Any]], paths: Sequence[str]) -> None:
    """Refuse leaves that Reverb cannot store."""
    for dtype, path in zip(dtypes, paths, strict=True):
        try:
            tensors.dtype_number(dtype)
        except StructureError as error:
            raise StructureError(f"leaf `{path}`: {error}") from None
