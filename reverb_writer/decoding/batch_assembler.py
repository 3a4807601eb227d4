"""Assemble batches from samples: decode each chunk once, and copy the rows of many samples at a time.

    add(samples)   trajectory -> slices -> chunks that are not cached are decoded -> row ranges of the item
    take()         all samples added so far: one array per column, with the rows of all samples
    take_each()    all samples added so far, one by one; they may have any forms

Row ranges are cached together with the chunks, so an item that is sampled again needs one look-up. A damaged or unsafe
sample is left out, and changes nothing.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from reverb_writer.decoding.chunks import ChunkRing, EncodedChunk, EncodedChunks, row_bytes
from reverb_writer.decoding.item_cache import ItemCache, Partition, RowRanges
from reverb_writer.decoding.joined_rows import JoinedRows
from reverb_writer.decoding.samples import ArrayMemory, BatchInfo, Column, PartMemory, SampleInfo, SampleRows, copied
from reverb_writer.decoding.table_structure import TableStructure
from reverb_writer.errors import FormatError, ReverbWriterError, StructureError, UnsafeDataError
from reverb_writer.protocol.responses import NO_SAMPLES, Samples
from reverb_writer.protocol.signatures import packer, packer_of
from reverb_writer.protocol.trajectory_parsing import ColumnGroup, ItemLayout, Parsed, Slice, parse_trajectory

MAX_SAMPLE_BYTES = 1 << 30
"""Default limit of the decoded size of a sample, in bytes."""

_MAX_ITEM_CACHES = 4
_ITEMS_SHARE = 4  # the memory limit of row ranges is the limit of decoded chunks divided by this


Array = npt.NDArray[Any]

_CacheKey = tuple[ItemLayout, bytes, int | None]
"""The layout of items, their spec, and the index of the chunks' tensor with the kinds of the rows."""


class _Part(NamedTuple):
    """Copies of the rows of samples."""

    spec: bytes
    columns: list[Column]
    kinds: Array | None


class BatchAssembler:
    """Assembles samples to batches. Not thread-safe, except for the counters and `cache_bytes`.

    Attributes:
        num_decoded_chunks: chunks decoded so far; a chunk counts once for each group of columns that has a part of it.
        num_foreign: samples that were left out because their structure differs from the table's.
        num_samples: samples that were added since the last `take`.
    """

    def __init__(self, max_cache_bytes: int, max_sample_bytes: int, *, structure: TableStructure | None = None) -> None:
        """Create an assembler without samples.

        `max_cache_bytes` is the memory limit of decoded chunks, for each of up to four layouts of items; row ranges of
        items take a quarter more. `max_sample_bytes` limits the decoded size of a sample and of the chunks that it
        needs. `structure` checks each item, and foreign items are left out. With None, items may have any forms, and
        `take_each` returns them.
        """
        self._memory = ArrayMemory()
        self._part_memory = PartMemory(self._memory)
        self.num_decoded_chunks = self.num_foreign = 0
        self.structure = structure
        self._received_at = 0.0  # arrival of the first sample of the batch
        self._max_cache_bytes, self._max_sample_bytes = max_cache_bytes, max_sample_bytes
        self._caches: dict[_CacheKey, ItemCache] = {}
        self._current: ItemCache | None = None  # the cache of the last sample
        self._known: Mapping[int, int] = {}  # items of the current cache
        self.begin_next()

    @property
    def cache_bytes(self) -> int:
        """The size of all decoded chunks in the cache."""
        return sum(one.ring.num_bytes for cache in list(self._caches.values()) for one in cache.partitions)

    def add(self, samples: Samples) -> list[ReverbWriterError]:
        """Add whole samples, and return an error for each that is left out: an UnsafeDataError or a FormatError."""
        if not self.num_samples:
            self._received_at = time.monotonic()
        errors: list[ReverbWriterError] = []
        items = list(map(self._known.get, samples.keys.tolist()))
        if None not in items:
            self._items += items  # type: ignore[arg-type]  # mypy does not see that None is not among them
            self.num_samples += len(samples)
        else:
            samples, errors = self._add_new(samples, items)
        # Keep numbers, not messages: a kept message would keep the whole response in memory.
        self._numbers.append(samples.numbers)
        return errors

    def _add_new(self, samples: Samples, items: list[int | None]) -> tuple[Samples, list[ReverbWriterError]]:
        """Add samples, also of new items; return the added samples, and the errors of the others.

        `items` are the numbers of the known items, None for the others.
        """
        errors: list[ReverbWriterError] = []
        left_out: list[int] = []
        keys, at = samples.keys.tolist(), 0
        while at < len(keys):
            if items[at] is not None:
                stop = items.index(None, at) if None in items[at:] else len(keys)
                self._items += items[at:stop]  # type: ignore[arg-type]  # mypy does not see that None is not among them
                self.num_samples += stop - at
                at = stop
                continue
            key, known, num_known = keys[at], self._known, len(self._known)
            item = known.get(key)  # an earlier sample may be of the same item
            if item is None:
                try:
                    item = self._find_or_load(key, samples.entries[at])
                except StructureError:
                    self.num_foreign += 1
                except (UnsafeDataError, FormatError) as error:
                    errors.append(error)
                if self._known is not known or len(known) != num_known + 1:  # items were evicted or renumbered
                    items[at + 1 :] = map(self._known.get, keys[at + 1 :])
            if item is None:
                left_out.append(at)
            else:
                self._items.append(item)
                self.num_samples += 1
            at += 1
        return samples[np.delete(np.arange(len(keys)), left_out)] if left_out else samples, errors

    def take(self) -> tuple[list[Column], BatchInfo, Array | None]:
        """Return the columns of all samples added since the last call, their info, and the kinds of the rows.

        The kinds are uint8 [sum(lengths)]; None if a sample has none. Begin the next batch.
        """
        self._set_aside()
        parts = [part.columns for part in self._parts]
        columns = list(map(self._part_memory.joined, itertools.count(), zip(*parts, strict=True)))
        of_parts = [part.kinds for part in self._parts if part.kinds is not None]
        kinds: Array | None = np.concatenate(of_parts) if of_parts and len(of_parts) == len(self._parts) else None
        info = self._info(_longest([column.lengths for column in columns]))
        self.begin_next()
        return columns, info, kinds

    def take_each(self, signature: Any) -> list[tuple[Any, SampleInfo, Array | None]]:
        """Return the nest, the info and the kinds of each sample added since the last call; begin the next batch.

        The nests are those of the table's `signature`; if it is None, of each sample's own spec.
        """
        self._set_aside()
        parts, infos = self._parts, map(SampleInfo, *(numbers.tolist() for numbers in self._all_numbers()))
        self.begin_next()
        nests: list[Any] = []
        kinds: list[Array | None] = []
        for spec, columns, of_part in parts:
            pack = packer_of(spec) if signature is None else packer(signature)
            nests += map(pack, zip(*[column.split() for column in columns], strict=True))
            lengths = columns[0].lengths
            kinds += [None] * len(lengths) if of_part is None else Column(of_part, lengths, is_scalar=False).split()
        return list(zip(nests, infos, kinds, strict=True))

    def rows(self) -> SampleRows:
        """Return the rows of all samples added since the last `take`, without a copy where possible.

        They are valid until samples are added. Call `begin_next` when they are no longer needed.
        """
        if self._current and not self._parts:
            sources = self._current.rows_of(self._items)
            kinds = sources.pop() if self._current.kinds_at is not None else None
            info = self._info(_longest([rows.lengths for _, rows in sources]))
            return SampleRows(sources, info, kinds, self._current.layout.is_scalar, self._memory)
        columns, info, all_kinds = self.take()
        lengths_of = [column.lengths for column in columns]
        places = {id(lengths): JoinedRows.end_to_end(lengths) for lengths in [*lengths_of, info.lengths]}
        kinds = None if all_kinds is None else (all_kinds, places[id(info.lengths)])
        sources = [(column.rows, places[id(column.lengths)]) for column in columns]
        is_scalar = [column.is_scalar for column in columns]
        return SampleRows(sources, info, kinds, is_scalar, self._memory, are_copies=True)

    def lengths(self) -> npt.NDArray[np.int64]:
        """Return the number of rows of each sample added since the last `take`, in its longest column."""
        lengths = [_longest([column.lengths for column in part.columns]) for part in self._parts]
        if self._current and self._items:
            lengths.append(_longest([rows.lengths for _, rows in self._current.rows_of(self._items)]))
        return np.concatenate(lengths or [np.zeros(0, np.int64)])

    def _info(self, lengths: npt.NDArray[np.int64]) -> BatchInfo:
        keys, priorities, probabilities, table_sizes, times_sampled = self._all_numbers()
        return BatchInfo(keys, priorities, probabilities, table_sizes, times_sampled, lengths, self._received_at)

    def _all_numbers(self) -> Sequence[npt.NDArray[Any]]:
        """Return the numbers of all samples, see `Samples.numbers`."""
        numbers = self._numbers or [NO_SAMPLES.numbers]
        return numbers[0] if len(numbers) == 1 else list(map(np.concatenate, zip(*numbers, strict=True)))

    def pack(self, columns: Sequence[Any]) -> Any:
        """Return the nest of some columns; a tuple of columns if the table's structure is unknown."""
        return self.structure.pack(columns) if self.structure else tuple(columns)

    def begin_next(self) -> None:
        """Begin the next batch, without samples."""
        self._items: list[int] = []  # numbers of items in the current cache whose rows are not copied yet
        self._parts: list[_Part] = []  # copies of the rows of earlier samples
        self._numbers: list[Sequence[npt.NDArray[Any]]] = []  # numbers of the samples, see `Samples.numbers`
        self._part_memory.begin_next()
        self.num_samples = 0

    def _set_aside(self) -> None:
        """Copy the rows that are only in the rings, before a ring evicts chunks or when all samples have arrived."""
        cache, items, self._items = self._current, self._items, []
        if not cache or not items:
            return
        columns = []
        sources = cache.rows_of(items)
        kinds = None
        if cache.kinds_at is not None:
            kinds = copied(*sources.pop(), self._memory)
        for number, ((source, rows), is_scalar) in enumerate(zip(sources, cache.layout.is_scalar, strict=True)):
            out = self._part_memory.part(number, source, rows.num_rows)
            rows.copy(source, out)
            columns.append(Column(out, rows.lengths, is_scalar))
        self._parts.append(_Part(cache.spec, columns, kinds))

    def _find_or_load(self, key: int, entry: Any) -> int:
        """Return the number of an item that is not in the current cache, and make the item's cache the current one.

        Raise StructureError if the item's structure differs from the table's.
        """
        trajectory: bytes | Parsed = entry.info.item.flat_trajectory
        layout, slices_of = trajectory if isinstance(trajectory, tuple) else parse_trajectory(trajectory)
        ranges: RowRanges | None = None
        cache = self._current
        if cache is None or cache.layout != layout or not (ranges := cache.find_rows(slices_of)):
            caches = self._caches.values()
            cache = next((one for one in caches if one.layout == layout and (ranges := one.find_rows(slices_of))), None)
        if cache:
            spec = cache.spec
        else:
            chunks = EncodedChunks(entry.data, self._max_sample_bytes)
            spec, kinds_at = self._spec_of(layout, slices_of[0][0][0], chunks)
        if self.structure:
            self.structure.check_spec(spec)
        if cache is None or ranges is None:
            ranges = self._load((layout, spec, kinds_at), slices_of, chunks)
            if self.structure:
                self.structure.settle(spec)
            cache = self._caches[layout, spec, kinds_at]
        self._make_current(cache)
        item = cache.add_item(key, slices_of, ranges)
        if item is None:
            self._set_aside()
            cache.clear_items()
            item = cache.add_item(key, slices_of, ranges)
            assert item is not None, "an empty cache has room for any item"  # noqa: S101
        return item

    def _spec_of(self, layout: ItemLayout, chunk: int, chunks: EncodedChunks) -> tuple[bytes, int | None]:
        """Return the spec of an item, and the index of the chunks' tensor with the kinds of the rows."""
        for one in self._caches.values():  # a decoded chunk needs no parsing
            if one.layout == layout and any(chunk in part.ring.rows_of for part in one.partitions):
                return one.spec, one.kinds_at
        (spec, has_kinds), num_tensors = chunks.spec(chunk)
        # Columns with different ranges of chunks have no common rows, so no row has a kind.
        is_whole = has_kinds and len(layout.groups) == 1 and not any(layout.is_scalar)
        return spec, num_tensors - 2 if is_whole and num_tensors > 2 else None  # noqa: PLR2004  # kinds and spec

    def _load(self, kind: _CacheKey, slices_of: Sequence[Sequence[Slice]], chunks: EncodedChunks) -> RowRanges:
        """Decode the chunks of an item that are not in the cache of its layout, and return its row ranges."""
        # A bad sample changes nothing: dtypes, shapes and sizes are checked before a chunk is decoded, and no ring
        # keeps a damaged chunk.
        cache = self._caches.get(kind)
        missing = cache.missing_chunks(slices_of, chunks) if cache else None
        for must_renew in (False, False, True):
            if cache is None or missing is None or must_renew:
                cache = self._new_cache(kind, slices_of, chunks)
                missing = cache.missing_chunks(slices_of, chunks)
            if missing is None:
                raise FormatError("the chunks of an item differ in dtype or shape.")
            self._make_current(cache)
            self._decode(cache, missing)
            ranges = cache.find_rows(slices_of)
            if ranges:
                return ranges
            # One chunk of this item evicted another one, which must be decoded again. If this evicts a third chunk, the
            # rings are too small for this item together with others.
            missing = cache.missing_chunks(slices_of, chunks)
        raise FormatError("the chunks of an item changed while they were decoded.")

    def _decode(self, cache: ItemCache, missing: Sequence[Mapping[int, EncodedChunk]]) -> None:
        """Put chunks into the rings of the current cache that lack them; raise FormatError if a chunk is damaged."""
        for (_, _, ring, _), of_partition in zip(cache.partitions, missing, strict=True):
            for key, chunk in of_partition.items():
                if not ring.put(key, chunk):
                    self._set_aside()
                    cache.forget_items(ring.evict_for(chunk))
                    ring.put(key, chunk)
            self.num_decoded_chunks += len(of_partition)

    def _make_current(self, cache: ItemCache) -> None:
        current = self._current
        if cache is current:
            return
        if self.structure and current and self.num_samples and cache.form != current.form:
            got, expected = (
                ", ".join(f"{dtype} {list(shape)}" for dtype, shape, _ in one.form)[:500] for one in (cache, current)
            )
            raise FormatError(
                f"an item whose columns differ from the first item of its batch: {got}, expected {expected}. Make "
                "the actors of the table agree."
            )
        self._set_aside()
        self._current, self._known = cache, cache.items
        key = cache.layout, cache.spec, cache.kinds_at
        if self._caches.get(key) is not cache:
            self._caches.pop(key, None)
            while len(self._caches) >= _MAX_ITEM_CACHES:
                del self._caches[next(iter(self._caches))]
            self._caches[key] = cache

    def _new_cache(self, kind: _CacheKey, slices_of: Sequence[Sequence[Slice]], chunks: EncodedChunks) -> ItemCache:
        """Return a cache with room for all chunks of an item together; only a single item may exceed the memory limit.

        The limit is divided among groups of columns so that all groups hold about the same number of rows.
        """
        layout, spec, kinds_at = kind
        groups = layout.groups
        if kinds_at is not None:
            (columns, tensors), *_ = groups
            groups = (ColumnGroup((*columns, len(columns)), (*tensors, kinds_at)),)
        needed = [
            [chunks.get(key, group.tensors) for key in dict.fromkeys([key for key, _, _ in slices])]
            for group, slices in zip(groups, slices_of, strict=True)
        ]
        weights = [1 + first.num_bytes // first.length for first, *_ in needed]
        partitions = []
        for (columns, tensors), of_group, weight in zip(groups, needed, weights, strict=True):
            types = of_group[0].schema.dtypes_and_shapes
            if kinds_at is not None and types[-1] != (np.dtype(np.uint8), ()):
                raise FormatError(f"the kinds of rows are {types[-1][0]} {types[-1][1]}, expected uint8 ().")
            ring = ChunkRing(types, self._max_cache_bytes * weight // sum(weights), of_group)
            max_rows = self._max_sample_bytes // max(sum(map(row_bytes, types)), 1)
            partitions.append(Partition(columns, tensors, ring, max_rows))
        cache = ItemCache(layout, spec, kinds_at, partitions, self._max_cache_bytes // _ITEMS_SHARE)
        if self.structure:
            self.structure.check_form(cache.form)
        return cache


def _longest(all_lengths: Sequence[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
    """Return the rows of each sample in its longest column."""
    distinct = [*{id(lengths): lengths for lengths in all_lengths}.values()]  # mostly one array
    return functools.reduce(np.maximum, distinct or [np.zeros(0, np.int64)])
