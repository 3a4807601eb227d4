"""Write whole items, such as sequences of tokens: nests whose leaves have any lengths."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from reverb_writer.arguments import check_priority, options_of, table_names
from reverb_writer.client.whole_items import ItemReader, encode_item
from reverb_writer.keywords import takes
from reverb_writer.protocol.item_encoding import KEY_BITS
from reverb_writer.replay.connection import ReplayConnection
from reverb_writer.writing.items import EncodedItem, ItemRows, ItemSource
from reverb_writer.writing.sender import Sender
from reverb_writer.writing.stream_life import StreamLife
from reverb_writer.writing.stream_options import DeliveryKeywords, DeliveryOptions

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack


class ItemWriter(StreamLife):
    """Write whole items: each is a nest whose leaves may differ in length, such as a prompt, its answers and a reward.

    Items are sent in the background, many in a request, and each is stored exactly once. Limits, waits, counters and
    several servers are as for observers. Call it from one thread at a time. A context manager; it cannot be pickled.

    Example:
        with rw.ItemWriter("localhost:8000", "sequences") as writer:
            writer.write({"tokens": tokens, "log_probs": log_probs, "reward": 1.0, "version": 7})
    """

    _name: ClassVar[str] = "item writer"

    @takes(DeliveryOptions)
    def __init__(self, replay: Any, table: str | Sequence[str], **options: Unpack[DeliveryKeywords]) -> None:
        """Find the tables; the first item starts a thread.

        Args:
            replay: a `Client`, or an address, addresses or an object that `Client` takes.
            table: the table, or several tables, which all get each item.
            **options: time-out, bounds and policies: the fields of `DeliveryOptions`.

        Raises:
            SpecError: an argument is invalid.
            StructureError: a table does not exist; names the tables that exist.
            ServerUnavailableError: no server answers within the time-out.
        """
        self._reader = ItemReader()
        # One generator per writer: a forked child must not draw its parent's keys.
        self._random = random.Random()  # noqa: S311  # keys are no secret
        self._woken_for: tuple[float, ...] | None = None
        self._first_key = 0
        super().__init__(replay, ReplayConnection, table_names(table), options_of(DeliveryOptions, options, self))

    def write(self, nest: Any, priority: float = 1.0) -> None:
        """Write one item. The call returns when the item is encoded, and waits only for room in flight.

        Args:
            nest: dicts, lists, tuples and named tuples of leaves [T_i, ...], T_i >= 1, or of single values. Leaves may
                differ in length. A list of numbers or strings is one leaf. Items may differ in structure, but a
                dataset's batches need one. The arrays may be changed after the call.
            priority: the item's priority in each table, finite and >= 0.

        Raises:
            StructureError: no leaf; or a leaf has no rows, cannot be stored, or does not match a table's signature.
                Nothing changed.
            SpecError: the priority is invalid. Nothing changed.
            ReplayTimeoutError: no room in flight, and no progress for the time-out; names the cause. Nothing changed.
            FinishedError: no room in flight, and `until` is true. Nothing changed.
            ClosedError: after `close()`, or in a forked child.
            ReverbWriterError: a server refuses earlier items. Nothing changed.
        """
        checked = check_priority(priority)
        layout, columns = self._reader.read(nest)
        layout.check(columns, self._signatures)
        sender = self._sender or self._start()
        rows: ItemRows = sender.ring
        written = rows.head[0]
        if min(rows.room()) <= 0:
            self._wait_for_room(sender)
        chunk_key, key = self._random.getrandbits(KEY_BITS), self._first_key + written * len(self._tables)
        priorities = dict.fromkeys(self._tables, checked)
        encoded, chunk = encode_item(layout, columns, priorities, chunk_key, key)
        size = len(chunk) + sum(row.nbytes for row in encoded)
        rows.write(EncodedItem(key, encoded, chunk_key, chunk, size))
        if (due := rows.due()) is not None and due != self._woken_for:
            sender.post()
            self._woken_for = due  # after the post, because an interrupt may come between

    def _start(self) -> Sender:
        connection = self._check(None)
        source = ItemSource(self._tables, self._new_books(), self._options.max_in_flight_bytes)
        sender = self._launch(connection, source)
        self._first_key = self._random.getrandbits(KEY_BITS)
        self._woken_for = None
        self._sender = sender
        return sender

    def __enter__(self) -> Self:
        return self
