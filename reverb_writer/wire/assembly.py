"""Samples -> integers -> columns: each chunk is decoded once, and many samples are gathered at a time.

    add(sample): trajectory -> slices -> chunks that are new go to the arena -> rows of the arena, remembered
    take():      all samples added so far, one array a column, their rows end to end

What a trajectory means is remembered, too, while its chunks are in the arena: an item that is sampled again costs one
look-up. A sample that is damaged or unsafe raises and leaves nothing behind.
"""

from __future__ import annotations

import collections
import functools
import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from reverb_writer.errors import FormatError, UnsafeDataError
from reverb_writer.wire.arena import Arena
from reverb_writer.wire.output import Output
from reverb_writer.wire.samples import Column, SampleInfos
from reverb_writer.wire.sent_chunks import LikelyKinds, SentChunk, SentChunks
from reverb_writer.wire.trajectories import Layout, Slice, parse

__all__ = ["MAX_SAMPLE_BYTES", "Assembly"]

Array = npt.NDArray[Any]

MAX_SAMPLE_BYTES = 1 << 30
"""Size of the largest sample that is decoded, unless told otherwise."""

Rows = tuple[tuple[int, ...], ...]
"""Which rows of its arena each group of an item's columns is: of slice after slice, first row and their number."""

_MAX_LAYOUTS = 4
_KNOWN_SHARE = 4  # trajectories that are remembered take so much of what decoded chunks may take
_ENTRY_BYTES, _INT_BYTES = 200, 40


class _Shelf:
    """What is known of the items of one layout.

    Attributes:
        arenas: decoded chunks, an arena for each group of columns.
        known: by trajectory, which rows of each arena an item is.
    """

    def __init__(self, layout: Layout, max_known_bytes: int) -> None:
        self.layout = layout
        self.arenas: list[Arena] = []
        self.known: dict[bytes, Rows] = {}
        self._known_bytes, self._max_known_bytes = 0, max_known_bytes

    def remember(self, trajectory: bytes, rows: Rows) -> None:
        self._known_bytes += len(trajectory) + sum([_ENTRY_BYTES + _INT_BYTES * len(of_group) for of_group in rows])
        if self._known_bytes > self._max_known_bytes:
            self.forget()
        self.known[trajectory] = rows

    def forget(self) -> None:
        self.known.clear()
        self._known_bytes = 0


class Assembly:
    """Put samples together. Not thread-safe.

    Attributes:
        num_samples: samples added and not taken.
        num_decoded_chunks: chunks decoded so far; one with columns of several groups counts for each.
    """

    def __init__(
        self, max_cache_bytes: int, max_sample_bytes: int, *, batch_size: int = 1, num_buffers: int = 0
    ) -> None:
        """Start with nothing.

        Args:
            max_cache_bytes: bound on decoded chunks, for each of up to four ways in which writers lay out columns; a
                quarter more goes to what is known of items.
            max_sample_bytes: bound on what is made of one sample, and on the chunks of it.
            batch_size: how many samples are likely to be taken together.
            num_buffers: use the arrays of the batch so many batches ago again; 0 for new ones each time.
        """
        self._batch_size, self._num_buffers = batch_size, num_buffers
        self._used: collections.deque[list[Output]] = collections.deque()
        self.num_samples = 0
        self.num_decoded_chunks = 0
        self._max_cache_bytes, self._max_sample_bytes = max_cache_bytes, max_sample_bytes
        self._shelves: dict[Layout, _Shelf] = {}
        self._likely_kinds: LikelyKinds = {}
        self._current: _Shelf | None = None
        self._known: Mapping[bytes, Rows] = {}  # of the current shelf
        self._begin()

    @property
    def cache_bytes(self) -> int:
        """Return what decoded chunks occupy."""
        return sum(arena.num_bytes for shelf in list(self._shelves.values()) for arena in shelf.arenas)

    def add(self, sample: Any) -> None:
        """Add a sample.

        Args:
            sample: a message of `reverb_writer.sampled.Entry` that is complete.

        Raises:
            UnsafeDataError: a tensor must not be decoded, or the sample is too large. The sample is left out.
            FormatError: parts of it contradict each other, or others of the batch. Likewise.
        """
        info = sample.info
        item = info.item
        trajectory = item.flat_trajectory
        rows = self._known.get(trajectory)
        if rows is None:
            rows = self._learn(trajectory, sample.data)
        self._rows.append(rows)
        self._infos.append(info)
        self._items.append(item)
        self.num_samples += 1

    def take(self) -> tuple[list[Column], SampleInfos]:
        """Return the columns of all samples added, and their infos; begin anew."""
        self._gather()
        squeezed = self._current.layout.squeezed if self._current else ()
        columns = [output.column(is_squeezed) for output, is_squeezed in zip(self._outputs, squeezed, strict=True)]
        infos = SampleInfos(
            np.array([item.key for item in self._items], np.uint64),
            np.array([item.priority for item in self._items], np.float64),
            np.array([info.probability for info in self._infos], np.float64),
            np.array([info.table_size for info in self._infos], np.int64),
            np.array([item.times_sampled for item in self._items], np.int32),
        )
        if self._num_buffers:
            self._used.append(self._outputs)
        self._begin()
        return columns, infos

    def _begin(self) -> None:
        num_columns = len(self._current.layout.squeezed) if self._current else 0
        self._rows: list[Rows] = []  # of samples that are not gathered yet
        spent = self._used.popleft() if len(self._used) >= max(self._num_buffers, 1) else []
        if len(spent) == num_columns:
            self._outputs = [Output(output.largest) for output in spent]
        else:
            self._outputs = [Output() for _ in range(num_columns)]
        self._infos: list[Any] = []
        self._items: list[Any] = []
        self.num_samples = 0

    def _gather(self) -> None:
        """Copy the rows remembered so far out of the arenas."""
        if self._current is None or not self._rows:
            return
        for group, arena, of_group in zip(
            self._current.layout.groups, self._current.arenas, zip(*self._rows, strict=True), strict=True
        ):
            rows, lengths = _expand(of_group)
            for number, column in zip(group.columns, arena.columns, strict=True):
                self._outputs[number].add(column, rows, lengths, self._batch_size)
        self._rows.clear()

    def _learn(self, trajectory: bytes, chunks: Sequence[bytes]) -> Rows:
        """Return the rows of an item that is new, or of another layout than the one before."""
        layout, slices_of = parse(trajectory)
        if self._current and self.num_samples and layout.squeezed != self._current.layout.squeezed:
            raise FormatError(
                f"an item of {len(layout.squeezed)} columns in a batch whose first has "
                f"{len(self._current.layout.squeezed)}, or they are not squeezed alike. Its actors do not agree."
            )
        shelf = self._shelves.get(layout)
        rows = shelf.known.get(trajectory) if shelf else None
        if shelf is None or rows is None:
            shelf, rows = self._load(layout, shelf, slices_of, chunks)
            shelf.remember(trajectory, rows)
        if shelf is not self._current:
            self._gather()
            self._current, self._known = shelf, shelf.known
            if not self.num_samples:
                self._begin()
        return rows

    def _load(
        self, layout: Layout, shelf: _Shelf | None, slices_of: Sequence[Sequence[Slice]], sent: Sequence[bytes]
    ) -> tuple[_Shelf, Rows]:
        """Decode the chunks that are not known, and return the rows of an item."""
        if shelf:
            found_rows = [_rows(arena, slices) for arena, slices in zip(shelf.arenas, slices_of, strict=True)]
            if all(found_rows):
                return shelf, tuple(found_rows)
        # Dtypes, shapes and sizes are checked before anything is decoded, and what is decoded is stored only if it is
        # good: a bad sample changes nothing.
        chunks = SentChunks(sent, self._max_sample_bytes, self._likely_kinds)
        if shelf:
            for group, arena, slices in zip(layout.groups, shelf.arenas, slices_of, strict=True):
                for key, _, _ in slices:
                    if key not in arena.spans and not arena.holds(chunks.get(key, group.tensors)):
                        shelf = None
        found = shelf or self._new_shelf(
            layout,
            [chunks.get(slices[0][0], group.tensors) for group, slices in zip(layout.groups, slices_of, strict=True)],
        )
        rows = []
        for group, arena, slices in zip(layout.groups, found.arenas, slices_of, strict=True):
            chunk_of = functools.partial(chunks.get, indices=group.tensors)
            _check(arena, chunk_of, slices, self._max_sample_bytes)
            self.num_decoded_chunks += _place(arena, chunk_of, [key for key, _, _ in slices])
            rows.append(_rows(arena, slices))
        if shelf is None:
            self._shelves.pop(layout, None)
            while len(self._shelves) >= _MAX_LAYOUTS:
                del self._shelves[next(iter(self._shelves))]
            self._shelves[layout] = found
        return found, tuple(rows)

    def _new_shelf(self, layout: Layout, examples: Sequence[SentChunk]) -> _Shelf:
        """Share the cache among the groups so that each holds as many rows."""
        shelf = _Shelf(layout, self._max_cache_bytes // _KNOWN_SHARE)
        # Weak, for an arena that is given up must go at once, not when the garbage collector finds a cycle.
        owner, lost = weakref.ref(self), weakref.ref(shelf)

        def before_loss() -> None:
            assembly, its_shelf = owner(), lost()
            if assembly and its_shelf:
                assembly._before_loss(its_shelf)  # noqa: SLF001  # its own

        weights = [1 + chunk.num_bytes // chunk.length for chunk in examples]
        for chunk, weight in zip(examples, weights, strict=True):
            max_bytes = self._max_cache_bytes * weight // sum(weights)
            shelf.arenas.append(Arena(chunk.kind.dtypes_and_shapes, max_bytes, self._max_sample_bytes, before_loss))
        return shelf

    def _before_loss(self, shelf: _Shelf) -> None:
        """Read for the last time what an arena is about to lose."""
        if shelf is self._current:
            self._gather()
        shelf.forget()


def _check(arena: Arena, chunk_of: Callable[[int], SentChunk], slices: Sequence[Slice], max_bytes: int) -> None:
    for key, offset, length in slices:
        if key in arena.spans:
            start, stop = arena.spans[key]
            chunk_length = stop - start
        else:
            if not arena.holds(chunk_of(key)):
                raise FormatError("the chunks of an item differ in dtype or shape.")
            chunk_length = chunk_of(key).length
        if offset + length > chunk_length:
            raise FormatError(f"an item names rows {offset}+{length} of a chunk of {chunk_length}.")
    if sum(length for _, _, length in slices) > arena.max_rows:
        raise UnsafeDataError(
            f"a sample of more than {max_bytes} bytes. Raise `max_sample_bytes` if you trust the writer."
        )


def _place(arena: Arena, chunk_of: Callable[[int], SentChunk], keys: Sequence[int]) -> int:
    """Have all of an item's chunks in the arena at once, whatever must make room for them; return how many are new."""
    num_decoded = 0
    for attempt in range(3):
        missing = [key for key in keys if key not in arena.spans]
        if not missing:
            break
        # A chunk that was there may just have made room for another one; then it is decoded again.
        if attempt > 1:
            missing = list(dict.fromkeys(keys))
            arena.clear([chunk_of(key) for key in missing])
        for key in missing:
            if key not in arena.spans:
                arena.put(key, chunk_of(key))
                num_decoded += 1
    return num_decoded


def _rows(arena: Arena, slices: Sequence[Slice]) -> tuple[int, ...]:
    """Return which rows of the arena slices are; nothing if chunks are missing or do not have them, or too many."""
    spans = arena.spans
    rows: list[int] = []
    num_rows = 0
    for key, offset, length in slices:
        span = spans.get(key)
        if span is None or span[0] + offset + length > span[1]:
            return ()
        rows += (span[0] + offset, length)
        num_rows += length
    return tuple(rows) if num_rows <= arena.max_rows else ()  # unlike lists, of no concern to the garbage collector


def _expand(of_samples: Sequence[tuple[int, ...]]) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.int64]]:
    """Return the rows of samples end to end, and how many each has."""
    num_slices = np.fromiter(map(len, of_samples), np.intp, len(of_samples)) // 2
    numbers = np.fromiter(itertools.chain.from_iterable(of_samples), np.intp, 2 * int(num_slices.sum()))
    starts, lengths = numbers[::2], numbers[1::2]
    stops = lengths.cumsum()
    rows = np.arange(stops[-1]) + (starts - stops + lengths).repeat(lengths)
    return rows, np.add.reduceat(lengths, num_slices.cumsum() - num_slices)
