"""Rows of steps become encoded chunks; complete windows become items with priorities and slices of chunks.

    rows of the ring -> chunks
    Ready windows of many episodes -> priorities -> slices of chunks -> one request

The sender's thread calls priority functions here, one at a time and under no lock.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from reverb_writer.arguments import check_priority
from reverb_writer.protocol.item_encoding import KEY_BITS, encode_chunk, encode_items, encode_slices
from reverb_writer.rows import PADDING
from reverb_writer.transport.in_flight import InsertRequest
from reverb_writer.writing.records import Chunk, Ready
from reverb_writer.writing.ring import END, StepRing
from reverb_writer.writing.step_layout import StepLayout
from reverb_writer.writing.stream_options import Books
from reverb_writer.writing.window_target import NEVER, Integers, WindowTarget

_LOG = logging.getLogger(__package__)

_EPISODE_BITS = 40
"""Every episode has fewer than `1 << 40` steps."""

_START_BITS = (1 << 30) - 1
"""A chunk's range of steps has 32-bit numbers, and a stream across episodes may have more steps."""


class Encoder:
    """Encodes steps and windows of all episodes of an observer. Not thread-safe: only the sender uses it.

    Attributes:
        ring, layout, books: the rows, their columns, and the counters.
    """

    def __init__(
        self,
        ring: StepRing,
        layout: StepLayout,
        books: Books,
        largest: Callable[[Sequence[str]], float],
        *,
        keeps_columns: bool,
    ) -> None:
        """Encode rows of `ring`; if `keeps_columns`, chunks also have the columns as arrays.

        `largest` returns the largest priority set in the given tables.
        """
        self.ring, self.layout, self.books, self._largest = ring, layout, books, largest
        self._keeps_columns = keeps_columns
        # One generator per observer: a forked child must not draw its parent's keys.
        self._random = random.Random()  # noqa: S311  # keys are no secret

    def new_key(self) -> int:
        """Return a random key of a chunk, an item or an episode."""
        return self._random.getrandbits(KEY_BITS)

    def chunk(self, episode: int, start: int, rows: Any, num_padding: int) -> Chunk:
        """Encode the chunk of an episode that begins at step `start`: rows of the ring, then padding steps.

        `rows` is an index as `StepRing.rows` returns it, or None for padding alone.
        """
        layout = self.layout
        columns = [] if rows is None else [column[rows] for column in self.ring.columns]
        kinds = self.ring.kinds[rows] & ~np.uint8(END) if columns else np.zeros(0, np.uint8)
        num_real = len(kinds)
        if num_padding:
            structure = layout.structure
            padding = [
                np.full((num_padding, *shape), leaf, dtype)
                for leaf, dtype, shape in zip(layout.padding_step, structure.dtypes, structure.shapes, strict=True)
            ]
            columns = [np.concatenate(both) for both in zip(columns, padding, strict=True)] if columns else padding
            kinds = np.append(kinds, np.full(num_padding, PADDING, np.uint8))
        columns = layout.columns(columns, kinds)
        key = self.new_key()
        data = encode_chunk(key, episode, start & _START_BITS, columns, layout.encoded_spec, kinds)
        kept = [np.array(column) for column in (*columns, kinds)] if self._keeps_columns else None
        return Chunk(key, start, start + num_real + num_padding, data, kept)

    def request(self, group: Sequence[Ready]) -> InsertRequest | None:
        """Put windows of one target, of several episodes, into one request; return None if there is no window.

        The episodes keep only chunks that later windows need.
        """
        target = group[0].target
        chunks = [chunk for ready in group for chunk in ready.origin.chunks]
        # Each episode's steps are shifted beyond the steps of the episode before, so one search finds any step's chunk.
        shifts = np.arange(len(group), dtype=np.int64) << _EPISODE_BITS
        chunk_shifts = np.repeat(shifts, [len(ready.origin.chunks) for ready in group])
        chunk_starts = np.array([chunk.start for chunk in chunks], np.int64) + chunk_shifts
        chunk_stops = np.array([chunk.stop for chunk in chunks], np.int64) + chunk_shifts
        chunk_keys = np.array([chunk.key for chunk in chunks], np.uint64)
        after = np.array([ready.after for ready in group], np.int64)
        limits = [ready.num_steps if ready.end is None else ready.end.limit for ready in group]
        closing = [None if ready.end is None else ready.end.closing for ready in group]
        of, starts, ends = target.windows(after, np.array(limits, np.int64), closing)
        priorities = self._priorities(target, of, starts, ends, group)
        if callable(target.priority):
            is_good = ~np.isnan(priorities)
            of, starts, ends, priorities = of[is_good], starts[is_good], ends[is_good], priorities[is_good]
        rows: list[npt.NDArray[np.uint8]] = []
        is_needed = np.zeros(len(chunks), bool)
        first_key = self.new_key()
        if len(of):
            starts, ends = starts + shifts[of], ends + shifts[of]
            touched, widths, slices = _slices(starts, ends, chunk_starts, chunk_stops, chunk_keys)
            keys = np.arange(first_key, first_key + len(of) * target.num_tables, dtype=np.uint64).reshape(-1, len(of))
            rows = _item_rows(target.tables, keys, priorities, widths, slices, len(self.layout.dtypes))
            is_needed[touched] = True
        needed = {chunks[number].key: chunks[number].data for number in is_needed.nonzero()[0].tolist()}
        for ready in group:
            # The next window ends after `num_steps`, so it begins after `num_steps - length`. An ended episode has no
            # next window.
            needed_from = NEVER if ready.end is not None else ready.num_steps - target.length
            ready.origin.chunks = [chunk for chunk in ready.origin.chunks if chunk.stop > needed_from]
        return InsertRequest(frozenset(target.tables), first_key, rows, needed) if rows else None

    def _priorities(
        self, target: WindowTarget, of: Integers, starts: Integers, ends: Integers, group: Sequence[Ready]
    ) -> npt.NDArray[np.float64]:
        """Return the priorities of windows; NaN if the function failed."""
        if not callable(target.priority):
            number = self._largest(target.tables) if target.priority == "max" else target.priority
            return np.full(len(ends), number, np.float64)
        takes_kinds = False
        with contextlib.suppress(TypeError, ValueError):  # a function written in C may hide its parameters
            inspect.signature(target.priority).bind(None, None)
            takes_kinds = True
        found = np.full(len(ends), np.nan)
        for i, (number, start, end) in enumerate(zip(of.tolist(), starts.tolist(), ends.tolist(), strict=True)):
            *columns, kinds = _columns(group[number].origin.chunks, start, end)
            window = self.layout.pack(columns)
            try:
                found[i] = check_priority(target.priority(window, kinds) if takes_kinds else target.priority(window))
            except Exception:  # noqa: BLE001  # a user's function may raise anything, and the sender continues
                self.books.counts["failed_priorities"] += len(target.tables)
                if self.books.counts["failed_priorities"] == len(target.tables):
                    _LOG.exception(
                        "A window is lost because its `priority` function failed, or gave no finite number >= 0. "
                        "Further ones are counted in stats().failed_priorities."
                    )
        return found


def _columns(chunks: Sequence[Chunk], start: int, end: int) -> list[npt.NDArray[Any]]:
    """Return the columns [end - start, ...] of steps `start` to `end` and their kinds, owned by the caller."""
    parts = [
        [column[max(start - chunk.start, 0) : end - chunk.start] for column in chunk.columns or ()]
        for chunk in chunks
        if chunk.start < end and chunk.stop > start
    ]
    return [np.concatenate(column) for column in zip(*parts, strict=True)]


def _slices(
    starts: Integers,
    ends: Integers,
    chunk_starts: Integers,
    chunk_stops: Integers,
    chunk_keys: npt.NDArray[np.uint64],
) -> tuple[Integers, Integers, npt.NDArray[Any]]:
    """Return the chunks that each window touches [n, m], their numbers [n], and the windows' slices [n, m]."""
    first = np.searchsorted(chunk_stops, starts, "right")
    last = np.searchsorted(chunk_starts, ends, "left") - 1
    widths = last - first + 1
    # Windows that touch fewer chunks than others repeat their last chunk; the repetition is not encoded.
    touched = np.minimum(first[:, None] + np.arange(widths.max()), last[:, None])
    begins = chunk_starts[touched]
    offsets = np.maximum(starts[:, None] - begins, 0)
    lengths = np.minimum(ends[:, None], chunk_stops[touched]) - begins - offsets
    return touched, widths, encode_slices(chunk_keys, touched, offsets, lengths)


def _item_rows(
    tables: Sequence[str],
    keys: npt.NDArray[np.uint64],
    priorities: npt.NDArray[np.float64],
    widths: Integers,
    slices: npt.NDArray[Any],
    num_columns: int,
) -> list[npt.NDArray[np.uint8]]:
    """Return the items of all tables, with `keys` [tables, n], per table in the order of the windows."""
    # Items are encoded in groups by the number of chunks that they touch: within a group all have the same layout.
    groups: dict[int, list[npt.NDArray[np.uint8]]] = {}
    rank = np.empty(len(widths), np.int64)  # of each window in its group
    for width in np.bincount(widths).nonzero()[0].tolist():
        of = (widths == width).nonzero()[0]
        rank[of] = np.arange(len(of))
        groups[width] = [
            encode_items(table, of_table[of], priorities[of], slices[of, :width], num_columns)
            for table, of_table in zip(tables, keys, strict=True)
        ]
    # A FIFO table must get windows in the order of their ends, so groups are cut into runs.
    cuts = [0, *((widths[1:] != widths[:-1]).nonzero()[0] + 1).tolist(), len(widths)]
    runs = list(zip(cuts, cuts[1:], widths[cuts[:-1]].tolist(), rank[cuts[:-1]].tolist(), strict=False))
    return [groups[width][t][at : at + stop - start] for t in range(len(tables)) for start, stop, width, at in runs]
