"""Find the rows of samples: which rows of which chunks an item has, and decode each chunk once.

    trajectory -> slices of chunks -> chunks that are not cached are decoded -> row ranges of the item

Row ranges are cached together with the chunks, so an item that is sampled again needs one look-up. A damaged or unsafe
sample changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from reverb_writer.decoding.chunks import ChunkRing, EncodedChunk, EncodedChunks, row_bytes
from reverb_writer.decoding.item_cache import ItemCache, Partition, RowRanges
from reverb_writer.decoding.table_structure import TableStructure
from reverb_writer.errors import FormatError
from reverb_writer.protocol.trajectory_parsing import ColumnGroup, ItemLayout, Parsed, Slice, parse_trajectory

_MAX_ITEM_CACHES = 4
_ITEMS_SHARE = 4  # the memory limit of row ranges is the limit of decoded chunks divided by this

LetGo = Callable[[ItemCache], None]
"""Called before the rows of the current cache become invalid, with the next current cache, often the same."""

_CacheKey = tuple[ItemLayout, bytes, int | None]
"""The layout of items, their spec, and the index of the chunks' tensor with the kinds of the rows."""


class SampleDecoder:
    """Finds the rows of items in decoded chunks. Not thread-safe, except for the counter and `cache_bytes`.

    Attributes:
        num_decoded_chunks: chunks decoded so far; a chunk counts once for each group of columns that has a part of it.
        current: the cache of the last item that was found; None before the first.
        known: the number of each item in the current cache, by key.
    """

    def __init__(self, max_cache_bytes: int, max_sample_bytes: int, structure: TableStructure | None) -> None:
        """Start without chunks; see `BatchAssembler`."""
        self.num_decoded_chunks = 0
        self.current: ItemCache | None = None
        self.known: Mapping[int, int] = {}
        self._max_cache_bytes, self._max_sample_bytes = max_cache_bytes, max_sample_bytes
        self._structure = structure
        self._caches: dict[_CacheKey, ItemCache] = {}

    @property
    def cache_bytes(self) -> int:
        """The size of all decoded chunks in the cache."""
        return sum(cache.num_bytes for cache in list(self._caches.values()))

    def forget(self, num_bytes: int) -> None:
        """Forget all items and chunks of each cache of at least `num_bytes`; none of their rows is needed any more."""
        for cache in self._caches.values():
            if cache.num_bytes >= num_bytes:
                cache.clear()

    def find(self, key: int, entry: Any, let_go: LetGo) -> int:
        """Return the number of an item that is not `known`, and make the item's cache the current one.

        Raises:
            StructureError: the item's structure differs from the table's.
            UnsafeDataError, FormatError: the item must not or cannot be decoded, or an error of `let_go`. Nothing
                changed.
        """
        trajectory: bytes | Parsed = entry.info.item.flat_trajectory
        layout, slices_of = trajectory if isinstance(trajectory, tuple) else parse_trajectory(trajectory)
        ranges: RowRanges | None = None
        cache = self.current
        if cache is None or cache.layout != layout or not (ranges := cache.find_rows(slices_of)):
            caches = self._caches.values()
            cache = next((one for one in caches if one.layout == layout and (ranges := one.find_rows(slices_of))), None)
        if cache:
            spec = cache.spec
        else:
            chunks = EncodedChunks(entry.data, self._max_sample_bytes)
            spec, kinds_at = self._spec_of(layout, slices_of[0][0][0], chunks)
        if self._structure:
            self._structure.check_spec(spec)
        if cache is None or ranges is None:
            ranges = self._load((layout, spec, kinds_at), slices_of, chunks, let_go)
            if self._structure:
                self._structure.settle(spec)
            cache = self._caches[layout, spec, kinds_at]
        self._make_current(cache, let_go)
        item = cache.add_item(key, slices_of, ranges)
        if item is None:
            let_go(cache)
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

    def _load(
        self, kind: _CacheKey, slices_of: Sequence[Sequence[Slice]], chunks: EncodedChunks, let_go: LetGo
    ) -> RowRanges:
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
            self._make_current(cache, let_go)
            self._decode(cache, missing, let_go)
            ranges = cache.find_rows(slices_of)
            if ranges:
                return ranges
            # One chunk of this item evicted another one, which must be decoded again. If this evicts a third chunk, the
            # rings are too small for this item together with others.
            missing = cache.missing_chunks(slices_of, chunks)
        raise FormatError("the chunks of an item changed while they were decoded.")

    def _decode(self, cache: ItemCache, missing: Sequence[Mapping[int, EncodedChunk]], let_go: LetGo) -> None:
        """Put chunks into the rings of the current cache that lack them; raise FormatError if a chunk is damaged."""
        for (_, _, ring, _), of_partition in zip(cache.partitions, missing, strict=True):
            for key, chunk in of_partition.items():
                if not ring.put(key, chunk):
                    let_go(cache)
                    cache.forget_items(ring.evict_for(chunk))
                    ring.put(key, chunk)
            self.num_decoded_chunks += len(of_partition)

    def _make_current(self, cache: ItemCache, let_go: LetGo) -> None:
        if cache is self.current:
            return
        let_go(cache)
        self.current, self.known = cache, cache.items
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
        if self._structure:
            self._structure.check_form(cache.form)
        return cache
