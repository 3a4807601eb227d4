"""A call that waits for a sender: the code runs in the calling thread, and the sender's thread only wakes it.

    call -> Sender.attend -> something may have changed -> show -> the call's inbox -> is there room, is all confirmed?

A call looks at most at what `show` has given to it, and at the ring. So an interrupt leaves nothing half done: the
sender forgets the call, or continues the delivery that a `close` has begun.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import queue
import time
from collections.abc import Callable
from typing import Literal, Protocol

from reverb_writer.background import Inbox
from reverb_writer.errors import ClosedError, FinishedError, ReplayTimeoutError, ReverbWriterError
from reverb_writer.tables.rate_limits import explain_limiter
from reverb_writer.tables.table_info import ServerInfo
from reverb_writer.transport.channel import Channel
from reverb_writer.transport.loop import PendingCall
from reverb_writer.transport.wait import Status, Wait
from reverb_writer.writing.source import Rows

_LOG = logging.getLogger(__package__)

_ROOM_S = 0.002
_UNTIL_S = 0.2  # interval at which a waiting call asks whether the run has ended
_HANDOVER_S = 5.0  # time that a call waits for the sender's answer, beside its time-out
_NOTICE_S = 0.2  # sum of the waits of steps after which the log names the cause
_TIMEOUT_S = 2.0
_ADVICE = " With `until`, a step waits for the learner until the run has ended."

Kind = Literal["room", "flush", "close"]


class SilentThreadError(ReplayTimeoutError):
    """The sender's thread does not answer."""


class Attendant(Protocol):
    """The sender, for a call that waits.

    Attributes:
        name: the sender's owner, in messages.
        ring: the rows between the writer and the sender.
        tables: the tables of its items.
        turned_at: `time.monotonic()` of its thread's last turn.
    """

    name: str
    ring: Rows
    tables: frozenset[str]
    turned_at: float

    def attend(self, call: WaitingCall) -> None:
        """Wake the call when it may go on, or is due."""


class LimiterNotice:
    """Logs once that a writer waits for a rate limiter. One thread uses it.

    An actor that is as fast as its learner has many short waits. So the server is asked when the sum of the waits is
    0.2 s, and again whenever the sum has doubled, until a limiter blocks.
    """

    def __init__(self, tables: frozenset[str]) -> None:
        """Begin to sum up waits for room for items of `tables`."""
        self._tables = {*tables}
        self._waited_s, self._ask_at_s = 0.0, _NOTICE_S
        self._asked: PendingCall[ServerInfo] | None = None

    def tell(self, address: str, limiter: str) -> None:
        """Log the text of a rate limiter, if it is the first one."""
        if self._ask_at_s != math.inf:
            self._ask_at_s = math.inf
            _LOG.info("%s: writing waits for a rate limiter. %s", address, limiter)

    def waited(self, seconds: float, channel: Channel) -> None:
        """Note that a step has waited for a server."""
        self._waited_s += seconds
        if self._asked is not None and self._asked.done():
            asked, self._asked = self._asked, None
            with contextlib.suppress(ReverbWriterError):
                if (limiter := explain_limiter(asked.result(), self._tables)) is not None:
                    self.tell(channel.address, limiter)
        if self._waited_s >= self._ask_at_s:
            self._ask_at_s = 2 * self._waited_s
            with contextlib.suppress(ClosedError):
                self._asked = channel.start_info(_TIMEOUT_S)


class WaitingCall:
    """A call that waits for room, or until everything is confirmed.

    Attributes:
        kind: "room" for a step that needs room in the ring and in flight, "flush", or "close".
        timeout_s: the time-out, in seconds.
        end_at: `time.monotonic()` of its end without progress.
        room: the room that the call was shown: 0 for none, 1 for little, 2 for much. Only the sender uses it.
        is_due: whether the call wants to be shown the status, whatever it is.
        is_over: whether the call no longer waits.
    """

    def __init__(self, kind: Kind, timeout_s: float, *, until: Callable[[], object] | None = None) -> None:
        """Prepare to wait; `until` returns whether the run has ended."""
        self.kind, self.timeout_s, self._until = kind, timeout_s, until
        self.end_at = time.monotonic() + timeout_s
        self.room, self.is_due, self.is_over = 0, False, False
        self._inbox: Inbox[Callable[[], None]] = Inbox()
        self._status: Status | None = None

    def show(self, status: Status) -> None:
        """Wake the call, with a status; callable from any thread."""
        self.is_due = False
        self._inbox.put(functools.partial(self._see, status))

    def _see(self, status: Status) -> None:
        self._status = status

    def run(
        self,
        sender: Attendant,
        *,
        extends: bool = False,
        outlasts: bool = False,
        on_limiter: Callable[[str, str], object] = lambda *_: None,
    ) -> None:
        """Wait; raise the call's error. `Wait` documents the arguments."""
        wait = Wait(
            sender.tables,
            self.timeout_s,
            self._inbox.put,
            extends=extends,
            outlasts=outlasts,
            advice=_ADVICE if self.kind == "room" and extends and not outlasts else "",
            on_limiter=on_limiter,
        )
        try:
            sender.attend(self)
            wait.run(lambda seconds: self._look(sender, wait, seconds))
        finally:
            self.is_over = True

    @property
    def channel(self) -> Channel | None:
        """The connection to the server for which the call has waited; None if it does not know."""
        return None if self._status is None else self._status.channel

    def _look(self, sender: Attendant, wait: Wait, seconds: float) -> Status | None:
        """Wait at most `seconds` until the sender shows a status, then ask for one; return None at the end of the wait.

        Raises:
            FinishedError: the run has ended.
            SilentThreadError: the sender does not answer.
        """
        until, self._status = self._until, None
        with contextlib.suppress(queue.Empty):
            self._inbox.get(seconds if until is None else min(seconds, _UNTIL_S))()
        status = self._status or self._ask(sender)
        if status.fault is not None:
            return status
        if self._has_room(sender.ring) if self.kind == "room" else not status.num_pending:
            return None
        if until is not None and wait.waited_s >= _UNTIL_S and until():
            raise FinishedError(f"the run has ended (`until` is true): {status.num_pending} items are not delivered.")
        return status

    def _ask(self, sender: Attendant) -> Status:
        """Return the sender's present status."""
        self.is_due = True
        sender.attend(self)
        while self._status is None:
            try:
                self._inbox.get(self.timeout_s + _HANDOVER_S)()
            except queue.Empty:
                silent_s = time.monotonic() - sender.turned_at
                raise SilentThreadError(
                    f"the {sender.name} has done nothing for {silent_s:.1f} s. A `priority` function may be waiting "
                    "for a lock that this thread holds: release it before you call the observer."
                ) from None
        return self._status

    def _has_room(self, ring: Rows) -> bool:
        """Return whether a waiting step may be written.

        If there is little room, it waits two more milliseconds for confirmations that make much: to wake this thread
        for each row costs more than the rows.
        """
        if self.room == 1 and min(ring.room()) > 0:
            with contextlib.suppress(queue.Empty):
                self._inbox.get(min(_ROOM_S, self.timeout_s))()
        num_rows, num_items = ring.room()
        return num_rows > 0 and num_items > 0
