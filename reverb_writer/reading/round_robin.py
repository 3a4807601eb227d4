"""Batches of one server or of several, each in its turn; whoever is late is skipped until it is back."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from reverb_writer.client.due_windows import send_due
from reverb_writer.errors import ReplayTimeoutError, ReverbWriterError, ServerUnavailableError
from reverb_writer.flags import Flag
from reverb_writer.reading.thread_fetcher import Fetched, ThreadFetcher
from reverb_writer.reading.waiting import Wait

__all__ = ["RoundRobin"]

_PATIENCE_S = 0.1


class RoundRobin:
    """The next batch of whichever server has its turn. For one thread at a time.

    Attributes:
        sources: what fetches, one for each server.
        latest: number of the server that the batch before came from.
    """

    def __init__(
        self, table: str, batch_size: int, start: Callable[[Callable[[], None]], Sequence[ThreadFetcher]]
    ) -> None:
        """Start to fetch.

        Args:
            table: its name, for messages.
            batch_size: likewise.
            start: called with what each source must call when something is ready; returns the sources.
        """
        self.latest = 0
        self._table, self._batch_size = table, batch_size
        self._turn = 0
        self._late: set[int] = set()
        self._ready = Flag()
        self.sources = start(self._ready.set)

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
        wait = Wait(self._table, self.sources, start, timeout_s)
        while True:
            self._ready.clear()
            in_turn = self._turn not in self._late and time.monotonic() < patience
            fetched = self._take(1 if in_turn else len(self.sources))
            if fetched is not None:
                return fetched
            if self.have_ended:
                return self._take(len(self.sources))
            send_due()
            now = time.monotonic()
            if self._ready.wait(max(min(deadline, wait.look_at, patience if in_turn else deadline) - now, 0)):
                continue
            now = time.monotonic()
            if now >= deadline:
                raise self._too_late(wait, timeout_s)
            if now >= wait.look_at:
                wait.look()
            if in_turn and now >= patience and len(self.sources) > 1:
                self._late.add(self._turn)

    @property
    def have_ended(self) -> bool:
        """Whether nothing will come any more from any server; something may still be ready."""
        return all(source.has_ended for source in self.sources)

    def rest(self) -> Fetched | None:
        """Return what has come, also of a batch that is not full; None if there is nothing."""
        return self._take(len(self.sources), partial=True)

    def rest_of(self, number: int) -> Fetched | None:
        """Return the next batch that has come from one server, or what there is of one; None if there is nothing."""
        fetched = self.sources[number].take(partial=True)
        if fetched is not None:
            self.latest = number
        return fetched

    def _take(self, num_servers: int, *, partial: bool = False) -> Fetched | None:
        """Take a batch from the server whose turn it is, or from the first that has one of the next `num_servers`."""
        for ahead in range(num_servers):
            number = (self._turn + ahead) % len(self.sources)
            fetched = self.sources[number].take(partial=partial)
            if fetched is not None:
                self.latest = number
                self._turn = (number + 1) % len(self.sources)
                self._late.discard(number)
                return fetched
        return None

    def _too_late(self, wait: Wait, timeout_s: float) -> ReverbWriterError:
        held = sum(source.stats().ready_samples for source in self.sources)
        going = [source for source in self.sources if not source.has_ended]
        gone = all(source.gone_since is not None and not source.is_silent for source in going)
        return (ServerUnavailableError if gone else ReplayTimeoutError)(
            f"table `{self._table}`: no batch within {timeout_s:.1f} s, {held} of {self._batch_size} samples have "
            f"come. {wait.why()}"
        )
