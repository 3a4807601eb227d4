"""Requests in flight, queued or sent, and the chunks that they share. No I/O, no threads.

    add -> queued --take_message--> sent --acknowledge--> finished, for `take_finished`
             ^                        |
             +-------- requeue -------+   (the connection was lost)

    send_again -> the head of the queue   (the server was restarted, and may lack requests that it had confirmed)

Requests that are sent again were counted when they were confirmed: no counter counts them a second time.

Each request lists chunks to keep. The server forgets all other chunks, and refuses a request that lists an unknown
chunk. A message lists the chunks on the server that queued requests or later windows may refer to.

Not thread-safe: its owner calls it from one thread.

Source: reverb/cc/reverb_service_impl.cc, InsertStream.
"""

from __future__ import annotations

import collections
import itertools
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

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
    num_pending: int = field(init=False)  # items that the present server has not confirmed
    num_new: int = field(init=False)  # items that no server has confirmed
    sent_at: float | None = field(init=False, default=None)  # `time.monotonic()`; minus infinity if it was sent twice
    is_again: bool = field(init=False, default=False)  # whether it was confirmed as a whole, and is sent again

    def __post_init__(self) -> None:
        self.num_items = self.num_pending = self.num_new = sum(map(len, self.rows))
        self._is_pending = np.ones(self.num_items, bool)
        self._is_left_out = self._was_confirmed = np.zeros(self.num_items, bool)  # replaced, never changed in place

    def acknowledge(self, keys: Keys) -> int:
        """Mark items of the request as confirmed; return how many the present server confirms for the first time.

        Other keys are ignored.
        """
        index = keys - np.uint64(self.first_key)  # keys below the first one wrap around to huge numbers
        self._is_pending[index[index < self.num_items]] = False
        before, self.num_pending = self.num_pending, int(np.count_nonzero(self._is_pending))
        if self.num_new:
            self.num_new = int(np.count_nonzero(self._is_pending & ~self._was_confirmed))
        return before - self.num_pending

    def renew(self) -> None:
        """Make confirmed items pending again, because another server has taken over, except those left out."""
        self._was_confirmed = self._was_confirmed | ~self._is_pending
        self._is_pending = ~self._is_left_out
        self.num_pending = int(np.count_nonzero(self._is_pending))

    def leave_out(self, table: str, num_left: float = 0) -> int:
        """Never send items of a table again, except the newest `num_left`; return how many are left out by the call."""
        is_left_out, before = self._is_left_out.copy(), np.count_nonzero(self._is_left_out)
        stop = self.num_items
        for name, rows in zip(reversed(self.block_tables()), reversed(self.rows), strict=True):
            if name == table:
                num_kept = int(min(len(rows), num_left))
                num_left -= num_kept
                is_left_out[stop - len(rows) : stop - num_kept] = True
            stop -= len(rows)
        self._is_left_out = is_left_out
        return int(np.count_nonzero(is_left_out) - before)

    def count(self, table: str) -> int:
        """Return the number of items of a table that are not left out."""
        if self.tables == {table}:
            return self.num_kept
        stops = itertools.accumulate(map(len, self.rows))
        blocks = zip(self.block_tables(), self.rows, stops, strict=True)
        left_out = self._is_left_out
        return sum(len(rows) - int(left_out[at - len(rows) : at].sum()) for name, rows, at in blocks if name == table)

    @property
    def num_kept(self) -> int:
        """Number of items that are not left out."""
        return self.num_items - int(np.count_nonzero(self._is_left_out))

    def block_tables(self) -> list[str]:
        """Return the table of each array of `rows`."""
        if len(self.tables) == 1:
            return [*self.tables] * len(self.rows)
        return [InsertStreamRequest.FromString(rows[0].tobytes()).items[0].table for rows in self.rows]

    def remaining_rows(self) -> list[npt.NDArray[np.uint8]]:
        """Return the items that are not acknowledged."""
        if self.num_pending == self.num_items:
            return self.rows
        stops = list(itertools.accumulate(map(len, self.rows)))
        return [rows[self._is_pending[stop - len(rows) : stop]] for rows, stop in zip(self.rows, stops, strict=True)]


class Memory:
    """Memory of some requests; a chunk that several of the requests share counts once.

    Attributes:
        num_bytes: bytes of all rows and chunks.
    """

    def __init__(self) -> None:
        """Start without requests."""
        self.num_bytes = 0
        self._holders: collections.Counter[int] = collections.Counter()  # by chunk: requests that hold it

    def add(self, request: InsertRequest) -> None:
        """Count a request."""
        self.num_bytes += sum(rows.nbytes for rows in request.rows)
        for key, chunk in request.chunks.items():
            self.num_bytes += 0 if self._holders[key] else len(chunk)
            self._holders[key] += 1

    def remove(self, request: InsertRequest) -> None:
        """Count a request no longer; its chunks still count if another request holds them."""
        self.num_bytes -= sum(rows.nbytes for rows in request.rows)
        for key, chunk in request.chunks.items():
            self._holders[key] -= 1
            if not self._holders[key]:
                del self._holders[key]
                self.num_bytes -= len(chunk)


class InFlight:
    """Requests in flight.

    Attributes:
        acknowledged: number of items that a server has confirmed.
        pending: number of items that are neither confirmed nor given up.
        progress_at: `time.monotonic()` of the last acknowledgement; if nothing was pending after it, of the next `add`.
    """

    def __init__(self, needed: Callable[[], Iterable[int]] = lambda: ()) -> None:
        """Start with nothing in flight; `needed` returns the keys of chunks that later windows may refer to."""
        self._needed = needed
        self._finished: list[InsertRequest] = []
        self.acknowledged = self.pending = 0
        self._memory, self._again_memory = Memory(), Memory()
        self.progress_at = 0.0
        self._queued: collections.deque[InsertRequest] = collections.deque()
        self._sent: collections.deque[InsertRequest] = collections.deque()
        self._on_server: set[int] = set()

    @property
    def pending_bytes(self) -> int:
        """Memory of the requests that have pending items."""
        return self._memory.num_bytes

    @property
    def again_bytes(self) -> int:
        """Memory of the requests that are sent again."""
        return self._again_memory.num_bytes

    @property
    def has_queued(self) -> bool:
        """Whether `take_message` has a request to take."""
        return bool(self._queued)

    @property
    def again(self) -> int:
        """Number of items that were confirmed and are sent again."""
        return sum(request.num_pending - request.num_new for request in (*self._sent, *self._queued))

    @property
    def has_sent(self) -> bool:
        """Whether sent items wait for an acknowledgement."""
        return bool(self._sent)

    def tables(self) -> set[str]:
        """Return the tables of all pending items."""
        return {table for request in (*self._sent, *self._queued) for table in request.tables}

    def add(self, request: InsertRequest) -> None:
        """Queue a request."""
        if not self.pending:
            self.progress_at = time.monotonic()
        self.pending += request.num_items
        self._memory.add(request)
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
            request.sent_at = -math.inf if request.sent_at is not None else time.monotonic()
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
            num_new = request.num_new
            found = request.acknowledge(keys)
            expected -= found
            self.acknowledged += num_new - request.num_new
            self.pending -= num_new - request.num_new
            if found:
                self.progress_at = time.monotonic()
            if not request.num_pending:
                (self._again_memory if request.is_again else self._memory).remove(request)
                self._sent.remove(request)  # nearly always the first
                self._finished.append(request)
        return self.acknowledged - before

    def take_finished(self) -> list[InsertRequest]:
        """Return the requests whose last item was confirmed since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def requeue(self) -> int:
        """Put all sent requests back at the head of the queue, in order; return the number of unconfirmed items."""
        num_items = sum(request.num_new for request in self._sent)
        self._queued.extendleft(reversed(self._sent))
        self._sent.clear()
        self._on_server.clear()
        return num_items

    def send_again(self, requests: Sequence[InsertRequest]) -> None:
        """Queue confirmed requests before all others, and confirmed items of other requests; nothing may be sent."""
        for request in (*requests, *self._queued):
            request.renew()
        for request in reversed(requests):
            if request.num_pending:
                request.is_again = True
                self._again_memory.add(request)
                self._queued.appendleft(request)
        self.progress_at = time.monotonic()

    def drop_again(self) -> int:
        """Give up the queued requests that were confirmed as a whole; return the number of their pending items."""
        num_items = sum(request.num_pending for request in self._queued if request.is_again)
        self._queued = collections.deque(request for request in self._queued if not request.is_again)
        self._again_memory = Memory()
        return num_items

    def drop_all(self) -> int:
        """Give up all items; return the number of pending ones."""
        undelivered = self.pending
        self.pending, self._memory, self._again_memory = 0, Memory(), Memory()
        self._queued.clear()
        self._sent.clear()
        return undelivered
