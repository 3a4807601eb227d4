"""Batches of one server or of several, each in its turn; a server that is late is skipped until it has a batch."""

from __future__ import annotations

import time
from collections.abc import Callable

from reverb_writer.background import Flag
from reverb_writer.client.same_process import send_due
from reverb_writer.errors import ReplayTimeoutError, ReverbWriterError, ServerUnavailableError
from reverb_writer.reading.fetchers import Fetchers
from reverb_writer.reading.server_link import ServerLink
from reverb_writer.reading.thread_fetcher import Fetched, ThreadFetcher
from reverb_writer.reading.waiting import Wait

_PATIENCE_S = 0.1


class RoundRobin:
    """Returns the next batch of the server whose turn it is. For one thread at a time."""

    def __init__(self, table: str, batch_size: int, make: Callable[[Callable[[], None]], Fetchers]) -> None:
        """Make the fetchers; the owner starts them.

        `make` gets the function that each fetcher calls when a batch is ready.
        """
        self._table, self._batch_size = table, batch_size
        self._turn = 0
        self._late: set[ThreadFetcher] = set()
        self._ready = Flag()
        self._all = make(self._ready.set)
        self.fetchers = self._all.all  # one for each server, or one for all
        self.latest = self.fetchers[0]  # the fetcher that the last batch came from

    def next(self, start: float, timeout_s: float) -> Fetched | None:
        """Return the next batch; None if no more will come. The wait of `timeout_s` seconds began at `start`.

        Raises:
            ReplayTimeoutError: none came in time; names the cause with its numbers. Nothing is lost by it.
            ServerUnavailableError: none came in time, and no server can be reached.
            ReverbWriterError: instead of a sample that could not be decoded.
        """
        deadline = start + timeout_s
        # Wait a little for the server whose turn it is, or the fastest would give most batches; once, until it is back.
        patience = time.monotonic() + _PATIENCE_S
        wait = Wait(self._table, self._links, start, timeout_s)
        self._all.follow_target()
        while True:
            self._ready.clear()
            awaited = self.fetchers[self._turn]
            in_turn = not (awaited in self._late or awaited.is_lost) and time.monotonic() < patience
            fetched = self._take(1 if in_turn else len(self.fetchers))
            if fetched is not None:
                return fetched
            if self.have_ended:
                return self._take(len(self.fetchers))
            send_due()
            now = time.monotonic()
            if self._ready.wait(max(min(deadline, wait.look_at, patience if in_turn else deadline) - now, 0)):
                continue
            now = time.monotonic()
            if now >= deadline:
                raise self._too_late(wait, timeout_s)
            if now >= wait.look_at:
                wait.look()
            if in_turn and now >= patience and len(self.fetchers) > 1:
                self._late.add(awaited)

    @property
    def have_ended(self) -> bool:
        """Whether no fetcher will get more samples; batches may still be ready."""
        return all(fetcher.has_ended for fetcher in self.fetchers)

    def rest(self) -> Fetched | None:
        """Return a batch of the samples that have arrived, full or not; None if there are none."""
        return self._take(len(self.fetchers), partial=True)

    def rest_of(self, fetcher: ThreadFetcher) -> Fetched | None:
        """Return a batch of the samples that have arrived from one server, full or not; None if there are none."""
        fetched = fetcher.take(partial=True)
        if fetched is not None:
            self.latest = fetcher
        return fetched

    def _take(self, num_servers: int, *, partial: bool = False) -> Fetched | None:
        """Take a batch from the server whose turn it is, or from the first that has one of the next `num_servers`."""
        for ahead in range(num_servers):
            number = (self._turn + ahead) % len(self.fetchers)
            fetcher = self.fetchers[number]
            fetched = fetcher.take(partial=partial)
            if fetched is not None:
                self.latest = fetcher
                self._turn = (number + 1) % len(self.fetchers)
                self._late.discard(fetcher)
                return fetched
        return None

    def _too_late(self, wait: Wait, timeout_s: float) -> ReverbWriterError:
        stats = [fetcher.stats() for fetcher in self.fetchers]
        num_arrived, num_foreign = sum(one.ready_samples for one in stats), sum(one.foreign_items for one in stats)
        foreign = f"{num_foreign} of another structure were left out. " if num_foreign else ""
        gone = all(link.disconnected_at is not None and not link.is_silent for link in self._links())
        return (ServerUnavailableError if gone else ReplayTimeoutError)(
            f"table `{self._table}`: no batch within {timeout_s:.1f} s, {num_arrived} of {self._batch_size} samples "
            f"have come. {foreign}{wait.why()}"
        )

    def _links(self) -> list[ServerLink]:
        """Return the connections from which samples may come."""
        return [link for fetcher in self.fetchers if not fetcher.has_ended for link in fetcher.links]
