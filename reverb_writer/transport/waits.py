"""A call that waits until items are confirmed: until when, and what it is told if it waits in vain."""

from __future__ import annotations

import collections
import contextlib
import logging
import math
import queue
import threading
import time
from collections.abc import Callable
from typing import Literal

from reverb_writer.errors import ReplayTimeoutError, ServerUnavailableError
from reverb_writer.transport.channel import Channel
from reverb_writer.transport.delivery import Delivery
from reverb_writer.transport.in_flight import InsertRequest

_LOG = logging.getLogger(__package__)

_FIRST_QUESTION_S = 0.2
_LAST_QUESTION_S = 1.0
_LOG_EVERY_S = 10.0
_LONGEST = 10  # times the time-out: no wait is without end


class Wait:
    """A call that waits for room, or until everything is confirmed.

    If `extends`, progress starts the time-out again: a confirmation, or other streams' inserts into a table whose rate
    limiter blocks ours. Reverb takes inserts in the order of their arrival, so those were ahead of ours. Even so the
    wait ends after ten times the time-out. The server is asked twice: when the wait proves to be long, and when its
    time is nearly up. The difference of the answers says who stands still.

    Attributes:
        kind: "room" for a step, which needs `row` to be granted, "flush", or "close".
        answer: gets the outcome: None, or the error to raise.
        is_abandoned: whether the caller has left, because it was interrupted.

    Source: Reverb 0.14, `table.cc`: one queue of inserts for each table, whatever stream they came by.
    """

    def __init__(
        self, kind: Literal["room", "flush", "close"], timeout_s: float, *, extends: bool = False, row: int = 0
    ) -> None:
        """Begin to wait."""
        self.kind, self.timeout_s, self.extends, self.row = kind, timeout_s, extends, row
        self.answer: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
        self.is_abandoned = False
        self._began_at = time.monotonic()
        self._restart()
        self._look_at = math.inf
        self._logged_at = self._began_at
        self._acknowledged = -1  # items, at the last progress

    def proceed(self, delivery: Delivery, acknowledged: int, num_pending: int) -> Exception | None:
        """Ask the server when it is time, log every ten seconds; return the error when the time is up.

        `acknowledged` items are confirmed so far: if there are more than before, the time-out may begin again.
        """
        if self.extends and self._acknowledged not in (-1, acknowledged):
            self._restart()
        self._acknowledged = acknowledged
        if self._is_over(delivery):
            tables = ", ".join(f"`{table}`" for table in sorted(delivery.flight.tables()))
            spent_s = self.timeout_s if self._since == self._began_at else self.waited_s
            text = f"table {tables}: {num_pending} items unconfirmed after {spent_s:.1f} s. {delivery.explain()}"
            is_there = delivery.loss is None or delivery.loss.is_silent
            return (ReplayTimeoutError if is_there else ServerUnavailableError)(text)
        now = time.monotonic()
        if self._ask_at and now >= self._ask_at[0]:
            if len(self._ask_at) > 1:
                delivery.begin_questions()
            del self._ask_at[0]
            delivery.ask()
        if now - self._logged_at >= _LOG_EVERY_S:
            self._logged_at = now
            delivery.ask()
            text = "%s: waiting for %.0f s: %s"
            _LOG.warning(text, delivery.channel.address, self.waited_s, delivery.explain())
        return None

    def _restart(self) -> None:
        self._since = time.monotonic()
        last_s = max(self.timeout_s / 2, self.timeout_s - _LAST_QUESTION_S)
        self._ask_at = [self._since + min(_FIRST_QUESTION_S, self.timeout_s / 4), self._since + last_s]

    def _is_over(self, delivery: Delivery) -> bool:
        """Return whether the time is up; others' progress at the server starts it again."""
        now = time.monotonic()
        if now - self._since < self.timeout_s:
            return False
        is_last = now - self._began_at >= _LONGEST * self.timeout_s
        if self.extends and not is_last and delivery.others_progress():
            self._restart()
            return False
        return True

    @property
    def waited_s(self) -> float:
        """Seconds since the call."""
        return time.monotonic() - self._began_at

    def had_room_for(self, seconds: float, *, has_room: bool) -> bool:
        """Return whether there has been some room for so many seconds, given whether there is any now."""
        now = time.monotonic()
        self._look_at = min(self._look_at, now + seconds) if has_room else math.inf
        return now >= self._look_at

    def left_s(self) -> float:
        """Return in how many seconds there is something to do."""
        now = time.monotonic()
        times = (self._since + self.timeout_s, self._logged_at + _LOG_EVERY_S, self._look_at, *self._ask_at)
        return max(min(times) - now, 0.0)


def insert_items(channel: Channel, request: InsertRequest, timeout_s: float, *, is_checked: bool = False) -> None:
    """Send items by a stream of their own, and return when the server has confirmed every item.

    A server inserts what comes by one stream in its order, so an item that waits keeps all behind it waiting: items
    that have nothing to do with each other do not share a stream. After an error, the server may still insert what it
    has got.

    `is_checked` is that of `Delivery`.

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
