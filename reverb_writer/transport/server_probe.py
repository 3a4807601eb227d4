"""Probes of a server during a long wait: is it there, what does it wait for, and shall the wait go on?"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from reverb_writer.errors import ReplayTimeoutError, ReverbWriterError, ServerUnavailableError
from reverb_writer.protocol import messages
from reverb_writer.rate_limits import explain_inserts, explain_samples, inserts_progress
from reverb_writer.table_info import ServerInfo
from reverb_writer.transport.channel import Channel
from reverb_writer.transport.grpc_errors import is_listening, is_refusal, is_silence
from reverb_writer.transport.in_flight import InFlight
from reverb_writer.transport.pending_call import PendingCall
from reverb_writer.transport.server_info import parse_server_info

_FIRST_QUESTION_S = 0.2
_ASK_EVERY_S = 4.0
_LAST_QUESTION_S = 1.0
_LONGEST = 10  # times the time-out: no wait is without end


@dataclass(frozen=True)
class ConnectionLoss:
    """A connection was lost, and there is no new one yet."""

    error: Exception  # what ended the last one, or what the last attempt to make one met
    reason: str  # the same in words

    @property
    def is_silence(self) -> bool:
        """Whether the server is there and does not answer."""
        return isinstance(self.error, ReplayTimeoutError) or is_silence(self.reason)

    def explain(self, channel: Channel, silence_s: float) -> str:
        """Say what was seen. Only a refused connection advises a start: a paused server would lose its tables by it."""
        seen = "; ".join([self.reason.rstrip("."), *channel.recent_connect_errors()])
        heard = f"last heard of {silence_s:.1f} s ago ({seen})"
        if self.is_silence or is_silence(seen) or (is_refusal(seen) and is_listening(channel.address)):
            return f"The server at {channel.address} does not answer, {heard}. It may be paused: look at its process."
        if is_refusal(seen):
            return f"The server at {channel.address} is gone, {heard}. Start it again."
        return f"There is no connection to the server at {channel.address}, {heard}. It is tried again and again."


class ServerProbe:
    """Questions to the server: when a wait proves to be long, every few seconds, and just before its time is up.

    The difference of the answers tells who stands still. None blocks, so a probe takes no time from the wait. Not
    thread-safe.
    """

    def __init__(self, channel: Channel, timeout_s: float) -> None:
        """Ask nothing yet; the wait is `timeout_s` seconds at most."""
        self._channel = channel
        self._timeout_s = timeout_s
        self._question: PendingCall | None = None  # the newest
        self._asked_at = 0.0
        self._unread = False
        self._answers: list[ServerInfo] = []  # the first one and the newest
        self._refusal = ""  # what came instead of an answer
        self._ask_at_s = min(_FIRST_QUESTION_S, timeout_s / 4)
        self._ask_last_at_s = max(timeout_s / 2, timeout_s - _LAST_QUESTION_S)

    @property
    def has_asked(self) -> bool:
        """Whether the wait has proved to be long."""
        return self._question is not None

    def proceed(self, waited_s: float) -> None:
        """Ask what is to be asked after `waited_s` seconds, one question at a time."""
        if waited_s < self._ask_at_s or (self._question is not None and not self._question.done()):
            return
        self._read_answer()
        self._question = self._channel.start(messages.SERVER_INFO, b"", self._timeout_s - waited_s)
        self._asked_at, self._unread = time.monotonic(), True
        is_last = waited_s >= self._ask_last_at_s
        self._ask_at_s = math.inf if is_last else min(waited_s + _ASK_EVERY_S, self._ask_last_at_s)

    def inserts_progress(self, tables: set[str]) -> bool:
        """Return whether the server has taken inserts into `tables` between the questions, although it blocks them."""
        answers = self._read_answer()
        return bool(answers) and inserts_progress(answers[0], answers[-1], tables)

    def explain_inserts(self, tables: set[str], silence_s: float, loss: ConnectionLoss | None) -> str:
        """Say why inserts into these tables are not confirmed, as far as it shows, after a silence of seconds.

        `loss` is what ended the connection; None while there is one.
        """
        address = self._channel.address
        if loss is not None:
            return loss.explain(self._channel, silence_s)
        if self._question is None:
            return f"Its in-flight window is full; last heard of the server at {address} {silence_s:.1f} s ago."
        answers = self._read_answer()
        if not answers and self._refusal:
            return f"The server at {address} does not say what its tables do: {self._refusal}"
        if not answers:
            return f"The server at {address} holds the connection but does not answer; silent for {silence_s:.1f} s."
        return explain_inserts(answers[0], answers[-1], tables) or (
            f"The server at {address} is slow: last confirmation {silence_s:.1f} s ago. Raise `timeout_s`."
        )

    def explain_samples(self, table: str, before: ServerInfo) -> str:
        """Say why samples of `table` do not come, as far as it shows; `before` is an earlier answer."""
        if self._question is None:
            return f"The time was up before the server at {self._channel.address} could be asked why."
        answers = self._read_answer()
        unanswered_s = time.monotonic() - self._asked_at
        if answers and (answers[-1].at == self._asked_at or unanswered_s < _LAST_QUESTION_S):
            return explain_samples(answers[-1], table, before)
        if self._refusal:
            return f"The server at {self._channel.address} does not say what its tables do: {self._refusal}"
        return f"The server at {self._channel.address} did not answer within {unanswered_s:.1f} s. Look at its process."

    def _read_answer(self) -> list[ServerInfo]:
        """Read the newest answer, once; return the first one and the newest."""
        question = self._question
        if self._unread and question is not None and question.done():
            self._unread = False
            try:
                self._answers[1:] = [parse_server_info(question.result(), self._asked_at)]
            except (ReplayTimeoutError, ServerUnavailableError):
                pass  # no answer
            except ReverbWriterError as error:
                self._refusal = str(error)
        return self._answers


class ConfirmationWait:
    """A wait for confirmations: until when it goes on, and why it takes so long. Not thread-safe.

    With `extend`, progress starts the time-out again: a confirmation, or other streams' inserts into a table whose rate
    limiter blocks ours. Reverb takes inserts in the order of their arrival, so those were ahead of ours. Even so the
    wait ends after ten times the time-out.

    Source: Reverb 0.14, `table.cc`: one queue of inserts for each table, whatever stream they came by.
    """

    def __init__(self, channel: Channel, flight: InFlight, timeout_s: float, *, extend: bool) -> None:
        """Begin to wait for what is in `flight`, `timeout_s` seconds at most; without progress if `extend`."""
        self._channel = channel
        self._flight = flight
        self._timeout_s = timeout_s
        self._extend = extend
        self.began_at = time.monotonic()
        self._acknowledged_before = flight.acknowledged
        self._restart(self.began_at)

    def left_s(self) -> float:
        """Ask the server what is to be asked by now; return the seconds that are left, 0 if the time is up."""
        now = time.monotonic()
        if self._extend and self._flight.acknowledged > self._acknowledged:
            self._restart(now)
        waited_s = now - self._since
        if waited_s < self._timeout_s:
            self._probe.proceed(waited_s)
        elif self._extend and self._probe.inserts_progress(self._flight.tables()):
            self._restart(now)
        until = self._since + self._timeout_s
        if self._extend:
            until = min(until, self.began_at + _LONGEST * self._timeout_s)
        return max(until - now, 0.0)

    @property
    def spent_s(self) -> float:
        """Return how long it was, once its time is up."""
        return self._timeout_s if self._since == self.began_at else time.monotonic() - self.began_at

    def explain(self, silence_s: float, loss: ConnectionLoss | None) -> str:
        """Say why it takes so long, see `ServerProbe.explain_inserts`."""
        if num_confirmed := 0 if self._probe.has_asked else self._acknowledged - self._acknowledged_before:
            return f"{num_confirmed} items were confirmed meanwhile; the rest waits for its turn."
        return self._probe.explain_inserts(self._flight.tables(), silence_s, loss)

    def _restart(self, now: float) -> None:
        self._since = now
        self._acknowledged = self._flight.acknowledged
        self._probe = ServerProbe(self._channel, self._timeout_s)
