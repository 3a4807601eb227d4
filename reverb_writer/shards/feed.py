r"""The feeds of several servers, read as one feed by a rule: in turn, or by mass.

    ServerFeed a \
    ServerFeed b  > ShardedFeed, by an InTurn or a ByMass -> take()
    ServerFeed c /

It follows the client's target: it starts to read new servers, and stops to read servers that have left.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence

from reverb_writer.background import Flag
from reverb_writer.errors import ReverbWriterError
from reverb_writer.protocol.responses import Samples
from reverb_writer.reading.stats import DatasetStats
from reverb_writer.shards.by_mass import ByMass
from reverb_writer.shards.server_set import ServerSet, ShardServer
from reverb_writer.shards.shard_feed import ShardFeed
from reverb_writer.shards.turns import InTurn
from reverb_writer.tables.table_info import ServerInfo, TableInfo


class ShardedFeed:
    """The samples of one table on the servers of a target; the methods are those of `Feed`."""

    def __init__(
        self,
        connections: ServerSet,
        infos: Mapping[str, ServerInfo],
        tables: Sequence[TableInfo],
        rule: InTurn | ByMass,
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

    def ask_why(self, now: float, since: float) -> None:
        """Have each server asked for the cause of a wait."""
        for one in self.present:
            one.feed.ask_why(now, since)

    def explain(self, since: float) -> str:
        """Return why no samples have arrived since a time, for each server that has not ended."""
        return " ".join(text for one in self.present if (text := one.feed.explain(since)))

    def count(self, stats: DatasetStats) -> None:
        """Add the counters of all servers, also of those that have left, and set the present values."""
        for name, number in vars(self._past).items():
            setattr(stats, name, getattr(stats, name) + number)
        for one in self.present:
            one.count(stats)
        stats.left_out_servers = sum(one.is_lost or one.is_late for one in self.present)

    # ----------------------------------------------------------------------------- for the thread that fetches

    def proceed(self, now: float, num_held: int) -> tuple[float, list[ReverbWriterError]]:
        """Read and request samples of each server; see `Feed.proceed`."""
        self._follow_target()
        self._leaving = [one for one in self._leaving if one.feed.waiting]
        next_at, errors = math.inf, list[ReverbWriterError]()
        present = self.present
        for one in present:
            was_lost = one.stream.loss is not None
            at, errors_of_one = one.proceed(now, num_held, is_only=len(present) == 1)
            next_at, errors = min(next_at, at), errors + errors_of_one
            if one.stream.loss is not None and not was_lost:
                self._connections.refresh_soon()
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

    def _follow_target(self) -> None:
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
        self._by_name = kept

    def _leave(self, one: ShardFeed) -> None:
        """Stop to read a server; keep its counters, and samples that no one else will get."""
        one.forgive()
        one.feed.close()
        if self.removes_items:
            self._leaving.append(one)
        else:
            one.drop(one.num_waiting)
        one.count(self._past)
