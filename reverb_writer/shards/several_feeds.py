r"""The feeds of several servers, read as one feed by a rule: in turn, or by mass.

    ServerFeed a \
    ServerFeed b  > SeveralFeeds, by an InTurn or a ByMass -> take()
    ServerFeed c /

It follows the client's target: it starts to read new servers, and stops to read servers that have left.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from reverb_writer.background import Flag
from reverb_writer.errors import ReverbWriterError
from reverb_writer.protocol.responses import Samples
from reverb_writer.reading.feed import ServerFeed
from reverb_writer.reading.stats import DatasetStats
from reverb_writer.shards.server_set import ServerSet, ShardServer
from reverb_writer.tables.table_info import ServerInfo, TableInfo

Remember = Callable[[Sequence[int], str], object]
"""Remembers the name of the shard from which the items with these keys come."""


class ShardFeed:
    """One of several servers: its shard, its feed, and whether it is left out.

    Attributes:
        max_samples: limit of its samples in flight or waiting while there are other servers.
        is_late: whether it is left out until it has samples again.
        num_dropped: samples that were dropped unread.
        num_forgiven: samples that were drawn from it and are no longer required.
    """

    def __init__(self, shard: ShardServer, feed: ServerFeed, remember: Remember) -> None:
        """Start without samples; `remember` gets the keys of samples that are taken."""
        self.shard, self.feed, self._remember = shard, feed, remember
        self.max_samples = self._max_alone = feed.max_samples
        self.is_late = False
        self.num_dropped = self.num_forgiven = 0

    @property
    def num_waiting(self) -> int:
        """Samples that have arrived and were not taken."""
        return len(self.feed.waiting)

    @property
    def has_no_connection(self) -> bool:
        """Whether the connection to the server is lost, or the target calls the server lost."""
        return self.feed.stream.loss is not None or self.shard.shard.state == "lost"

    @property
    def is_lost(self) -> bool:
        """Whether the server cannot give new samples."""
        return self.has_no_connection or self.feed.stream.is_closed

    def proceed(self, now: float, num_held: int, *, is_only: bool) -> tuple[float, list[ReverbWriterError]]:
        """Read and request samples, as `Feed.proceed`; the samples that were taken count for the only server."""
        self.feed.max_samples = self._max_alone if is_only else self.max_samples
        return self.feed.proceed(now, num_held if is_only else 0)

    def take(self, num_samples: int) -> Samples:
        """Remove and return at most `num_samples` of the oldest waiting samples."""
        samples = self.feed.take(num_samples)
        if samples:
            self._remember(samples.keys.tolist(), self.shard.name)
        return samples

    def drop(self, num_samples: int) -> None:
        """Drop at most `num_samples` of the oldest waiting samples unread."""
        self.num_dropped += len(self.feed.take(num_samples))

    def count(self, stats: DatasetStats) -> None:
        """Add the counters of what has happened so far."""
        self.feed.count(stats)
        stats.dropped_samples += self.num_dropped
        stats.forgiven_samples += self.num_forgiven


class Rule(Protocol):
    """Which server's samples come next. It belongs to the thread that fetches, except for `num_drawn`.

    Attributes:
        is_ending: whether no more samples will be requested.
    """

    is_ending: bool

    @property
    def num_drawn(self) -> int:
        """Samples of the present batch that it has taken from their servers, and keeps until the batch is whole."""

    def begin(self, one: ShardFeed, now: float) -> None:
        """Note a new server."""

    def note(self, one: ShardFeed, now: float, *, was_lost: bool, has_more: bool, is_only: bool) -> None:
        """Note what a server has done: its connection `was_lost` before, and it `has_more` samples than before."""

    def leave(self, one: ShardFeed) -> None:
        """Note that a server has left the target."""

    def look(self, present: Sequence[ShardFeed], now: float) -> float:
        """Check servers that give nothing; return when to check again."""

    def take(
        self, present: Sequence[ShardFeed], leaving: Sequence[ShardFeed], num_samples: int, now: float, *, rest: bool
    ) -> Samples:
        """Return samples as `Feed.take`; servers that are `leaving` have samples that would otherwise be lost."""

    @property
    def is_starved(self) -> bool:
        """Whether the present batch gets no more samples."""

    def end_batch(self) -> str:
        """End the present batch, as `Feed.end_batch`."""


class SeveralFeeds:
    """The samples of one table on the servers of a target; the methods are those of `Feed`."""

    def __init__(
        self,
        connections: ServerSet,
        infos: Mapping[str, ServerInfo],
        tables: Sequence[TableInfo],
        rule: Rule,
        open_feed: Callable[[ShardServer, ServerInfo | None, Flag], ShardFeed],
        *,
        may_grow: bool = True,
    ) -> None:
        """Prepare to read.

        `infos` has the answers of servers, by name of the shard, and `tables` the table on them. `open_feed` gets a
        shard, its answer, None if there is none, and what the feed sets when it has something to do. Shards that the
        target names later are read if it `may_grow`.
        """
        self.tables, self.removes_items = tables, tables[0].max_times_sampled > 0
        self.changed = Flag()
        self._connections, self._infos, self._rule = connections, infos, rule
        self._open_feed, self._may_grow = open_feed, may_grow
        self._shards: Sequence[ShardServer] = ()
        self._by_name: dict[str, ShardFeed] = {}  # present ones; replaced as a whole, because other threads read it
        self._leaving: list[ShardFeed] = []  # have left the target, and have samples that would otherwise be lost
        self._past = DatasetStats()  # counters of servers that have left
        self._began_at = time.monotonic()

    # ------------------------------------------------------------------------------- counters, for any thread

    @property
    def present(self) -> list[ShardFeed]:
        """The servers of the target."""
        return [*self._by_name.values()]

    def unreachable(self) -> set[str]:
        """Return the names of the shards without a connection."""
        return {name for name, one in self._by_name.items() if one.has_no_connection}

    @property
    def heard_at(self) -> float:
        """The time of the last arrival of samples from a present server."""
        return max((one.feed.heard_at for one in self.present), default=self._began_at)

    @property
    def num_in_flight(self) -> int:
        """Samples that were requested and have not arrived."""
        return sum(one.feed.num_in_flight for one in self.present)

    @property
    def num_waiting(self) -> int:
        """Samples that have arrived and were not taken."""
        return self._rule.num_drawn + sum(one.num_waiting for one in (*self._leaving, *self.present))

    @property
    def num_for_batch(self) -> int:
        """Samples that have arrived for the next batches: at most those of the server with the most, and the drawn."""
        return self._rule.num_drawn + max((one.num_waiting for one in self.present), default=0)

    @property
    def num_left_out(self) -> int:
        """Servers that cannot give new samples, or are late."""
        return sum(one.is_lost or one.is_late for one in self.present)

    @property
    def is_done(self) -> bool:
        """Whether nothing is in flight on any server, and nothing more will be requested."""
        return all(one.feed.is_done for one in self.present)

    @property
    def is_gone(self) -> bool:
        """Whether no server can be reached."""
        return all(one.feed.is_gone for one in self.present)

    def inserts_missing(self) -> dict[str, int]:
        """Return by server how many inserts its next sample lacks."""
        return {server: number for one in self.present for server, number in one.feed.inserts_missing().items()}

    def look(self, now: float, since: float) -> None:
        """Have each server asked for the cause of a wait."""
        for one in self.present:
            one.feed.look(now, since)

    def explain(self, since: float) -> str:
        """Return why no samples have arrived since a time, for each server that has not ended."""
        return " ".join(text for one in self.present if (text := one.feed.explain(since)))

    def count(self, stats: DatasetStats) -> None:
        """Add the counters of all servers, also of those that have left."""
        for name, number in vars(self._past).items():
            setattr(stats, name, getattr(stats, name) + number)
        for one in self.present:
            one.count(stats)

    # ----------------------------------------------------------------------------- for the thread that fetches

    def proceed(self, now: float, num_held: int) -> tuple[float, list[ReverbWriterError]]:
        """Read and request samples of each server; see `Feed.proceed`."""
        self._follow_target(now)
        self._leaving = [one for one in self._leaving if one.feed.waiting]
        next_at, errors = math.inf, list[ReverbWriterError]()
        present, is_only = self.present, len(self._by_name) == 1
        for one in present:
            feed, stream = one.feed, one.feed.stream
            num_before, was_lost = feed.num_received, stream.loss is not None
            at, errors_of_one = one.proceed(now, num_held, is_only=is_only)
            next_at, errors = min(next_at, at), errors + errors_of_one
            if stream.loss is not None and not was_lost:
                self._connections.refresh_soon()
            has_more = feed.num_received > num_before
            self._rule.note(one, now, was_lost=was_lost, has_more=has_more, is_only=is_only)
        return min(next_at, self._rule.look(present, now)), errors

    def take(self, num_samples: int, *, rest: bool) -> Samples:
        """Return samples of the servers that the rule chooses."""
        return self._rule.take(self.present, self._leaving, num_samples, time.monotonic(), rest=rest)

    @property
    def is_starved(self) -> bool:
        """Whether the present batch gets no more samples."""
        return self._rule.is_starved

    def end_batch(self) -> str:
        """End the present batch."""
        return self._rule.end_batch()

    def stop_requests(self) -> None:
        """Request no more samples of any server."""
        self._rule.is_ending = True
        for one in self.present:
            one.feed.stop_requests()

    def close(self) -> None:
        """End all streams."""
        self.stop_requests()
        for one in self.present:
            one.feed.close()

    def _follow_target(self, now: float) -> None:
        """Start to read servers that are new in the client's target, and stop to read servers that have left it."""
        shards = self._connections.shards
        if shards is self._shards:
            return
        is_first, self._shards = not self._shards, shards
        names = {shard.name for shard in shards}
        for one in self.present:
            if one.shard.name not in names:
                self._leave(one)
        kept = {name: one for name, one in self._by_name.items() if name in names}
        if is_first or (self._may_grow and not self._rule.is_ending):
            for shard in shards:
                if shard.name not in kept:
                    info = self._infos.get(shard.name) if is_first else None
                    kept[shard.name] = self._open_feed(shard, info, self.changed)
                    self._rule.begin(kept[shard.name], now)
        self._by_name = kept

    def _leave(self, one: ShardFeed) -> None:
        """Stop to read a server; keep its counters, and samples that no one else will get."""
        self._rule.leave(one)
        one.feed.close()
        if self.removes_items:
            self._leaving.append(one)
        else:
            one.drop(one.num_waiting)
        one.count(self._past)
