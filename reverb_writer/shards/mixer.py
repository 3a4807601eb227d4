r"""Choose the server of the next samples: one mixer per table, with one of two rules.

    SampleStream a \
    SampleStream b  > Mixer: in turns, or ByMass -> take()
    SampleStream c /

The mixer follows the client's target: it starts to read new servers, and stops to read servers that have left. It never
waits. It belongs to the thread that fetches; other threads read its counters.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from reverb_writer.background import Flag
from reverb_writer.client.server_calls import Server
from reverb_writer.errors import ClosedError, FormatError, ReverbWriterError
from reverb_writer.protocol.responses import NO_SAMPLES, Samples
from reverb_writer.reading.first_item import FirstItem
from reverb_writer.reading.read_options import ReadOptions
from reverb_writer.reading.stats import DatasetStats
from reverb_writer.replay.client import Client
from reverb_writer.tables.rate_limits import inserts_until_sample
from reverb_writer.tables.table_info import ServerInfo, TableInfo
from reverb_writer.transport.sample_stream import SampleStream


class Source:
    """One server of a mixer, and its samples that wait for their turn."""

    def __init__(self, server: Server, stream: SampleStream, max_samples: int) -> None:
        """Start without samples."""
        self.server, self.stream = server, stream
        self.max_samples = max_samples  # limit of samples in flight or waiting, if other servers exist
        self.waiting = NO_SAMPLES  # samples that have arrived and were not taken, oldest first
        self.is_late = False  # whether it is left out until it has samples again
        self.num_dropped = 0  # samples that were dropped unread
        self.num_forgiven = 0  # samples that were drawn from it and are no longer required

    def take(self, num_samples: int) -> Samples:
        """Remove and return at most `num_samples` of the oldest waiting samples."""
        waiting, self.waiting = self.waiting, NO_SAMPLES
        if num_samples < len(waiting):  # usually a message has the samples of one batch
            waiting, self.waiting = waiting[:num_samples], waiting[num_samples:]
        return waiting

    @property
    def is_lost(self) -> bool:
        """Whether the connection to the server is lost, or the target calls the server lost."""
        stream = self.stream
        return stream.loss is not None or self.server.shard.state == "lost" or stream.is_closed

    def count(self, stats: DatasetStats) -> None:
        """Add the counters that stay when the server leaves."""
        stream = self.stream
        stats.lost_samples += stream.num_lost
        stats.unasked_samples += stream.num_unasked
        stats.received_bytes += stream.num_bytes
        stats.reconnects += stream.reconnects
        stats.server_restarts += stream.server_restarts
        stats.dropped_samples += self.num_dropped
        stats.forgiven_samples += self.num_forgiven


class Mixer:
    """The samples of one table on a client's servers: each batch comes from one server, and the servers take turns.

    A late server is left out until it has a batch again.

    Attributes:
        removes_items: whether sampling removes items from the table.
        samples_once: whether each item is sampled once.
        heard_at: `time.monotonic()` at the last arrival of samples.
        changed: set when `proceed` has something to do.
    """

    _makes_one_server = False  # whether several servers are sampled as one server with all items
    _PATIENCE_S = 0.1  # wait for the server whose turn it is, or the fastest server gives most batches

    def __init__(
        self,
        client: Client,
        infos: Mapping[str, ServerInfo],
        table: TableInfo,
        batch_size: int,
        options: ReadOptions,
        remember: Callable[[Sequence[int], Server], object],
    ) -> None:
        """Prepare to read a table; `infos` has the answers of servers, by name of the shard.

        `remember` gets the keys of samples, and their server.
        """
        self.removes_items, self.samples_once = table.max_times_sampled > 0, table.max_times_sampled == 1
        self.heard_at = time.monotonic()
        self._client, self._infos, self._table, self._options = client, infos, table, options
        self._batch_size, self._max_samples = batch_size, batch_size * options.max_in_flight_batches
        self.changed, self._remember = Flag(), remember
        self._may_have_several = client.connections.may_have_several
        self._shards: Sequence[Server] = ()
        self._sources: dict[str, Any] = {}  # `Source`s by name; replaced as a whole, because other threads read it
        self._leaving: list[Any] = []  # have left the target, and have samples that would otherwise be lost
        self._first_item = FirstItem(table)
        self._past = DatasetStats()  # of servers that have left, and of arrived samples
        self._is_ending = False
        self._turn = 0
        self._source_of_batch: Source | None = None
        self._waits_since: float | None = None

    # ------------------------------------------------------------------------------- counters, for any thread

    @property
    def sources(self) -> list[Any]:
        """The present servers, each a `Source`."""
        return [*self._sources.values()]

    @property
    def lost_servers(self) -> set[str]:
        """Names of the servers without a connection."""
        return {name for name, source in self._sources.items() if source.is_lost}

    @property
    def num_in_flight(self) -> int:
        """Samples that were requested and have not arrived."""
        return sum(source.stream.num_in_flight for source in self.sources)

    @property
    def num_waiting(self) -> int:
        """Samples that have arrived and were not taken."""
        return sum(len(source.waiting) for source in (*self._leaving, *self.sources))

    @property
    def num_for_batch(self) -> int:
        """Samples that have arrived for the next batches, of the server with the most."""
        return max((len(source.waiting) for source in self.sources), default=0)

    @property
    def is_done(self) -> bool:
        """Whether nothing is in flight, and nothing more will be requested."""
        return all(source.stream.is_done for source in self.sources)

    @property
    def is_gone(self) -> bool:
        """Whether no server can be reached."""
        losses = [(source.server.channel, source.stream.loss) for source in self.sources]
        return all(loss is not None and not channel.is_silent(loss) for channel, loss in losses)

    def inserts_missing(self) -> dict[str, int]:
        """Return by server how many inserts its next sample lacks."""
        tables = [(source.server.name, source.stream.table) for source in self.sources]
        return {name: inserts_until_sample(table) for name, table in tables if table is not None}

    def look(self, now: float, since: float) -> None:
        """Have the servers asked for the cause of a wait that began at `since`."""
        for source in self.sources:
            source.stream.look(now, since)

    def explain(self, since: float) -> str:
        """Return why no samples have arrived since a time, for each server that has not ended."""
        streams = [source.stream for source in self.sources]
        return " ".join(stream.explain(since) for stream in streams if not stream.is_done)

    def count(self, stats: DatasetStats) -> None:
        """Add the counters of the servers."""
        for name, number in vars(self._past).items():
            setattr(stats, name, getattr(stats, name) + number)
        for source in self.sources:
            source.count(stats)
            stats.in_flight_samples += source.stream.num_in_flight
            stats.left_out_servers += source.is_lost or source.is_late

    # ----------------------------------------------------------------------------- for the thread that fetches

    def proceed(self, now: float, num_held: int) -> tuple[float, list[ReverbWriterError]]:
        """Read new messages, and request as many samples as have room beside the `num_held` samples that were taken.

        Return when to call this again if `changed` is not set earlier, and the errors of unreadable messages.
        """
        self._follow_target(now)
        self._leaving = [source for source in self._leaving if source.waiting]
        next_at = math.inf
        errors: list[ReverbWriterError] = []
        for source in self.sources:
            try:
                at = self._proceed(source, now, num_held, errors)
                if source.stream.has_unread:  # a server in this process answers at once
                    at = self._proceed(source, now, num_held, errors)
                next_at = min(next_at, at)
            except ClosedError:
                source.stream.close()
        return min(next_at, self._look(now)), errors

    def _proceed(self, source: Source, now: float, num_held: int, errors: list[ReverbWriterError]) -> float:
        """Read and request samples of one server; return when to do so again."""
        while source.stream.has_unread:
            try:
                samples = source.stream.read()
            except FormatError as error:
                errors.append(error)
                continue
            if samples:
                self.heard_at = now
                self._first_item.see(samples)
                self._past.received_samples += len(samples)
                source.waiting = Samples.joined([source.waiting, samples])
                self._note_samples(source, samples, now)
        was_lost = source.stream.loss is not None
        num_of_server = len(source.waiting) + (num_held if len(self._sources) == 1 else 0)
        max_samples = self._max_samples if len(self._sources) == 1 else source.max_samples
        next_at = source.stream.proceed(now, num_of_server, max_samples)
        self._note_connection(source, was_lost=was_lost)
        return next_at

    def take(self, num_samples: int, now: float, *, any_server: bool = False) -> Samples:
        """Return at most `num_samples` samples of the batch that have arrived.

        With `any_server`, also return samples of a server that cannot fill the batch.
        """
        source = self._source_of_batch or self._next_source(now, any_server=any_server)
        if source is None:
            return NO_SAMPLES
        self._source_of_batch = source
        return self._taken(source, num_samples)

    @property
    def is_starved(self) -> bool:
        """Whether the present batch gets no more samples."""
        source = self._source_of_batch
        if source is None or source.waiting:
            return False
        return source.stream.is_done or (source.is_lost and len(self._sources) > 1)

    def end_batch(self) -> str:
        """End the present batch; return the address of its server, "" if its samples may come from several."""
        source, self._source_of_batch = self._source_of_batch, None
        return "" if source is None else source.server.address

    def stop_requests(self) -> None:
        """Request no more samples; those in flight can still be read."""
        self._is_ending = True
        for source in self.sources:
            source.stream.stop_requests()

    def close(self) -> None:
        """End all streams; samples that have arrived can still be taken."""
        self.stop_requests()
        for source in self.sources:
            source.stream.close()

    def _look(self, now: float) -> float:  # noqa: ARG002  # for rules
        """Check servers that do not answer; return when to check again."""
        return math.inf if self._waits_since is None else self._waits_since + self._PATIENCE_S

    def _note_samples(self, source: Any, samples: Samples, now: float) -> None:
        """Note the information about the server in its samples."""

    def _note_connection(self, source: Any, *, was_lost: bool) -> None:
        """Note a change of the connection; before, it `was_lost` or not."""
        if source.stream.loss is not None and not was_lost:
            self._client.connections.refresh_soon()

    def _taken(self, source: Source, num_samples: int) -> Samples:
        """Take samples of a server, and remember their keys for new priorities."""
        samples = source.take(num_samples)
        if samples and self._may_have_several:
            self._remember(samples.keys.tolist(), source.server)
        return samples

    def _follow_target(self, now: float) -> None:
        """Start to read servers that are new in the client's target, and stop to read servers that have left it."""
        shards = self._client.shards
        if shards is self._shards:
            return
        is_first, self._shards = not self._shards, shards
        names = {shard.name for shard in shards}
        for source in self.sources:
            if source.server.name not in names:
                self._leave(source)
        kept = {name: source for name, source in self._sources.items() if name in names}
        # A single pass returns the items that the table held at its start, and a closed dataset requests no new items.
        if is_first or not (self._is_ending or self._options.single_pass):
            for shard in shards:
                if shard.name not in kept:
                    kept[shard.name] = self._begin(shard, self._infos.get(shard.name) if is_first else None, now)
        self._sources = kept

    def _leave(self, source: Any) -> None:
        """Stop to read a server; keep its counters, and samples that no one else will get."""
        source.stream.close()
        if self.removes_items:
            self._leaving.append(source)
        else:
            source.num_dropped += len(source.waiting)
        source.count(self._past)

    def _begin(self, server: Server, info: ServerInfo | None, now: float) -> Any:
        """Start to read a server; `info` has its tables, if it has answered."""
        max_total = None
        if self._options.single_pass:
            max_total = 0 if info is None else info.tables[self._table.name].current_size
        stream = SampleStream(
            server.channel,
            self._table.name,
            info,
            changed=self.changed.set,
            removes_items=self.removes_items,
            max_total=max_total,
            single_pass=self._options.single_pass,
            needs_table=self._makes_one_server,
        )
        return self._source(server, stream, now)

    def _source(self, server: Server, stream: SampleStream, now: float) -> Any:  # noqa: ARG002  # for rules
        return Source(server, stream, self._max_samples)

    def _next_source(self, now: float, *, any_server: bool) -> Any:
        """Return the server of the next batch; None if no server has a batch, or a server is awaited."""
        sources: list[Source] = self.sources
        waits_since, self._waits_since = self._waits_since, None
        for source in (*self._leaving, *sources):
            if source.waiting and (len(sources) == 1 or source.stream.is_closed):
                return source
        for ahead in range(len(sources)):
            number = (self._turn + ahead) % len(sources)
            source = sources[number]
            is_enough = any_server or len(source.waiting) >= self._batch_size or source.stream.is_done
            if source.waiting and is_enough:
                if ahead and not any_server and self._is_awaited(sources[self._turn % len(sources)], waits_since, now):
                    return None
                self._turn = (number + 1) % len(sources)
                source.is_late = False
                return source
        return None

    def _is_awaited(self, source: Source, waits_since: float | None, now: float) -> bool:
        """Whether to keep waiting for the server whose turn it is; the wait began at `waits_since`."""
        if source.is_late or source.is_lost or source.stream.is_done:
            return False
        waits_since = now if waits_since is None else waits_since
        source.is_late = now - waits_since >= self._PATIENCE_S
        self._waits_since = None if source.is_late else waits_since
        return not source.is_late
