"""Samples -> integers -> columns: each chunk is decoded once, and many samples are gathered at a time.

    add(samples): trajectory -> slices -> chunks that are new go to the arena -> rows of the arena, remembered
    take():       all samples added so far, one array a column, their rows end to end

What a trajectory means is remembered, too, while its chunks are in the arena: an item that is sampled again costs one
look-up. A sample that is damaged or unsafe is left out, and leaves nothing behind.
"""

from __future__ import annotations

import collections
import functools
import itertools
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from reverb_writer.decoding.chunk_ring import Arena, row_bytes
from reverb_writer.decoding.column_builder import Output
from reverb_writer.decoding.encoded_chunk import MAX_PLACE_BYTES, DtypesAndShapes, Lessons, SentChunks
from reverb_writer.decoding.layout_cache import Part, Rows, Shelf
from reverb_writer.decoding.samples import Column, SampleInfos
from reverb_writer.errors import FormatError, ReverbWriterError, UnsafeDataError
from reverb_writer.protocol.trajectory_parsing import Layout, Slice, parse

__all__ = ["MAX_SAMPLE_BYTES", "Assembly"]

Array = npt.NDArray[Any]

MAX_SAMPLE_BYTES = 1 << 30
"""Size of the largest sample that is decoded, unless told otherwise."""

_MAX_LAYOUTS = 4
_KNOWN_SHARE = 4  # trajectories that are remembered take so much of what decoded chunks may take,
_PLACE_SHARE = 16  # and where chunks have their contents

# Columns that take so little of a row are kept apart, for so many times the rows: of a table of frames that is larger
# than the cache, only the frames are decoded again.
_LIGHT_SHARE, _LIGHT_ROWS = 1 / 128, 16


class Assembly:
    """Put samples together. Not thread-safe, but for the figures: `num_decoded_chunks` and `cache_bytes`.

    Attributes:
        num_decoded_chunks: chunks decoded so far; one with columns in several arenas counts for each.
    """

    def __init__(
        self,
        max_cache_bytes: int,
        max_sample_bytes: int,
        *,
        batch_size: int = 1,
        num_buffers: int = 0,
    ) -> None:
        """Start with nothing.

        Args:
            max_cache_bytes: bound on decoded chunks, for each of up to four ways in which writers lay out columns; a
                quarter more goes to what is known of items; a sixteenth (16 MB at most), and 32 MB at most, to where
                chunks have their contents.
            max_sample_bytes: bound on what is made of one sample, and on the chunks of it.
            batch_size: how many samples are likely to be taken together.
            num_buffers: use the arrays of the batch so many batches ago again; 0 for new ones each time.
        """
        self._batch_size, self._num_buffers = batch_size, num_buffers
        self._used: collections.deque[list[Output]] = collections.deque()
        self.num_decoded_chunks = 0
        self._max_cache_bytes, self._max_sample_bytes = max_cache_bytes, max_sample_bytes
        self._shelves: dict[Layout, Shelf] = {}
        self._lessons = Lessons(min(max_cache_bytes // _PLACE_SHARE, MAX_PLACE_BYTES))
        self._current: Shelf | None = None
        self._known: Mapping[bytes, Rows] = {}  # of the current shelf
        self._begin()

    @property
    def num_samples(self) -> int:
        """Return how many samples were added and not taken."""
        return len(self._infos)

    @property
    def cache_bytes(self) -> int:
        """Return what decoded chunks occupy."""
        return sum(part.arena.num_bytes for shelf in list(self._shelves.values()) for part in shelf.parts)

    def add(self, samples: Iterable[Any]) -> list[ReverbWriterError]:
        """Add samples, and return why some of them were left out.

        An UnsafeDataError: a tensor must not be decoded, or the sample is too large. A FormatError: parts of it are
        damaged, or contradict each other or others of the batch.

        Args:
            samples: messages of `reverb_writer.sampled.Entry` that are complete.
        """
        errors: list[ReverbWriterError] = []
        for sample in samples:
            info = sample.info
            item = info.item
            trajectory = item.flat_trajectory
            rows = self._known.get(trajectory)
            if rows is None:
                try:
                    rows = self._learn(trajectory, sample.data)
                except (UnsafeDataError, FormatError) as error:
                    errors.append(error)
                    continue
            self._rows.append(rows)
            self._infos.append(info)
            self._items.append(item)
        return errors

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
        self._rows: list[Rows] = []  # of samples that are in the current shelf,
        self._num_gathered = (
            [0] * len(self._current.parts) if self._current else []
        )  # and of how many each part is done
        spent = self._used.popleft() if len(self._used) >= max(self._num_buffers, 1) else []
        if len(spent) == num_columns:
            self._outputs = [Output(output.largest) for output in spent]
        else:
            self._outputs = [Output() for _ in range(num_columns)]
        self._infos: list[Any] = []  # of all samples of the batch
        self._items: list[Any] = []

    def _gather(self) -> None:
        """Copy all rows remembered so far out of the arenas."""
        for number in range(len(self._num_gathered)):
            self._gather_part(number)
        self._rows.clear()

    def _gather_part(self, number: int) -> None:
        """Copy those of one part, and do not do so again."""
        of_part = [rows[number] for rows in self._rows[self._num_gathered[number] :]]
        if self._current and of_part:
            part = self._current.parts[number]
            rows, lengths = _expand(of_part)
            for column, rows_of_column in zip(part.columns, part.arena.columns, strict=True):
                self._outputs[column].add(rows_of_column, rows, lengths, self._batch_size)
            self._num_gathered[number] = len(self._rows)

    def _learn(self, trajectory: bytes, chunks: Sequence[bytes]) -> Rows:
        """Return the rows of an item that is new, or of another layout than the one before."""
        layout, slices_of = parse(trajectory)
        if self._current and self._infos and layout.squeezed != self._current.layout.squeezed:
            raise FormatError(
                f"an item of {len(layout.squeezed)} columns in a batch whose first has "
                f"{len(self._current.layout.squeezed)}, or they are not squeezed alike. Its actors do not agree."
            )
        shelf = self._shelves.get(layout)
        rows = shelf.known.get(trajectory) if shelf and shelf is not self._current else None
        if shelf and rows:
            self._enter(shelf)
            return rows
        rows = self._load(layout, shelf, slices_of, SentChunks(chunks, self._max_sample_bytes, self._lessons))
        self._shelves[layout].remember(trajectory, rows)
        return rows

    def _load(
        self, layout: Layout, shelf: Shelf | None, slices_of: Sequence[Sequence[Slice]], chunks: SentChunks
    ) -> Rows:
        """Decode the chunks that are not there, and return the rows of an item."""
        # Dtypes, shapes and sizes are checked before anything is decoded, and what is decoded is stored only if it is
        # good: a bad sample changes nothing.
        missing = shelf.missing(slices_of, chunks) if shelf else None
        if shelf is None or missing is None:
            shelf = self._new_shelf(layout, slices_of, chunks)
            missing = shelf.missing(slices_of, chunks)
        for part in shelf.parts:
            if sum([length for _, _, length in slices_of[part.group]]) > part.max_rows:
                raise UnsafeDataError(
                    f"a sample of more than {self._max_sample_bytes} bytes. Raise `max_sample_bytes` if you trust the "
                    "writer."
                )
        for has_room in (False, False, True):
            if has_room or (missing and not shelf.fits(missing)):
                shelf.make_room(slices_of, chunks)
                missing = shelf.missing(slices_of, chunks)
            if missing is None:
                raise FormatError("the chunks of an item differ in dtype or shape.")
            self._enter(shelf)
            for part, of_part in zip(shelf.parts, missing, strict=True):
                for key, chunk in of_part.items():
                    part.arena.put(key, chunk)
                self.num_decoded_chunks += len(of_part)
            rows = shelf.rows(slices_of)
            if rows:
                return rows
            # A chunk that was there has made room for another one, and is decoded again. If that pushes out the next,
            # the cache is too small for them and others.
            missing = shelf.missing(slices_of, chunks)
        raise FormatError("the chunks of an item are not what they were.")

    def _enter(self, shelf: Shelf) -> None:
        """Make a shelf the current one."""
        if shelf is self._current:
            return
        self._gather()
        self._current, self._known, self._num_gathered = shelf, shelf.known, [0] * len(shelf.parts)
        if not self._infos:
            self._begin()
        if self._shelves.get(shelf.layout) is not shelf:
            self._shelves.pop(shelf.layout, None)
            while len(self._shelves) >= _MAX_LAYOUTS:
                del self._shelves[next(iter(self._shelves))]
            self._shelves[shelf.layout] = shelf

    def _new_shelf(self, layout: Layout, slices_of: Sequence[Sequence[Slice]], chunks: SentChunks) -> Shelf:
        """Share the cache among the parts so that each holds as many rows, and light ones more."""
        shelf = Shelf(layout, self._max_cache_bytes // _KNOWN_SHARE)
        # Weak, for an arena that is given up must go at once, not when the garbage collector finds a cycle.
        owner, lost = weakref.ref(self), weakref.ref(shelf)

        def before_loss(number: int) -> None:
            assembly, its_shelf = owner(), lost()
            if assembly and its_shelf:
                assembly._before_loss(its_shelf, number)  # noqa: SLF001  # its own

        parts = []
        for number, (group, slices) in enumerate(zip(layout.groups, slices_of, strict=True)):
            chunk = chunks.peek(slices[0][0], group.tensors)
            kinds = chunk.kind.dtypes_and_shapes
            max_rows = self._max_sample_bytes // max(sum(map(row_bytes, kinds)), 1)
            light = _light(kinds)
            for of_part in (np.flatnonzero(~light).tolist(), np.flatnonzero(light).tolist()):
                if of_part:
                    weight = chunk.num_bytes // chunk.length
                    if light[of_part[0]]:
                        weight = _LIGHT_ROWS * sum([row_bytes(kinds[index]) for index in of_part])
                    parts.append((number, group, of_part, [kinds[index] for index in of_part], 1 + weight, max_rows))
        total = sum([weight for *_, weight, _ in parts])
        for number, group, of_part, kinds, weight, max_rows in parts:
            columns, indices = (tuple([numbers[index] for index in of_part]) for numbers in group)
            its_loss = functools.partial(before_loss, len(shelf.parts))
            arena = Arena(kinds, self._max_cache_bytes * weight // total, its_loss)
            shelf.parts.append(Part(number, columns, indices, arena, max_rows))
        return shelf

    def _before_loss(self, shelf: Shelf, number: int) -> None:
        """Read for the last time what the arena of a part is about to lose."""
        if shelf is self._current:
            self._gather_part(number)
        shelf.forget()


def _light(dtypes_and_shapes: DtypesAndShapes) -> npt.NDArray[np.bool_]:
    """Return which columns are small beside the others. Those of strings are not, for they may be of any size."""
    sizes = np.array([0 if kind[0].kind == "O" else row_bytes(kind) for kind in dtypes_and_shapes])
    smallest_first = np.argsort(sizes, kind="stable")
    light = np.empty(len(sizes), bool)
    light[smallest_first] = sizes[smallest_first].cumsum() <= sizes.sum() * _LIGHT_SHARE
    return light & (sizes > 0)


def _expand(of_samples: Sequence[tuple[int, ...]]) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.int64]]:
    """Return the rows of samples end to end, and how many each has."""
    num_slices = np.fromiter(map(len, of_samples), np.intp, len(of_samples)) // 2
    numbers = np.fromiter(itertools.chain.from_iterable(of_samples), np.intp, 2 * int(num_slices.sum()))
    starts, lengths = numbers[::2], numbers[1::2]
    stops = lengths.cumsum()
    rows = np.arange(stops[-1]) + (starts - stops + lengths).repeat(lengths)
    return rows, np.add.reduceat(lengths, num_slices.cumsum() - num_slices)
