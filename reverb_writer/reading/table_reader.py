r"""Samples of one table, of one server or of several, and new priorities for its items.

servers -> GlobalSampler -> ThreadFetcher \
                server a -> ThreadFetcher  > RoundRobin -> SubsequenceCutter (with `num_steps`) -> Samples
                server b -> ThreadFetcher /
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

from reverb_writer.client.client import Client
from reverb_writer.decoding.batch_assembler import BatchAssembler
from reverb_writer.decoding.table_structure import TableStructure
from reverb_writer.errors import ReplayTimeoutError, ServerUnavailableError
from reverb_writer.reading.fetchers import Fetchers, check_end, request_infos
from reverb_writer.reading.priority_updates import PriorityUpdates
from reverb_writer.reading.read_options import ReadOptions
from reverb_writer.reading.round_robin import RoundRobin
from reverb_writer.reading.stats import DatasetStats
from reverb_writer.reading.subsequences import SubsequenceCutter
from reverb_writer.reading.thread_fetcher import Fetched, Part, ThreadFetcher

Pack = Callable[[Sequence[Any]], Any]
"""Makes a table's nest of a list of leaves."""

Finish = Callable[[BatchAssembler, Pack, str], Sequence[Part]]
"""As that of a `ThreadFetcher`; also gets the table's `Pack`, and the address of the server."""


class TableReader:
    """Samples of one table. Read by one thread at a time; the rest is thread-safe.

    Attributes:
        table: its name.
        fetchers: one for each server, or one for all.
        structure: of the table's items; known once `next` has returned samples.
        updates: new priorities on their way to the servers.
        is_exhausted: whether an iteration has ended because no more samples will come: after a single pass or when the
            dataset was closed, not after a time-out.
    """

    def __init__(
        self,
        client: Client,
        table: str,
        batch_size: int,
        options: ReadOptions,
        timeout_s: float,
        *,
        num_steps: int | None = None,
        finish: Finish | None = None,
    ) -> None:
        """Find the table and prepare to fetch; `start` begins.

        `next` returns `batch_size` samples together, or subsequences of samples with `num_steps`. `finish` is what the
        threads that fetch make of the samples of a batch; without it, samples are returned.
        """
        infos = request_infos(client, table, timeout_s, needs_all=options.has_end)
        check_end(table, options, infos.values())
        self.table = table
        self.is_exhausted = False
        self._batch_size, self._options = batch_size, options
        self._has_ended = False
        self._cutter = None if num_steps is None else SubsequenceCutter(num_steps)
        self._stopping: list[ThreadFetcher] | None = None  # whose last batch is due, after a time-out
        self._stats = DatasetStats()
        first = next(iter(infos.values())).tables[table]
        self.structure = TableStructure(table, first.signature)
        how: dict[str, Any] = {"structure": self.structure}
        if finish is not None:
            how["finish"] = functools.partial(_finished, finish, self.structure.pack)
        self.updates = PriorityUpdates(client, first, self._lost_servers)
        remember = self.updates.remember_owner

        def make(wake: Callable[[], None]) -> Fetchers:
            return Fetchers(client, infos, table, batch_size, options, wake=wake, remember=remember, **how)

        self._round_robin = RoundRobin(table, batch_size, make)
        self.fetchers = self._round_robin.fetchers

    def start(self) -> None:
        """Start to fetch, and to send priorities."""
        self.updates.start()
        for fetcher in self.fetchers:
            fetcher.start()

    @property
    def server(self) -> str:
        """Address of the server that the last samples came from; "" of several."""
        return self._round_robin.latest.address

    def _lost_servers(self) -> set[str]:
        return set().union(*(fetcher.lost_servers for fetcher in self.fetchers))

    def restart(self) -> None:
        """Continue where an iteration ended, also after a time-out."""
        self._stopping = None

    def next(self, start: float, timeout_s: float) -> Fetched | None:
        """Return the next samples, as many as a batch has; fewer at the end, then None.

        One time-out, which began at `start` of `time.monotonic()`, may cover several readers.

        Raises:
            ReplayTimeoutError, ServerUnavailableError, UnsafeDataError, FormatError, ClosedError: as `ReplayDataset`.
        """
        called_at = time.monotonic()
        for fetcher in self.fetchers:
            fetcher.check_usable()
        if self._cutter is None:
            samples = self._next_samples(start, timeout_s)
        else:
            samples = self._next_subsequences(self._cutter, start, timeout_s)
        if samples is None:
            self.is_exhausted = self._stopping is None
            return None
        return self._counted(samples, called_at)

    def take(self, start: float, timeout_s: float) -> Fetched | None:
        """Return a batch if one is ready within a time-out, also of 0; then the samples that have arrived, or None."""
        called_at = time.monotonic()
        for fetcher in self.fetchers:
            fetcher.check_usable()
        samples = self._arrived(start, timeout_s)
        if self._cutter is not None:
            while samples is not None:
                self._cutter.add(*samples)
                is_over = self._cutter.num_pieces >= self._batch_size or time.monotonic() > start + timeout_s
                samples = None if is_over else self._arrived(start, timeout_s)
            samples = self._cutter.take(self._batch_size) if self._cutter.num_pieces else None
        return None if samples is None else self._counted(samples, called_at)

    def _arrived(self, start: float, timeout_s: float) -> Fetched | None:
        """Return samples as `take`, not cut."""
        samples = None
        with contextlib.suppress(ReplayTimeoutError, ServerUnavailableError):
            if timeout_s > 0:
                samples = self._round_robin.next(start, timeout_s)
        with contextlib.suppress(ReplayTimeoutError, ServerUnavailableError):
            return self._owned(samples or self._round_robin.rest())
        return None

    def _counted(self, samples: Fetched, called_at: float) -> Fetched:
        now = time.monotonic()
        self._stats.batches += 1
        self._stats.samples += len(samples[1])
        self._stats.wait_s += now - called_at
        self._stats.last_age_s = now - samples[1].received_at
        return samples

    def stats(self) -> DatasetStats:
        """Return the counters so far."""
        stats = DatasetStats(**vars(self._stats))
        for fetcher in self.fetchers:
            stats.add(fetcher.stats())
        stats.priority_updates, stats.failed_priority_updates = self.updates.num_sent, self.updates.num_failed
        stats.gone_priority_updates = self.updates.num_gone
        if self._has_ended:
            stats.undelivered_samples = stats.ready_samples
            stats.undelivered_samples += self._cutter.num_samples if self._cutter else 0
        return stats

    def finish(self, deadline: float) -> None:
        """Set the priorities that are on their way, until `deadline`; fetching has stopped.

        What has arrived can still be read.
        """
        self._has_ended = True
        self.updates.close(max(deadline - time.monotonic(), 0.0))

    def _next_samples(self, start: float, timeout_s: float) -> Fetched | None:
        """Return the next batch of samples, or the last one; None at the end."""
        return self._owned(self._take(start, timeout_s))

    def _owned(self, samples: Fetched | None) -> Fetched | None:
        """Return samples, whose server is remembered for their priorities."""
        if samples is not None and self._round_robin.latest.address:
            self.updates.remember_owner(samples[1].keys.tolist(), self._round_robin.latest.server)
        return samples

    def _take(self, start: float, timeout_s: float) -> Fetched | None:
        """Take the next batch, or the samples left at the end of the iteration; None when it is over."""
        if self._stopping is None:
            try:
                return self._round_robin.next(start, timeout_s) or self._round_robin.rest()
            except (ReplayTimeoutError, ServerUnavailableError):
                if self._options.on_timeout == "raise":
                    raise
            self._stopping = list(self.fetchers)
        while self._stopping:
            samples = self._round_robin.rest_of(self._stopping.pop())
            if samples is not None:
                return samples
        return None

    def _next_subsequences(self, cutter: SubsequenceCutter, start: float, timeout_s: float) -> Fetched | None:
        """Return the next batch of subsequences of samples, or the last one; None at the end."""
        while cutter.num_pieces < self._batch_size:
            samples = self._next_samples(start, timeout_s)
            if samples is None:
                if not cutter.num_pieces:
                    return None
                break
            cutter.add(*samples)
        return cutter.take(self._batch_size)


def _finished(finish: Finish, pack: Pack, address: str, assembler: BatchAssembler) -> Sequence[Part]:
    return finish(assembler, pack, address)
