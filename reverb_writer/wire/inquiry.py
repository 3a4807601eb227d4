"""Questions to a server that does not answer fast enough: is it there, and what is it waiting for?"""

from __future__ import annotations

import math
import time
from typing import Any

from reverb_writer.wire import messages
from reverb_writer.wire.channel import Channel
from reverb_writer.wire.server_info import ServerInfo, parse_server_info, why_inserts_wait

__all__ = ["Heartbeat", "Inquiry"]

_PATIENCE_S = 0.2
_LAST_QUESTION_S = 1.0
_SILENCE_S = 10.0
_ANSWER_WITHIN_S = 5.0


class Inquiry:
    """Two questions to the server: one when a wait proves to be long, one just before its time is up.

    Their difference tells who stands still. Neither blocks, so an inquiry takes no time from the wait. Not thread-safe.
    """

    def __init__(self, channel: Channel, timeout_s: float) -> None:
        """Ask nothing yet; the wait is `timeout_s` seconds at most."""
        self._channel = channel
        self._timeout_s = timeout_s
        self._first: Any = None
        self._last: Any = None
        self._first_at = self._last_at = 0.0

    def proceed(self, waited_s: float) -> None:
        """Ask what is to be asked after `waited_s` seconds."""
        if self._first is None and waited_s >= min(_PATIENCE_S, self._timeout_s / 4):
            self._first_at = time.monotonic()
            self._first = self._channel.future(messages.SERVER_INFO, b"", self._timeout_s)
        elif self._last is None and waited_s >= max(self._timeout_s / 2, self._timeout_s - _LAST_QUESTION_S):
            self._last_at = time.monotonic()
            self._last = self._channel.future(messages.SERVER_INFO, b"", self._timeout_s - waited_s)

    def why_inserts_wait(self, tables: set[str], silence_s: float, down: str | None) -> str:
        """Say why inserts are not confirmed, as far as it shows.

        Args:
            tables: that they go to.
            silence_s: since the server was heard of.
            down: what ended the connection, if there is none.
        """
        address = self._channel.address
        if down is not None:
            return f"The server at {address} is gone, last heard of {silence_s:.1f} s ago ({down}). Start it again."
        if self._first is None:
            return f"Its in-flight window is full; last heard of the server at {address} {silence_s:.1f} s ago."
        before, now = _answer(self._first, self._first_at), _answer(self._last, self._last_at)
        now = now or before
        if now is None:
            return f"The server at {address} holds the connection but does not answer; silent for {silence_s:.1f} s."
        return why_inserts_wait(before or now, now, tables) or (
            f"The server at {address} is slow: last confirmation {silence_s:.1f} s ago. Raise `timeout_s`."
        )


class Heartbeat:
    """A question to a server that should have said something by now. Not thread-safe.

    Attributes:
        stopped_in: the last connection in which a question was not answered; None before.
    """

    def __init__(self, channel: Channel) -> None:
        """Ask nothing yet."""
        self.stopped_in: int | None = None
        self._channel = channel
        self._question: Any = None
        self._connection = 0

    def listen(self, heard_at: float, connection: int) -> float:
        """Ask if it has been silent for too long; return when it was heard last, as far as the answer tells.

        Args:
            heard_at: `time.monotonic()` of the last sign of life; infinity if none is expected.
            connection: the number of the connection that is meant.
        """
        if self._question is None:
            if time.monotonic() - heard_at > _SILENCE_S:
                self._question = self._channel.future(messages.SERVER_INFO, b"", _ANSWER_WITHIN_S)
                self._connection = connection
        elif self._question.done():
            answered, self._question = self._question.exception() is None, None
            if answered:
                return time.monotonic()
            self.stopped_in = self._connection
        return -math.inf


def _answer(question: Any, at: float) -> ServerInfo | None:
    if question is None or not question.done() or question.exception() is not None:
        return None
    return parse_server_info(question.result(), at)
