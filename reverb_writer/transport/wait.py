"""A call that waits for room, or until everything is confirmed: its end, its questions and its error.

A `Wait` has no thread: the owner of a `Delivery` calls it from one thread.
"""

from __future__ import annotations

import logging
import math
import time
from typing import Literal

from reverb_writer.background import Inbox
from reverb_writer.errors import ReplayTimeoutError, ServerUnavailableError
from reverb_writer.transport.delivery import Delivery

_LOG = logging.getLogger(__package__)

_FIRST_QUESTION_S = 0.2
_LAST_QUESTION_S = 1.0
_NUM_QUESTIONS = 3  # of a time-out
_LOG_EVERY_S = 10.0
_LONGEST_LOG_S = 640.0  # longest interval of the log's lines about a wait until the run has ended
_LONGEST = 10  # bound of every other wait, as a multiple of the time-out


class Wait:
    """A call that waits for room, or until everything is confirmed.

    If `extends`, progress starts the time-out again: a confirmation, or other streams' inserts into a table whose rate
    limiter blocks ours. Reverb takes inserts in the order of arrival, so these inserts were ahead of ours. They extend
    a wait to at most ten times the time-out; confirmations have no such bound. The server is asked when the wait proves
    long, at half of the time-out, and shortly before its end. The difference of the answers shows whether actors or
    learners make progress.

    If `outlasts` is true too, an answer of the server in which a rate limiter blocks our inserts also starts the
    time-out again, and the wait has no bound: its owner ends it when the run has ended.

    Attributes:
        kind: "room" for a step that needs room in the ring and in flight, "flush", or "close".
        answer: gets the outcome: None, or the error to raise.
        is_abandoned: whether an interrupt has ended the call.

    Source: Reverb 0.14, `table.cc`: one queue of inserts per table, for all streams.
    """

    def __init__(
        self,
        kind: Literal["room", "flush", "close"],
        timeout_s: float,
        *,
        extends: bool = False,
        outlasts: bool = False,
    ) -> None:
        """Begin to wait."""
        self.kind, self.timeout_s, self.extends, self.outlasts = kind, timeout_s, extends, outlasts
        self.answer: Inbox[Exception | None] = Inbox()
        self.is_abandoned = False
        self._restart(time.monotonic())
        self._began_at = self._since
        self._log_at, self._log_after_s = self._since + _LOG_EVERY_S, _LOG_EVERY_S
        self._look_at = math.inf

    def proceed(self, delivery: Delivery, progress_at: float, num_pending: int) -> Exception | None:
        """Ask the server if it is time, log now and then, and return the error at the time-out.

        Progress at `progress_at`, a `time.monotonic()`, may start the time-out again.
        """
        now = time.monotonic()
        if self.extends and progress_at > self._since:
            self._restart(now)
        if now - self._since >= self.timeout_s:
            is_told = self.outlasts and delivery.loss is None
            limited_at = delivery.questions.limited_at() if is_told else -math.inf
            may_extend = self.extends and (self.outlasts or now - self._began_at < _LONGEST * self.timeout_s)
            if may_extend and delivery.questions.others_progress():
                self._restart(now)
            elif limited_at > now - self.timeout_s:
                self._restart(limited_at)
            else:
                return self._late(delivery, num_pending)
        if self._ask_at and now >= self._ask_at[0]:
            delivery.questions.ask(is_first=len(self._ask_at) == _NUM_QUESTIONS)
            del self._ask_at[0]
        if now >= self._log_at:
            if self.outlasts:
                self._log_after_s = min(2 * self._log_after_s, _LONGEST_LOG_S)
            self._log_at = now + self._log_after_s
            delivery.questions.ask()
            why = delivery.questions.limiter_text() if self.outlasts else None
            why = _cause(delivery) if why is None else f"{why} The step waits until the run has ended."
            _LOG.warning("%s: writing has waited %.0f s. %s", delivery.channel.address, self.waited_s, why)
        return None

    def _late(self, delivery: Delivery, num_pending: int) -> Exception:
        """Return the error of the time-out."""
        tables = ", ".join(f"`{table}`" for table in sorted(delivery.flight.tables()))
        spent_s = self.timeout_s if self._since == self._began_at else self.waited_s
        text = f"table {tables}: {num_pending} items unconfirmed after {spent_s:.1f} s. {_cause(delivery)}"
        if self.kind == "room" and self.extends and not self.outlasts and delivery.questions.limiter_text():
            text += " With `until`, a step waits for the learner until the run has ended."
        is_there = delivery.loss is None or delivery.channel.is_silent(delivery.loss)
        return (ReplayTimeoutError if is_there else ServerUnavailableError)(text)

    def _restart(self, at: float) -> None:
        """Count the time-out from `at`, a `time.monotonic()`."""
        self._since = at
        last_s = max(self.timeout_s / 2, self.timeout_s - _LAST_QUESTION_S)
        first_at = time.monotonic() + min(_FIRST_QUESTION_S, self.timeout_s / 4)
        self._ask_at = [first_at, at + self.timeout_s / 2, at + last_s]

    @property
    def waited_s(self) -> float:
        """Seconds since the call."""
        return time.monotonic() - self._began_at

    def had_room_for(self, seconds: float, *, has_room: bool) -> bool:
        """Return whether there has been room for at least `seconds`; `has_room` is whether there is room now."""
        now = time.monotonic()
        self._look_at = min(self._look_at, now + seconds) if has_room else math.inf
        return now >= self._look_at

    def left_s(self) -> float:
        """Return the seconds until `proceed` is due."""
        now = time.monotonic()
        times = (self._since + self.timeout_s, self._log_at, self._look_at, *self._ask_at)
        return max(min(times) - now, 0.0)


def _cause(delivery: Delivery) -> str:
    """Return the cause of missing confirmations, as far as it is known."""
    if delivery.loss is not None:
        return delivery.channel.explain_loss(delivery.loss)
    return delivery.questions.explain()
