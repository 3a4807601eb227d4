"""Probes of a server during a long wait for samples: is it there, and what does it wait for?"""

from __future__ import annotations

import math
import time

from reverb_writer.errors import ReplayTimeoutError, ReverbWriterError, ServerUnavailableError
from reverb_writer.protocol import messages
from reverb_writer.tables.rate_limits import explain_samples
from reverb_writer.tables.table_info import ServerInfo
from reverb_writer.transport.channel import Channel
from reverb_writer.transport.pending_call import PendingCall
from reverb_writer.transport.server_info import parse_server_info

_FIRST_QUESTION_S = 0.2
_ASK_EVERY_S = 4.0
_LAST_QUESTION_S = 1.0
_RECENT_S = 10.0  # what was inserted before that does not show that actors write


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

    def explain_samples(self, table: str, before: ServerInfo) -> str:
        """Say why samples of `table` do not come, as far as it shows; `before` is an earlier answer."""
        if self._question is None:
            return f"The time was up before the server at {self._channel.address} could be asked why."
        answers = self._read_answer()
        unanswered_s = time.monotonic() - self._asked_at
        if answers and (answers[-1].at == self._asked_at or unanswered_s < _LAST_QUESTION_S):
            is_recent = answers[-1].at - before.at < _RECENT_S
            return explain_samples(answers[-1], table, before if is_recent else answers[0])
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
