"""Samples of one table on their way from the server to the thread that fetches.

    SampleStream -> ServerFeed.proceed, which keeps what has arrived -> take() -> Prefetcher

The thread reads any `Feed`: the feed of one server, or of several servers that are read as one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Protocol

from reverb_writer.background import Flag
from reverb_writer.client.server_calls import Server
from reverb_writer.errors import ClosedError, FormatError, ReverbWriterError
from reverb_writer.protocol.responses import NO_SAMPLES, Samples
from reverb_writer.reading.first_item import FirstItem
from reverb_writer.reading.read_options import ReadOptions
from reverb_writer.reading.stats import DatasetStats
from reverb_writer.tables.rate_limits import inserts_until_sample
from reverb_writer.tables.table_info import ServerInfo, TableInfo
from reverb_writer.transport.sample_stream import SampleStream


class Feed(Protocol):
    """Samples of one table. One thread fetches; any thread may read the counters and ask why a wait is long.

    Attributes:
        changed: set when `proceed` has something to do.
        removes_items: whether sampling removes items from the table.
        tables: the table as its servers described it when the feed was opened; at least one.
    """

    changed: Flag
    removes_items: bool
    tables: Sequence[TableInfo]

    # -------------------------------------------------------------------------------------- for any thread

    @property
    def heard_at(self) -> float:
        """The time of the last arrival of samples, of `time.monotonic()`."""

    @property
    def num_in_flight(self) -> int:
        """Samples that were requested and have not arrived."""

    @property
    def num_waiting(self) -> int:
        """Samples that have arrived and were not taken."""

    @property
    def num_for_batch(self) -> int:
        """Samples that have arrived for the next batches."""

    @property
    def is_done(self) -> bool:
        """Whether nothing is in flight, and nothing more will be requested."""

    @property
    def is_gone(self) -> bool:
        """Whether no server can be reached."""

    def inserts_missing(self) -> dict[str, int]:
        """Return by server how many inserts its next sample lacks."""

    def ask_why(self, now: float, since: float) -> None:
        """Have the cause of a wait asked for, which began at `since`."""

    def explain(self, since: float) -> str:
        """Return why no samples have arrived since a time."""

    def count(self, stats: DatasetStats) -> None:
        """Add the counters of what has happened so far, and set the present values, `left_out_servers` among them."""

    # -------------------------------------------------------------------------- for the thread that fetches

    def proceed(self, now: float, num_held: int) -> tuple[float, list[ReverbWriterError]]:
        """Read new messages, and request as many samples as have room beside the `num_held` samples that were taken.

        Never waits. Return when to call this again if `changed` is not set earlier, and the errors of unreadable
        messages.
        """

    def take(self, num_samples: int, *, rest: bool) -> Samples:
        """Return at most `num_samples` samples of the present batch; with `rest`, also samples that fill no batch."""

    @property
    def is_starved(self) -> bool:
        """Whether the present batch gets no more samples."""

    def end_batch(self) -> str:
        """End the present batch; return the address of its server, "" if its samples may come from several."""

    def stop_requests(self) -> None:
        """Request no more samples; those in flight can still be read."""

    def close(self) -> None:
        """End all streams; samples that have arrived can still be taken."""


class ServerFeed:
    """Samples of a table on one server; the methods are those of `Feed`.

    Attributes:
        stream: of the samples.
        waiting: samples that have arrived and were not taken, oldest first.
        max_samples: limit of the samples in flight, waiting, and held by the caller.
        num_received: samples that have arrived.
    """

    def __init__(
        self,
        server: Server,
        info: ServerInfo | None,
        table: TableInfo,
        max_samples: int,
        options: ReadOptions,
        *,
        changed: Flag | None = None,
        may_lack_table: bool = False,
    ) -> None:
        """Prepare to read; the first `proceed` begins.

        `info` has the server's answer, None if it has not answered yet. Feeds that one thread fetches share `changed`.
        `may_lack_table` is as in `SampleStream`.
        """
        self.tables: Sequence[TableInfo] = [table]
        self.removes_items = table.max_times_sampled > 0
        self.changed = Flag() if changed is None else changed
        self.max_samples, self.num_received = max_samples, 0
        self.waiting, self.heard_at = NO_SAMPLES, time.monotonic()
        self._server, self._first_item = server, FirstItem(table, server.address)
        max_total = None
        if options.single_pass:
            max_total = 0 if info is None else info.tables[table.name].current_size
        self.stream = SampleStream(
            server.channel,
            table.name,
            info,
            changed=self.changed.set,
            removes_items=self.removes_items,
            max_total=max_total,
            single_pass=options.single_pass,
            may_lack_table=may_lack_table,
        )

    @property
    def num_in_flight(self) -> int:
        """Samples that were requested and have not arrived."""
        return self.stream.num_in_flight

    @property
    def num_waiting(self) -> int:
        """Samples that have arrived and were not taken."""
        return len(self.waiting)

    @property
    def num_for_batch(self) -> int:
        """Samples that have arrived for the next batches."""
        return len(self.waiting)

    @property
    def is_done(self) -> bool:
        """Whether nothing is in flight, and nothing more will be requested."""
        return self.stream.is_done

    @property
    def is_gone(self) -> bool:
        """Whether the server cannot be reached."""
        loss = self.stream.loss
        return loss is not None and not self._server.channel.is_silent(loss)

    def inserts_missing(self) -> dict[str, int]:
        """Return how many inserts the next sample lacks."""
        table = self.stream.table
        return {} if table is None else {self._server.address: inserts_until_sample(table)}

    def ask_why(self, now: float, since: float) -> None:
        """Have the server asked for the cause of a wait."""
        self.stream.ask_why(now, since)

    def explain(self, since: float) -> str:
        """Return why no samples have arrived since a time."""
        return "" if self.stream.is_done else self.stream.explain(since)

    def count(self, stats: DatasetStats) -> None:
        """Add the counters of what has happened so far, and set the present values."""
        stream = self.stream
        stats.left_out_servers = int(stream.loss is not None or stream.is_closed)
        stats.received_samples += self.num_received
        stats.lost_samples += stream.num_lost
        stats.unasked_samples += stream.num_unasked
        stats.received_bytes += stream.num_bytes
        stats.reconnects += stream.reconnects
        stats.server_restarts += stream.server_restarts

    def proceed(self, now: float, num_held: int) -> tuple[float, list[ReverbWriterError]]:
        """Read new messages and request samples; see `Feed.proceed`."""
        errors: list[ReverbWriterError] = []
        try:
            next_at = self._proceed(now, num_held, errors)
            if self.stream.has_unread:  # a server in this process answers at once
                next_at = self._proceed(now, num_held, errors)
        except ClosedError:
            self.stream.close()
            next_at = math.inf
        return next_at, errors

    def _proceed(self, now: float, num_held: int, errors: list[ReverbWriterError]) -> float:
        while self.stream.has_unread:
            try:
                samples = self.stream.read()
            except FormatError as error:
                errors.append(error)
                continue
            if samples:
                self.heard_at = now
                self.num_received += len(samples)
                self._first_item.see(samples)
                self.waiting = Samples.joined([self.waiting, samples])
        return self.stream.proceed(now, len(self.waiting) + num_held, self.max_samples)

    def take(self, num_samples: int, *, rest: bool = True) -> Samples:  # noqa: ARG002  # all batches are its own
        """Remove and return at most `num_samples` of the oldest waiting samples."""
        waiting, self.waiting = self.waiting, NO_SAMPLES
        if num_samples < len(waiting):  # usually a message has the samples of one batch
            waiting, self.waiting = waiting[:num_samples], waiting[num_samples:]
        return waiting

    @property
    def is_starved(self) -> bool:
        """Whether no more samples will arrive."""
        return self.stream.is_done and not self.waiting

    def end_batch(self) -> str:
        """Return the server's address."""
        return self._server.address

    def stop_requests(self) -> None:
        """Request no more samples; those in flight can still be read."""
        self.stream.stop_requests()

    def close(self) -> None:
        """End the stream; samples that have arrived can still be taken."""
        self.stream.close()
