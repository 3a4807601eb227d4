"""Questions to a server while its confirmations are missing: does a rate limiter block, do others progress?

ask() -> the server -> the loop's thread -> post() -> the owner's thread keeps the answer
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable

from reverb_writer.errors import ClosedError, ReplayTimeoutError, ReverbWriterError
from reverb_writer.tables.rate_limits import explain_inserts, explain_limiter, inserts_progress
from reverb_writer.tables.table_info import ServerInfo
from reverb_writer.transport.channel import Channel

_TIMEOUT_S = 2.0


class Questions:
    """The answers of a server about its tables. Its owner calls it from one thread.

    Attributes:
        channel: the connection to the server.
    """

    def __init__(self, channel: Channel, post: Callable[[Callable[[], None]], None], tables: frozenset[str]) -> None:
        """Ask nothing yet; `tables` are those of the unconfirmed items, and `Delivery` documents `post`."""
        self.channel, self._post, self._tables = channel, post, {*tables}
        self._answers: list[ServerInfo] = []  # the first and the newest
        self._refusal = ""

    def ask(self) -> None:
        """Ask the server for the state of its tables."""
        try:
            self.channel.start_info(_TIMEOUT_S, lambda answer: self._post(functools.partial(self._take, answer)))
        except ClosedError as error:
            self._take(error)

    def has_tables(self) -> bool:
        """Return whether the newest answer names all tables."""
        return bool(self._answers) and self._answers[-1].tables.keys() >= self._tables

    def limiter_text(self) -> str | None:
        """Return the rate limiter that blocks in the newest answer, with advice; None if no limiter blocks."""
        return explain_limiter(self._answers[-1], self._tables) if self._answers else None

    def limited_at(self) -> float:
        """Return `time.monotonic()` of the newest answer if a rate limiter blocks in it; else negative infinity."""
        return self._answers[-1].at if self.limiter_text() else -math.inf

    def others_progress(self) -> bool:
        """Return whether other streams' inserts progressed between two answers while a rate limiter blocks ours."""
        answers = self._answers
        return len(answers) > 1 and inserts_progress(answers[0], answers[1], self._tables)

    def explain(self, progress_at: float) -> str:
        """Return why confirmations are missing although there is a connection; `progress_at` is as in a `Status`."""
        address, now = self.channel.address, time.monotonic()
        if not self._answers and self._refusal:
            return f"The server at {address} does not say what its tables do: {self._refusal}"
        if not self._answers:
            silence_s = now - self.channel.last_response_at
            return f"The server at {address} holds the connection but does not answer; silent for {silence_s:.1f} s."
        return explain_inserts(self._answers[0], self._answers[-1], self._tables) or (
            f"The server at {address} is slow: last confirmation {now - progress_at:.1f} s ago. Raise `timeout_s`."
        )

    def _take(self, answer: ServerInfo | ReverbWriterError) -> None:
        if isinstance(answer, ServerInfo):
            self._answers = [*self._answers[:1], answer]
        elif not isinstance(answer, ReplayTimeoutError | ConnectionError):
            self._refusal = str(answer)
