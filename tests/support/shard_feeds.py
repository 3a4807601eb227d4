"""Feeds of several servers without a server: a test puts samples and answers into the stream of each."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from reverb_writer.background import Flag
from reverb_writer.errors import ServerUnavailableError
from reverb_writer.protocol.responses import NO_SAMPLES, Samples
from reverb_writer.reading.feed import ServerFeed
from reverb_writer.reading.read_options import ReadOptions
from reverb_writer.reading.stats import DatasetStats
from reverb_writer.shards.by_mass import ByMass
from reverb_writer.shards.feed import ShardedFeed
from reverb_writer.shards.shard_feed import ShardFeed
from reverb_writer.shards.turns import InTurn
from reverb_writer.tables.table_info import RateLimiterInfo, ServerInfo, TableInfo

NOW = 1000.0
BATCH_SIZE, MAX_SAMPLES = 4, 8  # of all feeds here
LIMITER = RateLimiterInfo(1.0, -math.inf, math.inf, 1, 0, 0)


def table_info(sampler: str = "uniform", size: int = 0, max_times_sampled: int = 0) -> TableInfo:
    """Return a table `replay`; a prioritized one has the exponent 1."""
    exponent = 1.0 if sampler == "prioritized" else None
    return TableInfo(
        "replay", sampler, "fifo", 100, max_times_sampled, size, 0, 0, 0, LIMITER, None, {}, sampler_exponent=exponent
    )


def samples_of(keys: Sequence[int], table_size: int, priority: float = 1.0) -> Samples:
    """Return samples of a table whose items all have the same priority."""
    num = len(keys)
    chances = np.full(num, 1 / table_size)
    return Samples(
        np.array([*keys], object), keys, np.full(num, priority), chances, np.full(num, table_size), [1] * num
    )


class Stream:
    """Stands for a `SampleStream`."""

    def __init__(self, info: ServerInfo | None) -> None:
        self.messages = collections.deque[Samples]()
        self.state_id = None if info is None else info.state_id
        self.table = None if info is None else info.tables["replay"]
        self.loss: Exception | None = None if info else ServerUnavailableError("no answer yet")
        self.unanswered_since: float | None = None
        self.is_done = self.is_closed = False
        self.num_in_flight = self.num_lost = self.num_unasked = self.num_bytes = 0
        self.reconnects = self.server_restarts = 0
        self.asked: list[float] = []
        self.changes: dict[str, Any] = {}  # attributes that the next `proceed` sets
        self.room: tuple[int, int] | None = None  # samples held and their limit, in the last call of `proceed`

    @property
    def has_unread(self) -> bool:
        return bool(self.messages)

    def read(self) -> Samples:
        return self.messages.popleft()

    def proceed(self, now: float, num_held: int, max_samples: int) -> float:  # noqa: ARG002  # as the real one
        self.room = num_held, max_samples
        vars(self).update(self.changes)
        self.changes = {}
        return math.inf

    def ask(self, now: float) -> None:
        self.asked.append(now)

    def stop_requests(self) -> None:
        self.is_done = True

    def close(self) -> None:
        self.is_closed = self.is_done = True


class Shards:
    """Servers `a`, `b`, ... with so many items of priority 1, read by a rule.

    Attributes:
        connections: stands for the client's; `shards` is its target.
        feeds: of all servers.
        streams: of every server that was read, by name.
        remembered: name of the server of each key that was taken.
        num_refreshed: calls of `refresh_soon`.
    """

    def __init__(self, rule: InTurn | ByMass, table: TableInfo, *sizes: int, may_grow: bool = True) -> None:
        self._table, self.num_refreshed = table, 0
        self.streams: dict[str, Stream] = {}
        self.remembered: dict[int, str] = {}
        names = [chr(ord("a") + number) for number in range(len(sizes))]
        infos = {name: self.info(number, size) for number, (name, size) in enumerate(zip(names, sizes, strict=True))}
        self.connections = cast("Any", SimpleNamespace(refresh_soon=self._refresh))
        self.connections.shards = tuple([self.shard(name) for name in names])
        self.feeds = ShardedFeed(self.connections, infos, [table], rule, self._open, may_grow=may_grow)

    def info(self, state_id: int, size: int) -> ServerInfo:
        """Return the answer of a server."""
        return ServerInfo(state_id, {"replay": dataclasses.replace(self._table, current_size=size)}, NOW)

    def shard(self, name: str) -> Any:
        """Return an entry of the target."""
        return SimpleNamespace(name=name, address=f"{name}:1", state="up")

    def receive(self, name: str, keys: Sequence[int], table_size: int, priority: float = 1.0) -> None:
        """Have samples of a server arrive."""
        self.streams[name].messages.append(samples_of(keys, table_size, priority))
        self.proceed()

    def proceed(self, now: float = NOW, num_held: int = 0) -> float:
        """Read what has arrived; return when to call again."""
        at, errors = self.feeds.proceed(now, num_held)
        assert errors == []
        return at

    def of(self, name: str) -> ShardFeed:
        """Return the feed of a present server."""
        return next(one for one in self.feeds.present if one.shard.name == name)

    def stats(self) -> DatasetStats:
        """Return the counters."""
        stats = DatasetStats()
        self.feeds.count(stats)
        return stats

    def lose(self, name: str) -> None:
        """Lose the connection to a server."""
        self._change(name, loss=ServerUnavailableError("gone"))

    def find(self, name: str, info: ServerInfo) -> None:
        """Have the connection to a server return."""
        self._change(name, loss=None, state_id=info.state_id, table=info.tables["replay"])

    def _change(self, name: str, **attributes: Any) -> None:
        """Change a stream while it proceeds."""
        self.streams[name].changes = attributes
        self.proceed()

    def _refresh(self) -> None:
        self.num_refreshed += 1

    def _open(self, shard: Any, info: ServerInfo | None, changed: Flag) -> ShardFeed:
        server: Any = SimpleNamespace(channel=None, address=shard.address)
        feed = ServerFeed(server, info, self._table, MAX_SAMPLES, ReadOptions(), changed=changed)
        stream: Any = Stream(info)
        self.streams[shard.name] = feed.stream = stream
        return ShardFeed(shard, feed, MAX_SAMPLES, lambda keys, name: self.remembered.update(dict.fromkeys(keys, name)))


def numbers_of(samples: Samples) -> list[int]:
    """Return the keys of samples."""
    keys: list[int] = samples.keys.tolist()
    return keys


NOTHING = numbers_of(NO_SAMPLES)
