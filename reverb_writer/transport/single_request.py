"""One request over a stream of its own, delivered before the call returns."""

from __future__ import annotations

import collections
import contextlib
import queue
import threading
from collections.abc import Callable

from reverb_writer.tables.table_info import ServerInfo
from reverb_writer.transport.channel import Channel
from reverb_writer.transport.delivery import Delivery
from reverb_writer.transport.in_flight import InsertRequest
from reverb_writer.transport.wait import Wait


def insert_items(channel: Channel, request: InsertRequest, timeout_s: float, info: ServerInfo | None = None) -> None:
    """Send items by their own stream, and return when the server has confirmed every item.

    A server inserts the items of a stream in order, so a waiting item blocks all later items of the stream: unrelated
    items must not share a stream. After an error, the server may still insert received items. `Delivery` documents
    `info`.
    """
    inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
    with contextlib.closing(Delivery(channel, inbox.put, collections.Counter(), info=info)) as delivery:
        delivery.flight.add(request)
        wait = Wait("flush", timeout_s)
        while num_pending := delivery.flight.pending:
            if late := wait.proceed(delivery, delivery.flight.progress_at, num_pending):
                raise late
            pause_s = min(delivery.proceed(), wait.left_s(), threading.TIMEOUT_MAX)
            with contextlib.suppress(queue.Empty):
                inbox.get(timeout=pause_s)()
            if delivery.fault is not None:
                kind, text = delivery.fault
                raise kind(text)
