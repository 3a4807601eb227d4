"""Samples -> integers -> columns: each chunk is decoded once, and many samples are gathered at a time.

    add(sample): trajectory -> slices; chunks that are new -> arena; rows remembered as integers
    take():      all samples added so far, one array a column, their rows end to end

A sample that is damaged or unsafe raises and leaves nothing behind.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from reverb_writer.errors import FormatError, UnsafeDataError
from reverb_writer.wire import messages, tensors
from reverb_writer.wire.arena import Arena
from reverb_writer.wire.responses import RawSample
from reverb_writer.wire.trajectories import Group, Layout, Slice, parse

__all__ = ["MAX_SAMPLE_BYTES", "Assembly", "Column", "SampleInfo", "SampleInfos", "split_samples"]

Array = npt.NDArray[Any]

MAX_SAMPLE_BYTES = 1 << 30
"""Size of the largest sample that is decoded, unless told otherwise."""

_MAX_LAYOUTS = 4


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


class _Pending(NamedTuple):
    """Rows of a group's arena that are to be gathered."""

    starts: list[int]
    counts: list[int]
    lengths: list[int]


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
        self._arenas: dict[Layout, list[Arena]] = {}
        self._layout: Layout | None = None
        self._current: list[Arena] = []  # the arenas of that layout; none before its first sample
        self._pending: list[_Pending] = []
        self._begin()

    @property
    def cache_bytes(self) -> int:
        """Return what decoded chunks occupy."""
        return sum(arena.num_bytes for arenas in self._arenas.values() for arena in arenas)

    def add(self, sample: RawSample) -> None:
        """Add a sample.

        Raises:
            UnsafeDataError: a tensor must not be decoded, or the sample is too large. The sample is left out.
            FormatError: parts of it contradict each other, or others of the batch. Likewise.
        """
        layout, slices_of = parse(sample.info.item.flat_trajectory)
        if layout is not self._layout:
            self._change_layout(layout)
        found = []
        for arena, slices in zip(self._current, slices_of):  # noqa: B905  # no arenas before the first sample
            spans = arena.spans
            starts, counts, total = [], [], 0
            for key, offset, length in slices:
                span = spans.get(key)
                if span is None:
                    break
                start = span[0] + offset
                total += length
                if start + length > span[1]:
                    raise _outside(offset, length, span[1] - span[0])
                starts.append(start)
                counts.append(length)
            else:
                if total > arena.max_rows:
                    raise _too_large(self._max_sample_bytes)
                found.append((starts, counts, total))
                continue
            break
        if len(found) == len(slices_of):
            for pending, (starts, counts, total) in zip(self._pending, found, strict=True):
                pending.starts.extend(starts)
                pending.counts.extend(counts)
                pending.lengths.append(total)
        else:
            self._load(layout, slices_of, sample.chunks)
        self._infos.append(sample.info)
        self.num_samples += 1

    def take(self) -> tuple[list[Column], SampleInfos]:
        """Return the columns of all samples added, and their infos; begin anew."""
        self._gather()
        squeezed = self._layout.squeezed if self._layout else ()
        columns = [
            _column(parts, np.concatenate(lengths) if len(lengths) > 1 else lengths[0], is_squeezed)
            for parts, lengths, is_squeezed in zip(self._parts, self._lengths, squeezed, strict=True)
        ]
        of_items = [info.item for info in self._infos]
        infos = SampleInfos(
            np.array([item.key for item in of_items], np.uint64),
            np.array([item.priority for item in of_items], np.float64),
            np.array([info.probability for info in self._infos], np.float64),
            np.array([info.table_size for info in self._infos], np.int64),
            np.array([item.times_sampled for item in of_items], np.int32),
        )
        self._begin()
        return columns, infos

    def _begin(self) -> None:
        num_columns = len(self._layout.squeezed) if self._layout else 0
        self._parts: list[list[Array]] = [[] for _ in range(num_columns)]
        self._lengths: list[list[npt.NDArray[np.int64]]] = [[] for _ in range(num_columns)]
        self._infos: list[Any] = []
        self.num_samples = 0

    def _change_layout(self, layout: Layout) -> None:
        """Go on with samples of another writer."""
        if self._layout and self.num_samples and layout.squeezed != self._layout.squeezed:
            raise FormatError(
                f"an item of {len(layout.squeezed)} columns in a batch whose first has {len(self._layout.squeezed)}, "
                "or they are not squeezed alike. Its actors do not agree."
            )
        self._gather()
        self._layout = layout
        self._current = self._arenas.get(layout, [])
        self._pending = [_Pending([], [], []) for _ in layout.groups]
        if not self.num_samples:
            self._begin()

    def _load(self, layout: Layout, slices_of: list[list[Slice]], chunks: Sequence[bytes]) -> None:
        """Decode the chunks that are not known, and remember the sample's rows."""
        by_key = _parse_chunks(chunks)
        arenas = self._current
        # Everything is decoded and checked before anything is stored: a bad sample changes nothing.
        budget = _Budget(self._max_sample_bytes)
        fresh = []
        for number, (group, slices) in enumerate(zip(layout.groups, slices_of, strict=True)):
            known: Mapping[int, tuple[int, int]] = arenas[number].spans if arenas else {}
            keys = list(dict.fromkeys(key for key, _, _ in slices))
            decoded = {key: _decode(by_key, key, group, budget) for key in keys if key not in known}
            if decoded and arenas and not arenas[number].holds(next(iter(decoded.values()))):
                decoded |= {key: _decode(by_key, key, group, budget) for key in keys if key in known}
                arenas = []
            self.num_decoded_chunks += len(decoded)
            fresh.append(decoded)
        if not arenas:
            for decoded, group, slices in zip(fresh, layout.groups, slices_of, strict=True):
                missing = dict.fromkeys(key for key, _, _ in slices if key not in decoded)
                decoded |= {key: _decode(by_key, key, group, budget) for key in missing}
            arenas = self._make_arenas([next(iter(decoded.values())) for decoded in fresh])
        for arena, decoded, slices in zip(arenas, fresh, slices_of, strict=True):
            _check(arena, decoded, slices, self._max_sample_bytes)
        if arenas is not self._current:
            self._gather()
            self._current = arenas
            self._arenas.pop(layout, None)
            while len(self._arenas) >= _MAX_LAYOUTS:
                del self._arenas[next(iter(self._arenas))]
            self._arenas[layout] = arenas
        for pending, arena, group, decoded, slices in zip(
            self._pending, arenas, layout.groups, fresh, slices_of, strict=True
        ):
            for key, offset, length in slices:
                # A chunk that was there may just have made room for another one; then it is decoded again.
                span = arena.spans.get(key) or arena.put(
                    key, decoded.get(key) or _decode(by_key, key, group, _Budget())
                )
                pending.starts.append(span[0] + offset)
                pending.counts.append(length)
            pending.lengths.append(sum(length for _, _, length in slices))

    def _make_arenas(self, examples: Sequence[Sequence[Array]]) -> list[Arena]:
        """Share the cache among the groups so that each holds as many rows."""
        weights = [1 + sum(column.nbytes // len(column) for column in columns) for columns in examples]
        return [
            Arena(columns, self._max_cache_bytes * weight // sum(weights), self._max_sample_bytes, self._gather)
            for columns, weight in zip(examples, weights, strict=True)
        ]

    def _gather(self) -> None:
        """Copy the rows remembered so far out of the arenas."""
        groups = self._layout.groups if self._layout and self._current else ()
        for group, arena, pending in zip(groups, self._current, self._pending, strict=bool(groups)):
            if pending.starts:
                rows = _ranges(np.array(pending.starts), np.array(pending.counts))
                for number, column in zip(group.columns, arena.columns, strict=True):
                    self._parts[number].append(column.take(rows, axis=0, mode="clip"))
                pending.starts.clear()
                pending.counts.clear()
            if pending.lengths:
                lengths = np.array(pending.lengths, np.int64)
                for number in group.columns:
                    self._lengths[number].append(lengths)
                pending.lengths.clear()


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


def _ranges(starts: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the numbers of all ranges, end to end: starts [5, 2], counts [2, 3] -> 5 6 2 3 4."""
    ends = np.cumsum(counts)
    rows = np.arange(ends[-1], dtype=np.int64)
    rows += np.repeat(starts - (ends - counts), counts)
    return rows


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
