"""A call that waits for a server's confirmations, in the call's own thread: its time-out, its questions, its error.

look -> status -> progress? the end of the time? time to ask, or to log? -> look again
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from reverb_writer import background
from reverb_writer.errors import ReplayTimeoutError, ReverbWriterError, ServerUnavailableError
from reverb_writer.transport.channel import Channel
from reverb_writer.transport.delivery import Post
from reverb_writer.transport.questions import Questions

_LOG = logging.getLogger(__package__)

_FIRST_QUESTION_S = 0.2
_LAST_QUESTION_S = 1.0
_NUM_QUESTIONS = 3  # of a time-out
_LONGEST_LOG_S = 640.0  # longest interval of the log's lines about a wait until the run has ended
_LONGEST = 10  # bound of every other wait, as a multiple of the time-out


class Status(NamedTuple):
    """The state of a delivery at one moment, for a call that waits.

    Attributes:
        channel: the connection to the server with the most unconfirmed items.
        num_pending: number of items that are complete and not confirmed.
        progress_at: `time.monotonic()` of the last confirmation.
        loss: error of the last attempt to connect; None while there is a connection.
        fault: kind and text of the error that ends the call at once; None to continue.
        is_final: whether pending items are given up, so that the call need not wait for them.
    """

    channel: Channel
    num_pending: int
    progress_at: float
    loss: ReverbWriterError | None
    fault: tuple[type[Exception], str] | None
    is_final: bool = False


class Wait:
    """The time-out of a call that waits.

    If `extends`, progress starts the time-out again: a confirmation, or other streams' inserts into a table whose rate
    limiter blocks ours. Reverb takes inserts in the order of arrival, so these inserts were ahead of ours. They extend
    a wait to at most ten times the time-out; confirmations have no such bound. The server is asked when the wait proves
    long, at half of the time-out, and shortly before its end. The difference of the answers shows whether actors or
    learners make progress.

    If `outlasts` is true too, an answer of the server in which a rate limiter blocks our inserts also starts the
    time-out again, and the wait has no bound: its owner ends it when the run has ended.

    Source: Reverb 0.14, `table.cc`: one queue of inserts per table, for all streams.
    """

    def __init__(
        self,
        tables: Iterable[str],
        timeout_s: float,
        post: Post,
        *,
        extends: bool = False,
        outlasts: bool = False,
        advice: str = "",
    ) -> None:
        """Begin to wait for items of `tables`.

        `post` makes `look` call a function soon, as `Delivery` documents it. `advice` ends the error's text if a rate
        limiter blocks.
        """
        self._tables, self._timeout_s, self._post = frozenset(tables), timeout_s, post
        self._extends, self._outlasts, self._advice = extends, outlasts, advice
        self._questions: Questions | None = None
        self._began_at = time.monotonic()
        self._log_at, self._log_after_s = self._began_at + background.LOG_EVERY_S, background.LOG_EVERY_S
        self._restart(self._began_at)

    def run(self, look: Callable[[float], Status | None]) -> None:
        """Wait until `look` returns None.

        `look` waits at most the given seconds for news, and returns the status.

        Raises:
            ReplayTimeoutError, ServerUnavailableError: the time is over; names the cause.
            Exception: the error of `look` or of the status.
        """
        while (status := look(self._left_s())) is not None:
            if status.fault is not None:
                kind, text = status.fault
                raise kind(text)
            now = time.monotonic()
            if self._extends and status.progress_at > self._since:
                self._restart(status.progress_at)
            if status.is_final:
                raise self._late(status)
            if now - self._since >= self._timeout_s:
                self._restart(self._extension(status, now))
            if self._ask_at and now >= self._ask_at[0]:
                self._ask(status, is_first=len(self._ask_at) == _NUM_QUESTIONS)
                del self._ask_at[0]
            if now >= self._log_at:
                self._log(status, now)

    @property
    def waited_s(self) -> float:
        """Seconds since the call."""
        return time.monotonic() - self._began_at

    def _left_s(self) -> float:
        """Return the seconds until the next look is due."""
        return max(min(self._since + self._timeout_s, self._log_at, *self._ask_at[:1]) - time.monotonic(), 0.0)

    def _restart(self, at: float) -> None:
        """Count the time-out from `at`, a `time.monotonic()`."""
        self._since = at
        last_s = max(self._timeout_s / 2, self._timeout_s - _LAST_QUESTION_S)
        first_at = time.monotonic() + min(_FIRST_QUESTION_S, self._timeout_s / 4)
        self._ask_at = [first_at, at + self._timeout_s / 2, at + last_s]

    def _extension(self, status: Status, now: float) -> float:
        """Return from when on the time-out counts again, or raise the error of the time-out."""
        questions = self._questions
        if questions is not None:
            may_extend = self._extends and (self._outlasts or now - self._began_at < _LONGEST * self._timeout_s)
            if may_extend and questions.others_progress():
                return now
            limited_at = questions.limited_at() if self._outlasts and status.loss is None else -math.inf
            if limited_at > now - self._timeout_s:
                return limited_at
        raise self._late(status)

    def _ask(self, status: Status, *, is_first: bool = False) -> None:
        """Ask the server for its tables; the first question of a time-out makes earlier answers worthless."""
        questions = self._questions
        # A server whose limiter blocks is asked again, because only two answers show who makes progress.
        is_other = questions is not None and questions.channel is not status.channel and not questions.limiter_text()
        if is_first or questions is None or is_other:
            questions = self._questions = Questions(status.channel, self._post, self._tables)
        questions.ask()

    def _log(self, status: Status, now: float) -> None:
        if self._outlasts:
            self._log_after_s = min(2 * self._log_after_s, _LONGEST_LOG_S)
        self._log_at = now + self._log_after_s
        self._ask(status)
        why = self._limiter_text() if self._outlasts else None
        why = self._cause(status) if why is None else f"{why} The call waits until the run has ended."
        _LOG.warning("%s: writing has waited %.0f s. %s", status.channel.address, self.waited_s, why)

    def _late(self, status: Status) -> Exception:
        """Return the error of the time-out."""
        tables = ", ".join(f"`{table}`" for table in sorted(self._tables))
        spent_s = self._timeout_s if self._since == self._began_at else self.waited_s
        text = f"table {tables}: {status.num_pending} items unconfirmed after {spent_s:.1f} s. {self._cause(status)}"
        if self._limiter_text():
            text += self._advice
        is_there = status.loss is None or status.channel.is_silent(status.loss)
        return (ReplayTimeoutError if is_there else ServerUnavailableError)(text)

    def _limiter_text(self) -> str | None:
        return None if self._questions is None else self._questions.limiter_text()

    def _cause(self, status: Status) -> str:
        """Return the cause of missing confirmations, as far as it is known."""
        channel = status.channel
        if status.loss is not None:
            return channel.explain_loss(status.loss)
        if self._questions is None:
            silence_s = time.monotonic() - channel.last_response_at
            return f"Its in-flight window is full; last heard of the server at {channel.address} {silence_s:.1f} s ago."
        return self._questions.explain(status.progress_at)
