"""Items that are sent by a stream of their own, in the caller's thread: for what is not written step by step."""

from __future__ import annotations

import collections
import contextlib
import queue
import threading
from collections.abc import Callable, Iterable

from reverb_writer.transport.channel import Channel
from reverb_writer.transport.delivery import Delivery
from reverb_writer.transport.in_flight import InsertRequest
from reverb_writer.transport.waits import Wait


class Inserts:
    """A stream of items that the caller's own thread delivers, while it waits. Not thread-safe; a context manager.

    A server inserts what comes by one stream in its order, so an item that waits keeps all behind it waiting: items
    that have nothing to do with each other do not share a stream.
    """

    def __init__(self, channel: Channel, *, is_checked: bool = False) -> None:
        """Prepare the stream; it connects when it is first waited for. `is_checked` is that of `Delivery`."""
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._delivery = Delivery(channel, self._inbox.put, collections.Counter(), is_checked=is_checked)

    def write(self, request: InsertRequest | None, *, hold: Iterable[int] = (), release: Iterable[int] = ()) -> None:
        """Queue a request; see `InFlight.add`."""
        self._delivery.flight.add(request, hold=hold, release=release)

    def wait(self, timeout_s: float, *, max_pending: int = 0, extends: bool = False) -> None:
        """Send what is queued, until at most `max_pending` items are unconfirmed.

        Raises:
            ReplayTimeoutError, ServerUnavailableError: not in `timeout_s` seconds, or, if `extends`, nothing moved for
                that long; says why.
            StructureError: the server has one of the tables no more.
            ReverbWriterError: it refuses.
            ClosedError: another thread has closed the client.
        """
        delivery = self._delivery
        wait = Wait("flush", timeout_s, extends=extends)
        while (num_pending := delivery.flight.pending) > max_pending:
            if late := wait.proceed(delivery, delivery.flight.acknowledged, num_pending):
                raise late
            pause_s = min(delivery.proceed(), wait.left_s(), threading.TIMEOUT_MAX)
            with contextlib.suppress(queue.Empty):
                self._inbox.get(timeout=pause_s)()
            if delivery.fault is not None:
                kind, text = delivery.fault
                raise kind(text)

    def close(self) -> None:
        """End the stream, and give up what is unconfirmed: what the server has it may still insert. Idempotent."""
        self._delivery.close()

    def __enter__(self) -> Inserts:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
