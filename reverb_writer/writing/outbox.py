"""Complete items between source and server: requests, their delivery, and the limit of items in flight.

    items of the source -> requests -> the delivery to the server

`Outbox` is the interface towards the sender, and `ServerOutbox` its form for one server.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from reverb_writer.transport.channel import Channel
from reverb_writer.transport.delivery import Delivery, Post
from reverb_writer.writing.source import Batch, Source
from reverb_writer.writing.stream_options import DeliveryOptions

_LEAST_ITEMS, _LEAST_CALLS, _MOST_ITEMS = 400, 32, 16_384  # bounds of the unconfirmed items at a server
_AHEAD_S, _EPOCH_S = 0.1, 0.05


class Outbox(Protocol):
    """Takes the items of one writer and delivers them. Not thread-safe: only the sender uses it."""

    @property
    def delivery(self) -> Delivery:
        """The delivery for which a call waits."""

    @property
    def address(self) -> str:
        """The receiver's address, for messages."""

    @property
    def limit(self) -> int:
        """The number of items that may be in flight."""

    @property
    def num_written(self) -> int:
        """Number of items that were written here and are not confirmed."""

    @property
    def pending_bytes(self) -> int:
        """Memory of these items."""

    @property
    def kept_bytes(self) -> int:
        """Memory of confirmed items that a restart of the server could lose."""

    @property
    def fault(self) -> tuple[type[Exception], str] | None:
        """Kind and text of the error with which items are refused; None without a refusal."""

    @property
    def progress_at(self) -> float:
        """`time.monotonic()` of the last confirmation; if nothing was in flight after it, of the next items."""

    def room(self) -> int:
        """Return the number of further items that a call may complete; 0 if too many bytes are unconfirmed."""

    def check(self) -> None:
        """Give up lost servers. The sender calls it before it takes rows, because new rows belong to no cut episode."""

    def write(self, batches: Sequence[Batch]) -> None:
        """Make requests of batches, and queue them."""

    def proceed(self) -> float:
        """Do all due work, without a wait; return the seconds until more is due, infinity for none."""

    def close(self) -> int:
        """Give up all unconfirmed items; return their number."""


MakeOutbox = Callable[[DeliveryOptions, Source, Post], Outbox]


class ItemLimit:
    """Limit of unconfirmed items at a server: a fixed number, or the number that the server confirms in 0.1 s.

    With 400 items, an actor that only writes would wait half of the time. While a rate limiter blocks, there are few
    confirmations, so the limit falls to the least one within a tenth of a second. A split DQN learns with up to 2,000
    items and not with 16,384; see docs/decisions.md#in-flight.

    Attributes:
        items: the present limit.
    """

    def __init__(self, fixed: int | None, items_per_call: float) -> None:
        """Take a fixed number; None for a limit that adapts, at least 400 and the items that 32 calls complete.

        >>> ItemLimit(None, 1).items, ItemLimit(None, 64).items
        (400, 2048)
        """
        self._is_fixed = fixed is not None
        self.items = self._least = fixed or max(_LEAST_ITEMS, math.ceil(_LEAST_CALLS * items_per_call))
        self._since = time.monotonic()
        self._before = 0  # items confirmed at `_since`

    def update(self, acknowledged: int) -> None:
        """Adapt to the number of items confirmed so far."""
        now = time.monotonic()
        if self._is_fixed or now - self._since < _EPOCH_S:
            return
        rate = (acknowledged - self._before) / (now - self._since)
        self.items = max(self._least, min(int(_AHEAD_S * rate), _MOST_ITEMS))
        self._since, self._before = now, acknowledged


class ServerOutbox:
    """The outbox of one server; the methods are those of `Outbox`.

    Attributes:
        delivery: to the server.
    """

    def __init__(self, channel: Channel, options: DeliveryOptions, source: Source, post: Post) -> None:
        """Prepare the delivery of the items of `source`; `post` is the sender's."""
        self.delivery = Delivery(
            channel,
            post,
            source.books.counts,
            needed=source.needed_chunks,
            max_kept_bytes=options.max_kept_bytes,
        )
        self._source, self._max_bytes = source, options.max_in_flight_bytes
        self._limit = ItemLimit(options.max_in_flight_items, source.items_per_call)

    @property
    def address(self) -> str:
        """The server's address."""
        return self.delivery.channel.address

    @property
    def limit(self) -> int:
        """The number of items that may be unconfirmed."""
        return self._limit.items

    @property
    def num_written(self) -> int:
        """Number of items that are not confirmed."""
        return self.delivery.flight.pending

    @property
    def pending_bytes(self) -> int:
        """Memory of these items."""
        return self.delivery.flight.pending_bytes

    @property
    def kept_bytes(self) -> int:
        """Memory of confirmed items that are kept or sent again."""
        return self.delivery.kept.num_bytes + self.delivery.flight.again_bytes

    @property
    def fault(self) -> tuple[type[Exception], str] | None:
        """The error with which the server refuses items."""
        return self.delivery.fault

    @property
    def progress_at(self) -> float:
        """Time of the last confirmation."""
        return self.delivery.flight.progress_at

    def room(self) -> int:
        """Return how many further items may be unconfirmed; the limit adapts here."""
        flight = self.delivery.flight
        self._limit.update(flight.acknowledged)
        return 0 if flight.pending_bytes >= self._max_bytes else max(self._limit.items - flight.pending, 0)

    def check(self) -> None:
        """Do nothing, because the only server is never given up."""

    def write(self, batches: Sequence[Batch]) -> None:
        """Queue the requests of all batches."""
        for request in self._source.requests(batches):
            self.delivery.flight.add(request)

    def proceed(self) -> float:
        """Connect and send."""
        return self.delivery.proceed()

    def close(self) -> int:
        """Give up the unconfirmed items."""
        return self.delivery.close()
