"""Samples -> integers -> columns: each chunk is decoded once, and many samples are gathered at a time.

    add(sample): trajectory -> slices -> chunks that are new go to the arena -> rows of the arena, remembered
    take():      all samples added so far, one array a column, their rows end to end

What a trajectory means is remembered, too, while its chunks are in the arena: an item that is sampled again costs one
look-up. A sample that is damaged or unsafe raises and leaves nothing behind.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from reverb_writer.errors import FormatError, UnsafeDataError
from reverb_writer.wire import messages, tensors
from reverb_writer.wire.arena import Arena
from reverb_writer.wire.trajectories import Group, Layout, Slice, parse

__all__ = ["MAX_SAMPLE_BYTES", "Assembly", "Column", "SampleInfo", "SampleInfos", "split_samples"]

Array = npt.NDArray[Any]

MAX_SAMPLE_BYTES = 1 << 30
"""Size of the largest sample that is decoded, unless told otherwise."""

Rows = tuple[Array, ...]
"""Which rows of its arena each group of an item's columns is."""

_MAX_LAYOUTS = 4
_KNOWN_SHARE = 4  # trajectories that are remembered take so much of what decoded chunks may take
_ENTRY_BYTES = 300


@dataclass(frozen=True)
class Column:
    """One column of n samples.

    Attributes:
        rows: [sum(lengths), ...], the samples end to end; owned by the caller. A list of such arrays, one a sample, if
            samples differ in dtype or in the shape of a row.
        lengths: [n] rows of each sample.
        squeezed: whether each has one row, to be given without the time dimension.
    """

    rows: Array | list[Array]
    lengths: npt.NDArray[np.int64]
    squeezed: bool

    def split(self) -> list[Array]:
        """Return the rows of each sample, views; a squeezed one without the time dimension."""
        if isinstance(self.rows, list):
            rows = self.rows
        else:
            ends = np.cumsum(self.lengths).tolist()
            rows = [self.rows[start:end] for start, end in itertools.pairwise([0, *ends])]
        return [row[0] for row in rows] if self.squeezed else rows


@dataclass(frozen=True)
class SampleInfo:
    """What the server tells about a sample.

    Attributes:
        key: of the item, for `mutate_priorities`.
        priority: of the item when it was sampled.
        probability: with which it was chosen.
        table_size: items in the table at that moment.
        times_sampled: how often the item has been sampled, this time included.
    """

    key: int
    priority: float
    probability: float
    table_size: int
    times_sampled: int


@dataclass(frozen=True)
class SampleInfos:
    """What the server tells about n samples.

    Attributes:
        keys: [n] uint64, of the items, for `update_priorities`.
        priorities: [n] float64, when they were sampled.
        probabilities: [n] float64, with which they were chosen.
        table_sizes: [n] int64, items in the table at that moment.
        times_sampled: [n] int32, how often each has been sampled, this time included.
    """

    keys: npt.NDArray[np.uint64]
    priorities: npt.NDArray[np.float64]
    probabilities: npt.NDArray[np.float64]
    table_sizes: npt.NDArray[np.int64]
    times_sampled: npt.NDArray[np.int32]


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
        self._known_bytes += len(trajectory) + sum(_ENTRY_BYTES + of_group.nbytes for of_group in rows)
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

    def __init__(self, max_cache_bytes: int, max_sample_bytes: int) -> None:
        """Start with nothing.

        Args:
            max_cache_bytes: bound on decoded chunks, for each of up to four ways in which writers lay out columns.
            max_sample_bytes: bound on what is made of one sample, and on the chunks of it.
        """
        self.num_samples = 0
        self.num_decoded_chunks = 0
        self._max_cache_bytes, self._max_sample_bytes = max_cache_bytes, max_sample_bytes
        self._shelves: dict[Layout, _Shelf] = {}
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
        columns = [
            _column(parts, np.concatenate(lengths) if len(lengths) > 1 else lengths[0], is_squeezed)
            for parts, lengths, is_squeezed in zip(self._parts, self._lengths, squeezed, strict=True)
        ]
        infos = SampleInfos(
            np.array([item.key for item in self._items], np.uint64),
            np.array([item.priority for item in self._items], np.float64),
            np.array([info.probability for info in self._infos], np.float64),
            np.array([info.table_size for info in self._infos], np.int64),
            np.array([item.times_sampled for item in self._items], np.int32),
        )
        self._begin()
        return columns, infos

    def _begin(self) -> None:
        num_columns = len(self._current.layout.squeezed) if self._current else 0
        self._rows: list[Rows] = []  # of samples that are not gathered yet
        self._parts: list[list[Array]] = [[] for _ in range(num_columns)]  # what is gathered, by column
        self._lengths: list[list[npt.NDArray[np.int64]]] = [[] for _ in range(num_columns)]
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
            rows = np.concatenate(of_group)
            lengths = np.fromiter(map(len, of_group), np.int64, len(of_group))
            for number, column in zip(group.columns, arena.columns, strict=True):
                self._parts[number].append(column.take(rows, axis=0, mode="clip"))
                self._lengths[number].append(lengths)
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
            shelf, rows = self._load(layout, shelf, slices_of, _parse_chunks(chunks))
            shelf.remember(trajectory, rows)
        if shelf is not self._current:
            self._gather()
            self._current, self._known = shelf, shelf.known
            if not self.num_samples:
                self._begin()
        return rows

    def _load(
        self, layout: Layout, shelf: _Shelf | None, slices_of: list[list[Slice]], chunks: Mapping[int, Any]
    ) -> tuple[_Shelf, Rows]:
        """Decode the chunks that are not known, and return the rows of an item."""
        # Everything is decoded and checked before anything is stored: a bad sample changes nothing.
        budget = _Budget(self._max_sample_bytes)
        fresh = [
            {key: _decode(chunks, key, group, budget) for key in _keys(slices) if key not in spans}
            for group, slices, spans in zip(layout.groups, slices_of, _spans(shelf, layout), strict=True)
        ]
        if shelf and not all(
            arena.holds(columns) for arena, new in zip(shelf.arenas, fresh, strict=True) for columns in new.values()
        ):
            shelf = None
            for group, new, slices in zip(layout.groups, fresh, slices_of, strict=True):
                new |= {key: _decode(chunks, key, group, budget) for key in _keys(slices) if key not in new}
        self.num_decoded_chunks += sum(map(len, fresh))
        new_shelf = shelf or self._new_shelf(layout, fresh)
        for arena, new, slices in zip(new_shelf.arenas, fresh, slices_of, strict=True):
            _check(arena, new, slices, self._max_sample_bytes)
        if shelf is None:
            self._shelves.pop(layout, None)
            while len(self._shelves) >= _MAX_LAYOUTS:
                del self._shelves[next(iter(self._shelves))]
            self._shelves[layout] = new_shelf
        rows = []
        for group, arena, new, slices in zip(layout.groups, new_shelf.arenas, fresh, slices_of, strict=True):
            decode = functools.partial(_decode, chunks, group=group, budget=_Budget())
            _place(arena, _keys(slices), new, decode)
            rows.append(_rows(arena, slices))
        return new_shelf, tuple(rows)

    def _new_shelf(self, layout: Layout, examples: Sequence[Mapping[int, Sequence[Array]]]) -> _Shelf:
        """Share the cache among the groups so that each holds as many rows."""
        shelf = _Shelf(layout, self._max_cache_bytes // _KNOWN_SHARE)
        firsts = [next(iter(columns.values())) for columns in examples]
        weights = [1 + sum(column.nbytes // len(column) for column in columns) for columns in firsts]
        before_loss = functools.partial(self._before_loss, shelf)
        for columns, weight in zip(firsts, weights, strict=True):
            max_bytes = self._max_cache_bytes * weight // sum(weights)
            shelf.arenas.append(Arena(columns, max_bytes, self._max_sample_bytes, before_loss))
        return shelf

    def _before_loss(self, shelf: _Shelf) -> None:
        """Read for the last time what an arena is about to lose."""
        if shelf is self._current:
            self._gather()
        shelf.forget()


def split_samples(columns: Sequence[Column], infos: SampleInfos) -> Iterator[tuple[list[Array], SampleInfo]]:
    """Yield each sample's columns, [T, ...] or [...] where it is squeezed, and its info."""
    per_column = [column.split() for column in columns]
    numbers = zip(
        infos.keys.tolist(),
        infos.priorities.tolist(),
        infos.probabilities.tolist(),
        infos.table_sizes.tolist(),
        infos.times_sampled.tolist(),
        strict=True,
    )
    for leaves, info in zip(zip(*per_column, strict=True), itertools.starmap(SampleInfo, numbers), strict=True):
        yield list(leaves), info


class _Budget:
    """Bytes that may still be decoded for a sample."""

    def __init__(self, num_bytes: int = tensors.MAX_TENSOR_BYTES) -> None:
        self.num_bytes = num_bytes


def _check(arena: Arena, decoded: Mapping[int, Sequence[Array]], slices: Sequence[Slice], max_bytes: int) -> None:
    if not all(arena.holds(columns) for columns in decoded.values()):
        raise FormatError("the chunks of an item differ in dtype or shape.")
    for key, offset, length in slices:
        start, stop = (0, len(decoded[key][0])) if key in decoded else arena.spans[key]
        if start + offset + length > stop:
            raise _outside(offset, length, stop - start)
    if sum(length for _, _, length in slices) > arena.max_rows:
        raise _too_large(max_bytes)


def _outside(offset: int, length: int, chunk_length: int) -> FormatError:
    return FormatError(f"an item names rows {offset}+{length} of a chunk of {chunk_length}.")


def _too_large(max_bytes: int) -> UnsafeDataError:
    return UnsafeDataError(
        f"a sample of more than {max_bytes} bytes. Raise `max_sample_bytes` if you trust the writer."
    )


def _parse_chunks(chunks: Sequence[bytes]) -> dict[int, Any]:
    try:
        parsed = [messages.ChunkData.FromString(chunk) for chunk in chunks]
    except DecodeError as error:
        raise FormatError(f"a chunk that cannot be read ({error}).") from None
    return {chunk.chunk_key: chunk for chunk in parsed}


def _decode(by_key: Mapping[int, Any], key: int, group: Group, budget: _Budget) -> list[Array]:
    """Return the columns of a group in one chunk, all of one length."""
    chunk = by_key.get(key)
    if chunk is None:
        raise FormatError(f"an item names chunk {key}, which did not come with it.")
    columns = []
    for index in group.tensors:
        if index >= len(chunk.data.tensors):
            raise FormatError(f"an item names tensor {index} of a chunk of {len(chunk.data.tensors)}.")
        column = tensors.decode(
            chunk.data.tensors[index], delta_encoded=chunk.delta_encoded, max_bytes=budget.num_bytes
        )
        if column.ndim == 0 or len(column) == 0:
            raise FormatError("a tensor of a chunk has no rows.")
        budget.num_bytes -= column.nbytes
        columns.append(column)
    # Rows that only some tensors have are rows that no good item names.
    length = min(map(len, columns))
    return [column[:length] for column in columns]


def _spans(shelf: _Shelf | None, layout: Layout) -> list[Mapping[int, tuple[int, int]]]:
    return [arena.spans for arena in shelf.arenas] if shelf else [{} for _ in layout.groups]


def _keys(slices: Sequence[Slice]) -> list[int]:
    """Return the chunks of slices, each once."""
    return list(dict.fromkeys([key for key, _, _ in slices]))


def _place(
    arena: Arena, keys: Iterable[int], fresh: dict[int, list[Array]], decode: Callable[[int], list[Array]]
) -> None:
    """Have all of an item's chunks in the arena at once, whatever must make room for them."""
    for attempt in range(3):
        missing = [key for key in keys if key not in arena.spans]
        if not missing:
            return
        # A chunk that was there may have made room for another one; then it is decoded again.
        if attempt:
            fresh |= {key: decode(key) for key in keys if key not in fresh}
        if attempt > 1:
            missing = list(keys)
            arena.clear([fresh[key] for key in keys])
        for key in missing:
            arena.put(key, fresh[key])


def _rows(arena: Arena, slices: Sequence[Slice]) -> Array:
    """Return which rows of the arena slices are."""
    spans = arena.spans
    ranges = [np.arange(spans[key][0] + offset, spans[key][0] + offset + length) for key, offset, length in slices]
    return ranges[0] if len(ranges) == 1 else np.concatenate(ranges)


def _column(parts: list[Array], lengths: npt.NDArray[np.int64], squeezed: bool) -> Column:
    if len(parts) == 1:
        return Column(parts[0], lengths, squeezed)
    kinds = [(part.dtype, part.shape[1:]) for part in parts]
    if kinds.count(kinds[0]) == len(kinds):
        return Column(np.concatenate(parts), lengths, squeezed)
    # Samples of different shapes: where the shape changes, a sample begins.
    alike = [
        np.concatenate([part for _, part in run])
        for _, run in itertools.groupby(zip(kinds, parts, strict=True), lambda pair: pair[0])
    ]
    rows: list[Array] = []
    remaining = iter(lengths.tolist())
    for part in alike:
        at = 0
        while at < len(part):
            length = next(remaining)
            rows.append(part[at : at + length])
            at += length
    return Column(rows, lengths, squeezed)
