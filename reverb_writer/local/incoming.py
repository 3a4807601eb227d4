"""The contents of one insert stream: chunks, items that refer to them, and chunks that are kept for later items.

A request is read completely before it changes a table: a damaged request, or one with a wrong reference, inserts
nothing.

Source: Reverb 0.14 (`reverb_service_impl.cc`, InsertStream).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from google.protobuf.message import DecodeError

from reverb_writer.errors import FormatError
from reverb_writer.local.chunk_store import Chunk
from reverb_writer.local.item_size import check_item_size
from reverb_writer.local.read_items import ItemGroup, read_items
from reverb_writer.local.refusals import Refusal, Status
from reverb_writer.local.store import Store
from reverb_writer.local.stored_items import Item, SharedChunks
from reverb_writer.protocol import messages

_MAX_WAITING = 1_000  # if more items of a stream wait for a rate limiter, its next requests wait


class Incoming:
    """One insert stream. Thread-safe; no method waits."""

    def __init__(self, store: Store, confirm: Callable[[list[int]], object]) -> None:
        """Begin without kept chunks.

        Args:
            store: gets the items.
            confirm: gets the keys of inserted items, many at once. The thread that inserts them calls it with the lock
                of the store, so it must not wait.
        """
        self._store, self._confirm = store, confirm
        self._kept: dict[int, Chunk] = {}
        self.num_waiting = 0
        self._ended = False

    @property
    def has_room(self) -> bool:
        """Whether the stream takes more requests: False while too many of its items wait for a rate limiter."""
        return self._ended or self.num_waiting < _MAX_WAITING

    def feed(self, message: bytes) -> None:
        """Process an InsertStreamRequest.

        Raises:
            Refusal: the request is damaged, refers to an unknown table or chunk, or exceeds the memory; or an item
                exceeds `max_item_bytes`.
        """
        try:
            request = messages.StoredRequest.FromString(message)
            chunks = [read_chunk(data) for data in request.chunks]
            groups = list(read_items(request.items))
        except (DecodeError, FormatError) as error:
            raise Refusal(
                Status.INVALID_ARGUMENT, f"{len(message)} bytes that are not an insert request: {error}"
            ) from None
        with self._store.lock:
            if self._ended:
                return
            for chunk in chunks:
                if chunk.key not in self._kept:
                    self._kept[chunk.key] = self._store.chunks.add(chunk)
            if groups:
                self._check_kept(request.keep_chunk_keys)
                items = self._items(groups, len(request.items))
                self._keep(request.keep_chunk_keys)
                self._insert(items)

    def end(self) -> None:
        """Drop all waiting items and kept chunks. Idempotent."""
        with self._store.lock:
            if not self._ended:
                self._ended = True
                for table in self._store.tables.values():
                    table.withdraw_inserts(self._confirm_inserted)
                self._store.chunks.release(self._kept.values())
                self._kept.clear()

    def _items(self, groups: Sequence[ItemGroup], num_items: int) -> list[Item]:
        """Return the items of a request in order; refuse an item that its table cannot hold."""
        items: list[Any] = [None] * num_items
        made: list[SharedChunks] = []
        for group in groups:
            self._check(group)
            stops = [*[start for start, _ in group.runs[1:]], len(group.keys)]
            of_items: list[SharedChunks] = []
            for (start, tensors), stop in zip(group.runs, stops, strict=True):
                shared = self._shared(group, start, stop, tensors)
                made.append(shared)
                of_items += [shared] * (stop - start)
            fields = (group.keys, group.priorities, group.trajectories, group.slices, of_items)
            for number, item in zip(group.numbers, map(Item, *fields), strict=True):
                items[number] = item
        self._store.chunks.take(sum([shared.num_items * shared.item_bytes for shared in made]))
        for shared in made:
            self._store.chunks.acquire(shared.chunks)
        return items

    def _check(self, group: ItemGroup) -> None:
        table = self._store.table(group.table)
        for priority, key in dict(zip(group.priorities, group.keys, strict=True)).items():
            table.check_priority(key, priority)

    def _shared(self, group: ItemGroup, start: int, stop: int, tensors: dict[int, int]) -> SharedChunks:
        """Return the chunks of the items `start` to `stop` of a group."""
        try:
            chunks = [self._kept[key] for key in tensors]
        except KeyError as error:
            text = f"item {group.keys[start]} refers to chunk {error}, which this stream has not sent or not kept."
            raise Refusal(Status.INVALID_ARGUMENT, text) from None
        for chunk, tensor in zip(chunks, tensors.values(), strict=True):
            if tensor >= chunk.num_tensors:
                key, has = group.keys[start], chunk.num_tensors
                text = f"item {key} refers to tensor {tensor} of chunk {chunk.key}, which has {has}."
                raise Refusal(Status.INVALID_ARGUMENT, text)
        if self._store.max_item_bytes is not None:
            for key, slices in zip(group.keys[start:stop], group.slices[start:stop], strict=True):
                check_item_size(key, (group.layout, slices), self._kept, self._store.max_item_bytes)
        num_slices = sum(map(len, group.slices[start]))
        return SharedChunks(group.table, group.layout, chunks, stop - start, len(group.trajectories[start]), num_slices)

    def _insert(self, items: Sequence[Item]) -> None:
        """Queue the items at their tables, which insert them when the rate limiters allow it."""
        self.num_waiting += len(items)
        by_table: dict[str, list[Item]] = {}
        for item in items:
            by_table.setdefault(item.shared.table, []).append(item)
        for table, of_table in by_table.items():
            self._store.tables[table].insert(of_table, self._confirm_inserted)

    def _keep(self, keys: Sequence[int]) -> None:
        """Forget all kept chunks except these."""
        dropped = [self._kept.pop(key) for key in self._kept.keys() - set(keys)]
        self._store.chunks.release(dropped)

    def _check_kept(self, keys: Sequence[int]) -> None:
        for key in keys:
            if key not in self._kept:
                text = f"`keep_chunk_keys` refers to chunk {key}, which this stream has not sent or not kept."
                raise Refusal(Status.INVALID_ARGUMENT, text)

    def _confirm_inserted(self, keys: list[int]) -> None:
        """Confirm inserted items. The caller holds the lock."""
        self.num_waiting -= len(keys)
        self._confirm(keys)


def read_chunk(data: bytes) -> Chunk:
    """Read the fields of a ChunkData that the server needs, and check their form."""
    read = messages.ChunkData.FromString(data)
    return Chunk(read.chunk_key, read.sequence_range.episode_id, len(read.data.tensors), data)
