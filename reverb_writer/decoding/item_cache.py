"""A cache of the items of one layout: their decoded chunks, and the row ranges of each item in them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from reverb_writer.decoding.chunks import ChunkRing, EncodedChunk, EncodedChunks
from reverb_writer.decoding.joined_rows import JoinedRows, joined_ranges
from reverb_writer.errors import FormatError, UnsafeDataError
from reverb_writer.protocol.trajectory_parsing import ItemLayout, Slice

RowRanges = tuple[tuple[int, ...], ...]
"""Row ranges of an item in each partition's ring: the first row and the number of rows of one range after the other.

No range begins where the one before it ends.
"""

_ENTRY_BYTES, _RANGE_BYTES = 320, 16  # including the item's key in `_items_of`


class Partition(NamedTuple):
    """A group of columns of the layout, which are cached in one ring."""

    columns: tuple[int, ...]  # indices of the columns in the item
    tensors: tuple[int, ...]  # for each column, the index of its tensor in the chunks
    ring: ChunkRing  # has their decoded chunks
    max_rows: int  # limit of the rows of a sample


class ItemCache:
    """Items of one layout. Not thread-safe.

    Attributes:
        layout: the layout of the items.
        spec: the encoded spec of the items; empty if they have none.
        kinds_at: index of the chunks' tensor with the kinds of the rows, which is the last column here; None without.
        partitions: one per group of columns.
        form: dtype and row shape of each column, and whether the column is scalar.
        items: number of each known item, by key. An item's trajectory never changes, so its rows are valid until a ring
            evicts one of its chunks; then call `forget_items`.
    """

    def __init__(
        self,
        layout: ItemLayout,
        spec: bytes,
        kinds_at: int | None,
        partitions: Sequence[Partition],
        max_item_bytes: int,
    ) -> None:
        """Start without items; `max_item_bytes` is the memory limit of the row ranges."""
        self.layout, self.spec, self.kinds_at, self.partitions = layout, spec, kinds_at, partitions
        arrays = self._by_column([partition.ring.columns for partition in partitions])[: len(layout.is_scalar)]
        self.form = [(array.dtype, array.shape[1:], bare) for array, bare in zip(arrays, layout.is_scalar, strict=True)]
        self._max_item_bytes = max_item_bytes
        self._num_items = self._item_bytes = 0  # including forgotten items, whose places are not used again
        self.items: dict[int, int] = {}
        self._items_of: dict[int, list[int]] = {}  # keys of the items that refer to a chunk, by the chunk's key
        self.clear_items()

    @property
    def num_bytes(self) -> int:
        """The size of all decoded chunks."""
        return sum(partition.ring.num_bytes for partition in self.partitions)

    def clear(self) -> None:
        """Forget all items and chunks; no row is needed any more."""
        self.clear_items()
        for partition in self.partitions:
            partition.ring.clear()

    def add_item(self, key: int, slices_of: Sequence[Sequence[Slice]], ranges: RowRanges) -> int | None:
        """Keep the row ranges of an item and return its number, or None if `clear_items` must make room first."""
        item = self._num_items
        num_ranges = sum(map(len, ranges)) // 2
        num_bytes = self._item_bytes + _ENTRY_BYTES + _RANGE_BYTES * num_ranges
        if item and num_bytes > self._max_item_bytes:
            return None
        self._item_bytes = num_bytes
        self._num_items += 1
        self._new.append(ranges)
        self.items[key] = item
        for slices in slices_of:
            for chunk_key, _, _ in slices:
                self._items_of.setdefault(chunk_key, []).append(key)
        return item

    def rows_of(self, items: Sequence[int]) -> list[tuple[npt.NDArray[Any], JoinedRows]]:
        """Return the array of each column, and the rows of some items in it, given the items' numbers.

        The last column has the kinds of the rows, if the items have any.
        """
        if self._new:
            for number, kept in enumerate(self._ranges):
                kept.extend([ranges[number] for ranges in self._new])
            self._new.clear()
        numbers = np.array(items, np.intp)
        joined = [of.rows(numbers) for of in self._ranges]
        pairs = zip(self.partitions, joined, strict=True)
        return self._by_column([[(array, rows) for array in partition.ring.columns] for partition, rows in pairs])

    def _by_column(self, of_partitions: Sequence[Sequence[Any]]) -> list[Any]:
        """Return the partitions' results in the order of the columns."""
        found: dict[int, Any] = {}
        for partition, values in zip(self.partitions, of_partitions, strict=True):
            found.update(zip(partition.columns, values, strict=True))
        return [found[column] for column in range(len(found))]

    def forget_items(self, chunk_keys: Iterable[int]) -> None:
        """Forget the items that refer to one of these chunks."""
        for chunk_key in chunk_keys:
            for key in self._items_of.pop(chunk_key, ()):
                self.items.pop(key, None)

    def clear_items(self) -> None:
        """Forget all items, but no chunks. First call `rows_of` for the items whose rows are needed."""
        self.items.clear()
        self._items_of.clear()
        self._ranges = [_ItemRanges() for _ in self.partitions]
        self._new: list[RowRanges] = []  # of the last items, which are not in `_ranges` yet
        self._num_items = self._item_bytes = 0

    def find_rows(self, slices_of: Sequence[Sequence[Slice]]) -> RowRanges | None:
        """Return the row ranges of an item; None if a ring lacks some of its rows."""
        ranges_of = []
        for partition, slices in zip(self.partitions, slices_of, strict=True):
            rows_of = partition.ring.rows_of
            ranges: list[int] = []
            num_rows = 0
            for key, offset, length in slices:
                rows = rows_of.get(key)
                if rows is None or rows[0] + offset + length > rows[1]:
                    return None
                start = rows[0] + offset
                if ranges and start == ranges[-2] + ranges[-1]:
                    ranges[-1] += length
                else:
                    ranges += (start, length)
                num_rows += length
            if num_rows > partition.max_rows:  # an item may refer to a chunk many times
                raise UnsafeDataError(
                    f"a sample of {num_rows} rows, expected at most {partition.max_rows} for `max_sample_bytes`. If "
                    "you trust the writer, raise it."
                )
            ranges_of.append(tuple(ranges))  # the garbage collector does not track tuples of integers
        return tuple(ranges_of)

    def missing_chunks(
        self, slices_of: Sequence[Sequence[Slice]], chunks: EncodedChunks
    ) -> list[dict[int, EncodedChunk]] | None:
        """Return the chunks of an item that each ring lacks, by key; None if a ring does not accept one."""
        missing = []
        for partition, slices in zip(self.partitions, slices_of, strict=True):
            ring = partition.ring
            of_partition: dict[int, EncodedChunk] = {}
            for key, offset, length in slices:
                rows = ring.rows_of.get(key)
                if rows:
                    chunk_length = rows[1] - rows[0]
                else:
                    chunk = of_partition.get(key)
                    if chunk is None:
                        chunk = of_partition[key] = chunks.get(key, partition.tensors)
                        if not ring.accepts(chunk):
                            return None
                    chunk_length = chunk.length
                if offset + length > chunk_length:
                    raise FormatError(f"an item refers to rows {offset}+{length} of a chunk of {chunk_length}.")
            missing.append(of_partition)
        return missing


class _ItemRanges:
    """Ranges of items' rows in a ring; the ranges of each item are in order."""

    def __init__(self) -> None:
        self._firsts, self._sizes = np.zeros((2, 64), np.int64)  # ranges of all items, one after the other
        self._starts, self._counts = np.zeros((2, 64), np.int64)  # the part of each item in them
        self._num_items = self._num_ranges = 0

    def extend(self, ranges: Sequence[tuple[int, ...]]) -> None:
        """Add items by their row ranges; many at once, because a call costs more than an item."""
        numbers = np.fromiter(itertools.chain.from_iterable(ranges), np.int64)
        counts = np.fromiter(map(len, ranges), np.int64) // 2
        self._starts = _put(self._starts, self._num_items, self._num_ranges + counts.cumsum() - counts)
        self._counts = _put(self._counts, self._num_items, counts)
        self._firsts = _put(self._firsts, self._num_ranges, numbers[::2])
        self._sizes = _put(self._sizes, self._num_ranges, numbers[1::2])
        self._num_items += len(ranges)
        self._num_ranges += len(numbers) // 2

    def rows(self, items: npt.NDArray[np.intp]) -> JoinedRows:
        """Return the rows of some items, by their numbers."""
        starts = self._starts[items]
        if self._num_items == self._num_ranges:
            return JoinedRows(self._firsts[starts], self._sizes[starts])
        counts = self._counts[items]
        ranges = joined_ranges(starts, counts)
        return JoinedRows(self._firsts[ranges], self._sizes[ranges], None if len(ranges) == len(items) else counts)


def _put(array: npt.NDArray[Any], at: int, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Write values into an array, or into a longer copy of it; return the array."""
    stop = at + len(values)
    if stop > len(array):
        longer = np.zeros(max(2 * len(array), stop), array.dtype)
        longer[:at] = array[:at]
        array = longer
    array[at:stop] = values
    return array
