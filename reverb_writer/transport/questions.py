"""Questions to a server while a call waits for its confirmations: does a rate limiter block, do others progress?

ask() -> the server -> the loop's thread -> post() -> the owner's thread keeps the answer
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterable

from reverb_writer.errors import ClosedError, ReplayTimeoutError, ReverbWriterError
from reverb_writer.tables.rate_limits import explain_inserts, explain_limiter, inserts_progress
from reverb_writer.tables.table_info import ServerInfo
from reverb_writer.transport.channel import Channel
from reverb_writer.transport.in_flight import InFlight

_TIMEOUT_S = 2.0


class Questions:
    """The answers of a server about its tables while calls wait. Its owner calls it from one thread, as `Delivery`."""

    def __init__(self, channel: Channel, post: Callable[[Callable[[], None]], None], flight: InFlight) -> None:
        """Ask nothing yet; `flight` has the items that are not confirmed, and `Delivery` documents `post`."""
        self._channel, self._post, self._flight = channel, post, flight
        self._forget()

    def ask(self, *, is_first: bool = False) -> None:
        """Ask the server for the state of its tables; the first question of a wait discards earlier answers."""
        if is_first:
            self._forget()
        self._has_asked = True
        try:
            self._channel.start_info(_TIMEOUT_S, lambda answer: self._post(functools.partial(self._take, answer)))
        except ClosedError as error:
            self._take(error)

    def has_tables(self, tables: Iterable[str]) -> bool:
        """Return whether the newest answer names these tables."""
        return bool(self._answers) and self._answers[-1].tables.keys() >= set(tables)

    def limiter_text(self) -> str | None:
        """Return the rate limiter that blocks in the newest answer, with advice; None if no limiter blocks."""
        return explain_limiter(self._answers[-1], self._flight.tables()) if self._answers else None

    def limited_at(self) -> float:
        """Return `time.monotonic()` of the newest answer if a rate limiter blocks in it; else negative infinity."""
        return self._answers[-1].at if self.limiter_text() else -math.inf

    def others_progress(self) -> bool:
        """Return whether other streams' inserts progressed between two answers while a rate limiter blocks ours."""
        answers = self._answers
        return len(answers) > 1 and inserts_progress(answers[0], answers[1], self._flight.tables())

    def explain(self) -> str:
        """Return why confirmations are missing although there is a connection, as far as it is known."""
        address, silence_s = self._channel.address, time.monotonic() - self._channel.last_response_at
        if not self._has_asked:
            return f"Its in-flight window is full; last heard of the server at {address} {silence_s:.1f} s ago."
        if not self._answers and self._refusal:
            return f"The server at {address} does not say what its tables do: {self._refusal}"
        if not self._answers:
            return f"The server at {address} holds the connection but does not answer; silent for {silence_s:.1f} s."
        return explain_inserts(self._answers[0], self._answers[-1], self._flight.tables()) or (
            f"The server at {address} is slow: last confirmation {time.monotonic() - self._flight.progress_at:.1f} s "
            "ago. Raise `timeout_s`."
        )

    def _forget(self) -> None:
        self._answers: list[ServerInfo] = []  # the first and the newest
        self._has_asked, self._refusal = False, ""

    def _take(self, answer: ServerInfo | ReverbWriterError) -> None:
        if isinstance(answer, ServerInfo):
            self._answers = [*self._answers[:1], answer]
        elif not isinstance(answer, ReplayTimeoutError | ConnectionError):
            self._refusal = str(answer)
