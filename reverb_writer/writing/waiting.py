"""A call that waits for a sender: the code runs in the calling thread, and the sender's thread only wakes it.

    Sender.attend -> something may have changed -> Caller.show -> has it room, or is all confirmed? -> return or raise

A call reads only the status that it was shown, and the ring. So an interrupt leaves nothing half done: the sender
forgets the call, or continues the delivery that a `close` has begun.
"""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import time
from collections.abc import Callable, Iterable
from typing import Literal

from reverb_writer.errors import FinishedError, ReplayTimeoutError
from reverb_writer.transport.channel import Channel
from reverb_writer.transport.delivery import Post
from reverb_writer.transport.questions import Questions
from reverb_writer.transport.wait import Status, Wait
from reverb_writer.writing.caller import Caller
from reverb_writer.writing.sender import Sender

_LOG = logging.getLogger(__package__)

_ROOM_S = 0.002
_UNTIL_S = 0.2  # interval at which a waiting call asks whether the run has ended
_HANDOVER_S = 5.0  # time that a call waits for the sender's answer, beside its time-out
_NOTICE_S = 0.2  # sum of the waits of calls after which the log names the cause
_ADVICE = " With `until`, a call waits for the learner until the run has ended."


class WaitingCall:
    """A call that waits for room, or until everything is confirmed."""

    def __init__(
        self,
        sender: Sender,
        notice: LimiterNotice,
        kind: Literal["room", "flush", "close"],
        timeout_s: float,
        *,
        extends: bool = False,
        until: Callable[[], object] | None = None,
    ) -> None:
        """Begin to wait. `until` returns whether the run has ended; `Wait` documents `extends`."""
        self._sender, self._notice, self._timeout_s, self._until = sender, notice, timeout_s, until
        self._caller = Caller(kind, time.monotonic() + timeout_s)
        is_write = kind == "room" and extends
        self._wait = Wait(
            sender.tables,
            timeout_s,
            self._caller.inbox.put,
            extends=extends,
            outlasts=is_write and until is not None,
            advice=_ADVICE if is_write and until is None else "",
        )

    def run(self) -> None:
        """Wait; raise the call's error."""
        try:
            self._sender.attend(self._caller)
            self._wait.run(self._look)
        finally:
            self._caller.is_over = True
            if self._caller.kind == "room":
                self._notice.note(self._wait.waited_s)

    def _look(self, seconds: float) -> Status | None:
        """Wait at most `seconds` until the sender shows a status, then ask for one; return None at the end of the wait.

        Raises:
            FinishedError: the run has ended.
            ReplayTimeoutError: the sender does not answer.
        """
        caller, until = self._caller, self._until
        caller.status = None
        with contextlib.suppress(queue.Empty):
            caller.inbox.get(seconds if until is None else min(seconds, _UNTIL_S))()
        status = caller.status or self._ask()
        if caller.kind == "room":
            self._notice.check(self._wait.waited_s, status.channel, self._sender.post)
        if status.fault is not None:
            return status
        if self._has_room() if caller.kind == "room" else not status.num_pending:
            return None
        if until is not None and self._wait.waited_s >= _UNTIL_S and until():
            raise FinishedError(f"the run has ended (`until` is true): {status.num_pending} items are not delivered.")
        return status

    def _ask(self) -> Status:
        """Return the sender's present status."""
        caller, sender = self._caller, self._sender
        sender.ask(caller)
        while caller.status is None:
            try:
                caller.inbox.get(self._timeout_s + _HANDOVER_S)()
            except queue.Empty:
                silent_s = time.monotonic() - sender.turned_at
                raise ReplayTimeoutError(
                    f"the {sender.name} has done nothing for {silent_s:.1f} s. A `priority` function may be waiting "
                    "for a lock that this thread holds: release it before you call the observer."
                ) from None
        return caller.status

    def _has_room(self) -> bool:
        """Return whether a waiting call may be written.

        If there is little room, it waits two more milliseconds for confirmations that make much: to wake this thread
        for each row costs more than the rows.
        """
        ring = self._sender.ring
        if self._caller.room == 1 and min(ring.room()) > 0:
            with contextlib.suppress(queue.Empty):
                self._caller.inbox.get(min(_ROOM_S, self._timeout_s))()
        num_rows, num_items = ring.room()
        return bool(num_rows > 0 and num_items > 0)


class LimiterNotice:
    """Logs once that a writer waits for a rate limiter.

    An actor that is as fast as its learner has many short waits. So the server is asked when the sum of the waits is
    0.2 s, and again whenever the sum has doubled, until a limiter blocks.
    """

    def __init__(self, tables: Iterable[str]) -> None:
        """Ask nothing yet; `tables` are those of the writer."""
        self._tables = frozenset(tables)
        self._questions: Questions | None = None
        self._waited_s, self._ask_at_s = 0.0, _NOTICE_S

    def note(self, seconds: float) -> None:
        """Note that a call has waited."""
        self._waited_s += seconds

    def check(self, seconds: float, channel: Channel, post: Post) -> None:
        """Log the limiter that blocks, or ask for it if it is time; a call has waited for `seconds` until now.

        `Delivery` documents `post`.
        """
        if self._ask_at_s == math.inf:
            return
        questions = self._questions
        limiter = None if questions is None else questions.limiter_text()
        if questions is not None and limiter is not None:
            self._ask_at_s = math.inf
            _LOG.info("%s: writing waits for a rate limiter. %s", questions.channel.address, limiter)
        elif self._waited_s + seconds >= self._ask_at_s:
            self._ask_at_s = 2 * (self._waited_s + seconds)
            self._questions = Questions(channel, post, self._tables)
            self._questions.ask()
