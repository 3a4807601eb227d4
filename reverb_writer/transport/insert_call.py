"""Items that are sent by a stream of their own, in the caller's thread: for what is not written step by step."""

from __future__ import annotations

import collections
import contextlib
import queue
import threading
from collections.abc import Callable

from reverb_writer.transport.channel import Channel
from reverb_writer.transport.delivery import Delivery
from reverb_writer.transport.in_flight import InsertRequest
from reverb_writer.transport.waits import Wait


def insert_items(channel: Channel, request: InsertRequest, timeout_s: float, *, is_checked: bool = False) -> None:
    """Send items by a stream of their own, and return when the server has confirmed all of them.

    A server inserts what comes by one stream in its order, so an item that waits keeps all behind it waiting: items
    that have nothing to do with each other do not share a stream. After an error, the server may still insert what it
    has got.

    Args:
        channel: the connection to the server.
        request: the items.
        timeout_s: seconds to wait at most.
        is_checked: that of `Delivery`.

    Raises:
        ReplayTimeoutError, ServerUnavailableError: not in time; says why.
        StructureError: the server has one of the tables no more.
        ReverbWriterError: it refuses.
        ClosedError: another thread has closed the client.
    """
    inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
    with contextlib.closing(Delivery(channel, inbox.put, collections.Counter(), is_checked=is_checked)) as delivery:
        delivery.flight.add(request)
        wait = Wait("flush", timeout_s)
        while num_pending := delivery.flight.pending:
            if late := wait.proceed(delivery, delivery.flight.acknowledged, num_pending):
                raise late
            pause_s = min(delivery.proceed(), wait.left_s(), threading.TIMEOUT_MAX)
            with contextlib.suppress(queue.Empty):
                inbox.get(timeout=pause_s)()
            if delivery.fault is not None:
                kind, text = delivery.fault
                raise kind(text)
