"""A table on several servers, for a reader: one feed of all samples, and each new priority to the item's server."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Iterable, Mapping, Sequence

from reverb_writer.background import Flag, in_background, logged
from reverb_writer.errors import ReplayTimeoutError, ServerUnavailableError
from reverb_writer.reading.feed import ServerFeed
from reverb_writer.reading.priority_updates import drop_oldest
from reverb_writer.reading.read_options import ReadOptions
from reverb_writer.reading.table_source import Unset, set_priorities
from reverb_writer.shards.by_mass import ByMass
from reverb_writer.shards.calls import answering
from reverb_writer.shards.feed import ShardedFeed
from reverb_writer.shards.server_set import ServerSet, ShardServer
from reverb_writer.shards.shard_feed import ShardFeed
from reverb_writer.shards.turns import InTurn
from reverb_writer.shards.weights import EXACT
from reverb_writer.tables.table_info import ServerInfo

_LOG = logging.getLogger(__package__)

_TIMEOUT_S = 5.0  # of new priorities: a slow server delays no other


class ShardedTable:
    """A table on the servers of a target, which may change; see `TableSource`."""

    def __init__(
        self, connections: ServerSet, table: str, batch_size: int, options: ReadOptions, timeout_s: float
    ) -> None:
        """Prepare to read batches of `batch_size` samples."""
        self.timeout_s = timeout_s
        self._connections, self._table, self._options = connections, table, options
        self._batch_size, self._max_samples = batch_size, batch_size * options.max_in_flight_batches
        self._owners = KeyOwners()
        self._feed: ShardedFeed | None = None  # the newest
        self._has_warned = False

    @property
    def address(self) -> str:
        """The servers' addresses, as given, separated by commas."""
        return self._connections.address

    def open(self, timeout_s: float) -> ShardedFeed:
        """Find the table on the servers that answer, and return a feed of its samples."""
        infos = self._ask(timeout_s)
        tables = [info.tables[self._table] for info in infos.values()]
        is_exact = not self._options.single_pass and {table.sampler for table in tables} <= EXACT
        rule = ByMass(tables[0], self._batch_size, self._max_samples) if is_exact else InTurn(self._batch_size)

        def open_feed(shard: ShardServer, info: ServerInfo | None, changed: Flag) -> ShardFeed:
            feed = ServerFeed(
                shard.server,
                info,
                tables[0],
                self._max_samples,
                self._options,
                changed=changed,
                may_lack_table=is_exact,
            )
            # Servers that are drawn by their share get a larger limit with the first draw.
            max_samples = self._batch_size if is_exact else self._max_samples
            return ShardFeed(shard, feed, max_samples, self._owners.remember)

        may_grow = not self._options.single_pass  # it returns the items that the table held at its start
        self._feed = ShardedFeed(self._connections, infos, tables, rule, open_feed, may_grow=may_grow)
        return self._feed

    def _ask(self, timeout_s: float) -> dict[str, ServerInfo]:
        """Ask all servers at once for their tables, by name of the shard; log the missing servers every ten seconds.

        Servers that the target calls lost are not asked. For a single pass, a server that does not answer is an error.
        Otherwise it is left out after two seconds if another server answers, and read as soon as it answers.
        """
        shards = self._connections.in_state("up", "draining")
        addresses = ", ".join(shard.address for shard in shards)
        with logged(lambda: f"table `{self._table}`: waiting for the server at {addresses}"):
            try:
                infos = answering(shards, timeout_s, [self._table], needs_all=self._options.single_pass)
            except (ReplayTimeoutError, ServerUnavailableError) as error:
                raise error from None  # without gRPC's error: the message names the cause
        for shard in shards:
            if shard not in infos:
                text = "Table `%s` is read without the server at %s, which does not answer."
                _LOG.warning(text, self._table, shard.address)
        return {shard.name: info for shard, info in infos.items()}

    def set_priorities(self, updates: Mapping[int, float]) -> Unset:
        """Send each key to the server that owns it, or to all servers if the owner is unknown: others ignore it.

        A key is gone if no server could get it; it is refused if a server that should get it did not.
        """
        owners = self._owners.of(updates)
        unreachable = set() if self._feed is None else self._feed.unreachable()
        there = [shard for shard in self._connections.shards if shard.name not in unreachable]
        names = {None, *(shard.name for shard in there)}
        num_gone = sum(owner not in names for owner in owners) if there else len(updates)
        sent = []
        for shard in there:
            pairs = zip(updates.items(), owners, strict=True)
            of_shard = {key: priority for (key, priority), owner in pairs if owner in (None, shard.name)}
            if of_shard:
                timeout_s = min(self.timeout_s, _TIMEOUT_S)
                work = functools.partial(set_priorities, shard.server, self._table, of_shard, timeout_s)
                sent.append(in_background(work))
        refused = [one for outcome in sent for one in outcome.result().refused]
        if num_gone and not self._has_warned:
            self._has_warned = True
            _LOG.warning("Priorities of `%s` are not sent to unreachable servers; they are counted.", self._table)
        return Unset(refused, num_gone)


class KeyOwners:
    """The shard of each key, for as many keys as a learner can hold. Thread-safe."""

    def __init__(self) -> None:
        """Start without keys."""
        self._lock = threading.Lock()
        self._owners: dict[int, str] = {}

    def remember(self, keys: Sequence[int], name: str) -> None:
        """Remember the name of the shard of some keys."""
        with self._lock:
            self._owners.update(dict.fromkeys(keys, name))
            drop_oldest(self._owners)

    def of(self, keys: Iterable[int]) -> list[str | None]:
        """Return the name of each key's shard; None if it is unknown."""
        with self._lock:
            return [self._owners.get(key) for key in keys]
