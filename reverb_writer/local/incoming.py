"""The contents of one insert stream: chunks, items that name them, and which chunks are kept for items to come.

A request is read whole before it changes a table: one that is damaged, or names what is not there, inserts nothing.

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

_MAX_WAITING = 1_000  # items of a stream that wait for a rate limiter before no more of it is fed


class Incoming:
    """One insert stream. Thread-safe; nothing here waits."""

    def __init__(self, store: Store, confirm: Callable[[list[int]], object]) -> None:
        """Begin with nothing kept.

        Args:
            store: what the items go to.
            confirm: gets the keys of items that are in their tables now, many at once. It is called by whichever thread
                has let them in, which has the lock of the store, and must not wait.
        """
        self._store, self._confirm = store, confirm
        self._kept: dict[int, Chunk] = {}
        self.num_waiting = 0
        self._ended = False

    @property
    def has_room(self) -> bool:
        """Whether more requests are to be fed: not while too many items of earlier ones wait for a rate limiter."""
        return self._ended or self.num_waiting < _MAX_WAITING

    def feed(self, message: bytes) -> None:
        """Carry out an InsertStreamRequest.

        Raises:
            Refusal: the request is damaged, names a table or chunks that are not there, or exceeds the memory; or an
                item exceeds `max_item_bytes`.
        """
        try:
            request = messages.StoredRequest.FromString(message)
            chunks = [read_chunk(data) for data in request.chunks]
            groups = list(read_items(request.items))
        except (DecodeError, FormatError) as error:
            raise Refusal(
                Status.INVALID_ARGUMENT, f"{len(message)} bytes that are no insert request: {error}"
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
                self._insert(items)
                self._keep(request.keep_chunk_keys)
                for name in dict.fromkeys([group.table for group in groups]):
                    self._store.tables[name].advance()

    def end(self) -> None:
        """Give up what waits, and keep nothing. Idempotent."""
        with self._store.lock:
            if not self._ended:
                self._ended = True
                for table in self._store.tables.values():
                    table.withdraw_inserts(self._confirm_inserted)
                    table.advance()
                self._store.chunks.release(self._kept.values())
                self._kept.clear()

    def _items(self, groups: Sequence[ItemGroup], num_items: int) -> list[Item]:
        """Return the items of a request in its order; refuse one that could not be in its table."""
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
            text = f"item {group.keys[start]} names chunk {error}, which this stream has not sent, or has not kept."
            raise Refusal(Status.INVALID_ARGUMENT, text) from None
        for chunk, tensor in zip(chunks, tensors.values(), strict=True):
            if tensor >= chunk.num_tensors:
                key, has = group.keys[start], chunk.num_tensors
                text = f"item {key} names tensor {tensor} of chunk {chunk.key}, which has {has}."
                raise Refusal(Status.INVALID_ARGUMENT, text)
        if self._store.max_item_bytes is not None:
            for key, slices in zip(group.keys[start:stop], group.slices[start:stop], strict=True):
                check_item_size(key, (group.layout, slices), self._kept, self._store.max_item_bytes)
        num_slices = sum(map(len, group.slices[start]))
        return SharedChunks(group.table, group.layout, chunks, stop - start, len(group.trajectories[start]), num_slices)

    def _insert(self, items: Sequence[Item]) -> None:
        """Have the tables let the items in when they may come in; `advance` does so."""
        self.num_waiting += len(items)
        by_table: dict[str, list[Item]] = {}
        for item in items:
            by_table.setdefault(item.shared.table, []).append(item)
        for table, of_table in by_table.items():
            self._store.tables[table].insert(of_table, self._confirm_inserted)

    def _keep(self, keys: Sequence[int]) -> None:
        """Forget all kept chunks but these."""
        dropped = [self._kept.pop(key) for key in self._kept.keys() - set(keys)]
        self._store.chunks.release(dropped)

    def _check_kept(self, keys: Sequence[int]) -> None:
        for key in keys:
            if key not in self._kept:
                text = f"`keep_chunk_keys` names chunk {key}, which this stream has not sent, or has not kept."
                raise Refusal(Status.INVALID_ARGUMENT, text)

    def _confirm_inserted(self, keys: list[int]) -> None:
        """Tell that items are in their table. The caller holds the lock."""
        self.num_waiting -= len(keys)
        self._confirm(keys)


def read_chunk(data: bytes) -> Chunk:
    """Read as much of a ChunkData as the server must know; what it holds has the form that it must have."""
    read = messages.ChunkData.FromString(data)
    return Chunk(read.chunk_key, read.sequence_range.episode_id, len(read.data.tensors), data)
