"""Requests in flight, queued or sent, and the chunks that they share. No I/O, no threads.

    add -> queued --take_message--> sent --acknowledge--> removed
             ^                        |
             +-------- requeue -------+   (the connection was lost)

Each request lists chunks to keep. The server forgets all other chunks, and refuses a request that lists an unknown
chunk. A message lists the chunks on the server that queued requests or later windows may refer to.

Not thread-safe: its owner calls it from one thread.

Source: reverb/cc/reverb_service_impl.cc, InsertStream.
"""

from __future__ import annotations

import collections
import itertools
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from reverb_writer.protocol.messages import InsertStreamRequest

Keys = npt.NDArray[np.uint64]


@dataclass(eq=False)
class InsertRequest:
    """Items that were encoded together, and the chunks that they need."""

    tables: frozenset[str]  # tables that get the items
    first_key: int  # key of the first item; the other keys follow it, in the order of the rows
    rows: list[npt.NDArray[np.uint8]]  # as `encode_items` makes them, in the order of insertion: one item per row
    chunks: dict[int, bytes]  # all encoded chunks of the items, by key, in the order of their steps
    num_bytes: int  # memory that the request adds: its rows, and chunks that no earlier request had

    def __post_init__(self) -> None:
        self.num_items = self.num_pending = sum(map(len, self.rows))
        self._is_pending = np.ones(self.num_items, bool)

    def acknowledge(self, keys: Keys) -> int:
        """Mark items of the request as acknowledged; return how many were new. Other keys are ignored."""
        index = keys - np.uint64(self.first_key)  # keys below the first one wrap around to huge numbers
        self._is_pending[index[index < self.num_items]] = False
        before, self.num_pending = self.num_pending, int(np.count_nonzero(self._is_pending))
        return before - self.num_pending

    def remaining_rows(self) -> list[npt.NDArray[np.uint8]]:
        """Return the items that are not acknowledged."""
        if self.num_pending == self.num_items:
            return self.rows
        stops = list(itertools.accumulate(map(len, self.rows)))
        return [rows[self._is_pending[stop - len(rows) : stop]] for rows, stop in zip(self.rows, stops, strict=True)]


class InFlight:
    """Requests in flight.

    Attributes:
        acknowledged: number of items that the server has confirmed.
        pending: number of items that are neither confirmed nor given up.
        pending_bytes: memory of the pending items.
        progress_at: `time.monotonic()` of the last acknowledgement; if nothing was pending after it, of the next `add`.
    """

    def __init__(self, needed: Callable[[], Iterable[int]] = lambda: ()) -> None:
        """Start with nothing in flight; `needed` returns the keys of chunks that later windows may refer to."""
        self._needed = needed
        self.acknowledged = self.pending = self.pending_bytes = 0
        self.progress_at = 0.0
        self._queued: collections.deque[InsertRequest] = collections.deque()
        self._sent: collections.deque[InsertRequest] = collections.deque()
        self._on_server: set[int] = set()

    @property
    def has_queued(self) -> bool:
        """Whether `take_message` has a request to take."""
        return bool(self._queued)

    @property
    def sent_items(self) -> int:
        """Number of sent items without an acknowledgement."""
        return sum(request.num_pending for request in self._sent)

    def tables(self) -> set[str]:
        """Return the tables of all pending items."""
        return {table for request in (*self._sent, *self._queued) for table in request.tables}

    def add(self, request: InsertRequest) -> None:
        """Queue a request."""
        if not self.pending:
            self.progress_at = time.monotonic()
        self.pending += request.num_items
        self.pending_bytes += request.num_bytes
        self._queued.append(request)

    def take_message(self, num_bytes: int) -> bytes:
        """Take requests of about `num_bytes` from the queue, as one message without chunks that the server has."""
        parts: list[bytes | memoryview] = []
        size = 0
        while self._queued and size < num_bytes:
            request = self._queued.popleft()
            for key, chunk in request.chunks.items():
                if key not in self._on_server:
                    self._on_server.add(key)
                    parts.append(chunk)
                    size += len(chunk)
            for rows in request.remaining_rows():
                parts.append(rows.data)
                size += rows.nbytes
            self._sent.append(request)
        self._on_server.intersection_update(itertools.chain(self._needed(), *[each.chunks for each in self._queued]))
        parts.append(InsertStreamRequest(keep_chunk_keys=self._on_server).SerializeToString())
        return b"".join(parts)

    def acknowledge(self, keys: Keys) -> int:
        """Mark items as acknowledged; return how many were new. Keys that are not in flight are ignored."""
        before, expected = self.acknowledged, len(keys)
        for request in [*self._sent]:
            if not expected:
                break
            found = request.acknowledge(keys)
            expected -= found
            self.acknowledged += found
            self.pending -= found
            if found:
                self.progress_at = time.monotonic()
            if not request.num_pending:
                self.pending_bytes -= request.num_bytes
                self._sent.remove(request)  # nearly always the first
        return self.acknowledged - before

    def requeue(self) -> int:
        """Put all sent requests back at the head of the queue, in order; return the number of unconfirmed items."""
        num_items = self.sent_items
        self._queued.extendleft(reversed(self._sent))
        self._sent.clear()
        self._on_server.clear()
        return num_items

    def drop_oldest(self) -> bool:
        """Give up the oldest request in the queue unless it is the only one; return whether one was given up."""
        if len(self._queued) <= 1:
            return False
        request = self._queued.popleft()
        self.pending -= request.num_pending
        self.pending_bytes -= request.num_bytes
        return True

    def drop_all(self) -> int:
        """Give up all pending items; return their number."""
        undelivered = self.pending
        self.pending = self.pending_bytes = 0
        self._queued.clear()
        self._sent.clear()
        return undelivered
