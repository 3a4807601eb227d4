"""Batches of one server or of several, each in its turn; whoever is late is skipped until it is back."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

from reverb_writer.due import send_due
from reverb_writer.errors import ReplayTimeoutError, ReverbWriterError, ServerUnavailableError
from reverb_writer.reading.prefetch import Fetched
from reverb_writer.reading.stats import PrefetchStats

__all__ = ["Source", "Turns"]

_PATIENCE_S = 0.1


class Source(Protocol):
    """What fetches ahead; see `Prefetch`."""

    gone_since: float | None

    def take(self, *, partial: bool = False) -> Fetched | None:
        """Return the next batch if it is ready."""

    @property
    def is_forked(self) -> bool:
        """Whether this is a forked child of the process that it works for."""

    def check_usable(self) -> None:
        """Raise ClosedError if so."""

    @property
    def has_ended(self) -> bool:
        """Whether nothing will come any more."""

    def why_waiting(self) -> str:
        """Say what keeps samples from coming."""

    def stats(self) -> PrefetchStats:
        """Return the counters so far."""

    def close(self, drain_s: float = 0.0) -> None:
        """Stop fetching."""


class Turns:
    """The next batch of whichever server has its turn. For one thread at a time.

    Attributes:
        sources: what fetches, of all servers.
        latest: number of the server that the batch before came from.
    """

    def __init__(
        self,
        table: str,
        batch_size: int,
        start: Callable[[Callable[[], None]], Iterable[Iterable[Source]]],
    ) -> None:
        """Start to fetch.

        Args:
            table: its name, for messages.
            batch_size: likewise.
            start: called with what each source must call when something is ready; returns those of each server.
        """
        self.latest = 0
        self._table, self._batch_size = table, batch_size
        self._turn = 0
        self._late: set[int] = set()
        self._ready = threading.Event()
        self._servers = [deque(sources) for sources in start(self._ready.set)]
        self.sources = [source for sources in self._servers for source in sources]

    def next(self, start: float, timeout_s: float) -> Fetched | None:
        """Return the next batch; None if none will come any more.

        Args:
            start: since when it is waited for, `time.monotonic()`.
            timeout_s: how long, seconds.

        Raises:
            ReplayTimeoutError: none came in time; names the cause with its numbers. Nothing is lost by it.
            ServerUnavailableError: likewise, and all servers are gone.
            ReverbWriterError: instead of a sample that could not be decoded.
        """
        deadline = start + timeout_s
        # A server that is a little late is waited for, or the fastest would be heard most; once, until it is back.
        patience = time.monotonic() + _PATIENCE_S
        while True:
            self._ready.clear()
            in_turn = self._turn not in self._late and time.monotonic() < patience
            fetched = self._take(1 if in_turn else len(self._servers))
            if fetched is not None:
                return fetched
            if all(source.has_ended for source in self.sources):
                return self._take(len(self._servers))
            send_due()
            now = time.monotonic()
            if self._ready.wait(max(min(deadline, patience if in_turn else deadline) - now, 0)):
                continue
            if in_turn and now < deadline and len(self._servers) > 1:
                self._late.add(self._turn)
            elif time.monotonic() >= deadline:
                raise self._too_late(timeout_s)

    def rest(self) -> Fetched | None:
        """Return what has come, also of a batch that is not full; None if there is nothing."""
        return self._take(len(self._servers), partial=True)

    def _take(self, num_servers: int, *, partial: bool = False) -> Fetched | None:
        """Take a batch from the server whose turn it is, or from the first that has one of the next `num_servers`."""
        for ahead in range(num_servers):
            number = (self._turn + ahead) % len(self._servers)
            for source in list(self._servers[number]):
                self._servers[number].rotate(-1)
                fetched = source.take(partial=partial)
                if fetched is not None:
                    self.latest = number
                    self._turn = (number + 1) % len(self._servers)
                    self._late.discard(number)
                    return fetched
        return None

    def _too_late(self, timeout_s: float) -> ReverbWriterError:
        going = [[source for source in sources if not source.has_ended] for sources in self._servers]
        causes = " ".join(sources[0].why_waiting() for sources in going if sources)
        held = sum(source.stats().ready_samples for source in self.sources)
        gone = all(source.gone_since is not None for sources in going for source in sources)
        return (ServerUnavailableError if gone else ReplayTimeoutError)(
            f"table `{self._table}`: no batch within {timeout_s:.1f} s, {held} of {self._batch_size} samples have "
            f"come. {causes}"
        )
