"""What one insert stream brings: chunks, items that name them, and which chunks are kept for items to come.

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
from reverb_writer.local.refusals import Refusal, Status
from reverb_writer.local.store import Store
from reverb_writer.local.stored_items import Item
from reverb_writer.local.table import Table
from reverb_writer.protocol import messages
from reverb_writer.protocol.trajectory_parsing import Parsed, parse_trajectory

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
            items = [
                (read := messages.StoredItem.FromString(item), parse_trajectory(read.flat_trajectory))
                for item in request.items
            ]
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
            if items:
                self._check_kept(request.keep_chunk_keys)
                made = [self._item(*item) for item in items]
                self._store.chunks.take(sum([item.num_bytes for item in made]))
                tables = self._insert(made)
                self._keep(request.keep_chunk_keys)
                for table in tables:
                    table.advance()

    def end(self) -> None:
        """Give up what waits, and keep nothing. Idempotent."""
        with self._store.lock:
            if not self._ended:
                self._ended = True
                for table in self._store.tables.values():
                    table.withdraw_inserts(self._confirm_waiting)
                    table.advance()
                self._store.chunks.release(self._kept.values())
                self._kept.clear()

    def _item(self, read: Any, parsed: Parsed) -> Item:
        """Return an item for its table; refuse one that could not be in it."""
        table = self._store.table(read.table)
        table.check_priority(read.key, read.priority)
        keys = chunks_named(parsed)
        try:
            chunks = [self._kept[key] for key in keys]
        except KeyError as error:
            text = f"item {read.key} names chunk {error}, which this stream has not sent, or has not kept."
            raise Refusal(Status.INVALID_ARGUMENT, text) from None
        for chunk in chunks:
            tensor = keys[chunk.key]
            if tensor >= chunk.num_tensors:
                text = f"item {read.key} names tensor {tensor} of chunk {chunk.key}, which has {chunk.num_tensors}."
                raise Refusal(Status.INVALID_ARGUMENT, text)
        if self._store.max_item_bytes is not None:
            check_item_size(read.key, parsed, self._kept, self._store.max_item_bytes)
        return Item(read.key, read.table, read.priority, chunks, read.flat_trajectory, parsed)

    def _insert(self, items: Sequence[Item]) -> list[Table]:
        """Put items into their tables, or where they wait; return the tables."""
        confirmed = []
        tables = {}
        for item in items:
            self._store.chunks.acquire(item.chunks)
            table = tables[item.table] = self._store.tables[item.table]
            if table.insert(item, self._confirm_waiting):
                confirmed.append(item.key)
        self.num_waiting += len(items) - len(confirmed)
        if confirmed:
            self._confirm(confirmed)
        return [*tables.values()]

    def _keep(self, keys: Sequence[int]) -> None:
        """Forget all kept chunks but these."""
        dropped = [self._kept.pop(key) for key in self._kept.keys() - set(keys)]
        self._store.chunks.release(dropped)

    def _check_kept(self, keys: Sequence[int]) -> None:
        for key in keys:
            if key not in self._kept:
                text = f"`keep_chunk_keys` names chunk {key}, which this stream has not sent, or has not kept."
                raise Refusal(Status.INVALID_ARGUMENT, text)

    def _confirm_waiting(self, keys: list[int]) -> None:
        """Tell that items that have waited are in their table. The caller holds the lock."""
        self.num_waiting -= len(keys)
        self._confirm(keys)


def read_chunk(data: bytes) -> Chunk:
    """Read as much of a ChunkData as the server must know; what it holds has the form that it must have."""
    read = messages.ChunkData.FromString(data)
    return Chunk(read.chunk_key, read.sequence_range.episode_id, len(read.data.tensors), data)


def chunks_named(parsed: Parsed) -> dict[int, int]:
    """Return the keys of the chunks that an item names, in order, with the highest tensor that it names of each."""
    layout, slices = parsed
    keys: dict[int, int] = {}
    for group, pieces in zip(layout.groups, slices, strict=True):
        tensor = max(group.tensors)
        for key, _, _ in pieces:
            keys[key] = max(keys.get(key, 0), tensor)
    return keys
