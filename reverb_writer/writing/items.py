"""Whole items between their writer and the sender: rows of encoded items become requests.

    writer: encodes an item, and puts it into the next row -> `head` advances by one assignment
    sender: takes rows below `head` -> batches of consecutive items -> one request per batch

A row is one item for all tables. As in `ring`, only the writer assigns `head`, so a call that an interrupt ends is
either taken or not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from reverb_writer.transport.in_flight import InsertRequest
from reverb_writer.writing.source import REQUEST_BYTES, REQUEST_ITEMS, Origin
from reverb_writer.writing.stream_options import Books

_NUM_ROWS = 1024


class EncodedItem(NamedTuple):
    """An item as the server gets it."""

    first_key: int  # key of the item of the first table; those of other tables follow it
    rows: list[npt.NDArray[np.uint8]]  # the item of each table
    chunk_key: int
    chunk: bytes
    num_bytes: int


class ItemRows:
    """Items that the sender has not taken yet. The writer's thread calls `write`, the sender's thread `room`.

    Attributes:
        size, num_envs, head, granted, granted_items, wake_after: as of `Rows`; the second value of `head` is the bytes
            written so far.
        items: by number; the sender removes them.
        granted_bytes: the next item may be written while fewer bytes than this have been. Only the sender assigns it.
        wake_at_bytes: the call with which this number is reached wakes the sender. Only the sender assigns it.
    """

    def __init__(self, num_tables: int) -> None:
        """Start without items; each counts once per table."""
        self.size, self.num_envs, self._num_tables = _NUM_ROWS, 1, num_tables
        self.head = (0, 0)
        self.granted = self.granted_items = self.granted_bytes = self.wake_at_bytes = 0
        self.wake_after: tuple[float, float] = (-1, -1)
        self.items: dict[int, EncodedItem] = {}

    def write(self, item: EncodedItem) -> None:
        """Write an item; the next one overwrites it if an interrupt comes before `head` is assigned."""
        number, num_bytes = self.head
        self.items[number] = item
        self.head = number + 1, num_bytes + item.num_bytes

    def room(self) -> tuple[int, int]:
        """Return the room for rows and for items, as `Rows`."""
        written, num_bytes = self.head
        num_rows = self.granted - written if num_bytes < self.granted_bytes else 0
        return num_rows, self.granted_items - written * self._num_tables

    def due(self) -> tuple[float, ...] | None:
        """Return the bounds if what is written has passed one, as `Rows`."""
        written, num_bytes = self.head
        due = *self.wake_after, self.wake_at_bytes  # read once, because the sender may assign them at any time
        is_due = written > due[0] or written * self._num_tables > due[1] or num_bytes >= due[2]
        return due if is_due else None


@dataclass(eq=False, slots=True)
class ItemOrigin:
    """Whole items that were batched together."""

    receiver: Any = None  # as of `Origin`
    num_sent: int = 0


class ItemBatch(NamedTuple):
    """Consecutive items."""

    origin: ItemOrigin
    items: list[EncodedItem]
    num_items: int


class ItemSource:
    """The items of an `ItemWriter`; the attributes are those of `Source`."""

    def __init__(self, tables: Sequence[str], books: Books, max_bytes: int) -> None:
        """Make empty rows; at most about `max_bytes` are in them and in flight."""
        self.ring, self.books = ItemRows(len(tables)), books
        self.taken = self.num_counted = self.num_unencoded = self.unsent_bytes = 0
        self.has_new, self.is_prompt, self.is_endless = False, True, False
        self.items_per_call: float = len(tables)
        self.tables, self._max_bytes = frozenset(tables), max_bytes
        self._num_batched = self._taken_bytes = 0

    def take(self) -> None:
        """Count the items that were written since the last call."""
        written, num_bytes = self.ring.head
        if written == self.taken:
            return
        self.has_new = True
        self.num_unencoded += (written - self.taken) * len(self.tables)
        self.unsent_bytes += num_bytes - self._taken_bytes
        self.taken, self._taken_bytes = written, num_bytes
        self.num_counted = written * len(self.tables)

    def seal_open(self, before: int = 0) -> None:
        """Do nothing, because items are complete."""

    def seal_fullest(self, keep: int) -> None:
        """Do nothing, because items are complete."""

    def take_ready(self) -> list[ItemBatch]:
        """Return the taken items in batches of one request each."""
        batches: list[ItemBatch] = []
        items: list[EncodedItem] = []
        num_bytes = 0
        while self._num_batched < self.taken:
            item = self.ring.items.pop(self._num_batched)
            self._num_batched += 1
            items.append(item)
            num_bytes += item.num_bytes
            is_full = num_bytes >= REQUEST_BYTES or len(items) * len(self.tables) >= REQUEST_ITEMS
            if is_full or self._num_batched == self.taken:
                batches.append(ItemBatch(ItemOrigin(), items, len(items) * len(self.tables)))
                items, num_bytes = [], 0
        num_items = sum(batch.num_items for batch in batches)
        self.num_unencoded -= num_items
        self.unsent_bytes = 0
        self.books.counts["items"] += num_items
        return batches

    def requests(self, batches: Sequence[ItemBatch]) -> Iterator[InsertRequest]:
        """Make one request of each batch."""
        for batch in batches:
            rows = [row for item in batch.items for row in item.rows]
            chunks = {item.chunk_key: item.chunk for item in batch.items}
            yield InsertRequest(self.tables, batch.items[0].first_key, rows, chunks)

    def release_rows(self) -> int:
        """Return the row below which items may be written; it bounds their number."""
        return self._num_batched + self.ring.size

    def note_in_flight(self, num_bytes: int) -> None:
        """Grant the bytes that are neither in the rows nor in flight."""
        self.ring.granted_bytes = self._taken_bytes - self.unsent_bytes + self._max_bytes - num_bytes
        self.ring.wake_at_bytes = self._taken_bytes + REQUEST_BYTES

    def needed_chunks(self) -> list[int]:
        """Return no keys, because no later item refers to a chunk."""
        return []

    def open_origins(self) -> Sequence[ItemOrigin]:
        """Return an origin without a receiver, because each batch is an origin of its own."""
        return (ItemOrigin(),)

    def cut(self, is_cut: Callable[[Origin], bool], reason: str) -> None:
        """Do nothing, because no origin is open."""
