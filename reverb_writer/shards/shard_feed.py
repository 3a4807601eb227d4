"""One of several servers that a reader reads as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from reverb_writer.errors import ReverbWriterError
from reverb_writer.protocol.responses import Samples
from reverb_writer.reading.feed import ServerFeed
from reverb_writer.reading.stats import DatasetStats
from reverb_writer.shards.server_set import ShardServer

Remember = Callable[[Sequence[int], str], object]
"""Remembers the name of the shard from which the items with these keys come."""


class ShardFeed:
    """One of several servers: its shard, its feed, and whether it is left out.

    Attributes:
        shard, feed, stream: the server, its feed, and the stream of the feed.
        max_samples: limit of its samples in flight or waiting while there are other servers.
        due: samples that were drawn from it and have not arrived.
        is_late: whether it is left out until it has samples again.
        num_dropped: samples that were dropped unread.
        num_forgiven: samples that were drawn from it and are no longer required.
    """

    def __init__(self, shard: ShardServer, feed: ServerFeed, max_samples: int, remember: Remember) -> None:
        """Start without samples, with this first `max_samples`; `remember` gets the keys of samples that are taken."""
        self.shard, self.feed, self._remember = shard, feed, remember
        self.max_samples, self._max_alone = max_samples, feed.max_samples
        self.is_late = False
        self.due = self.num_dropped = self.num_forgiven = 0
        self.stream = feed.stream

    @property
    def num_waiting(self) -> int:
        """Samples that have arrived and were not taken."""
        return len(self.feed.waiting)

    @property
    def has_no_connection(self) -> bool:
        """Whether the connection to the server is lost, or the target calls the server lost."""
        return self.stream.loss is not None or self.shard.state == "lost"

    @property
    def is_lost(self) -> bool:
        """Whether the server cannot give new samples."""
        return self.has_no_connection or self.stream.is_closed

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

    def forgive(self) -> None:
        """Forget and count the samples that it owes."""
        self.num_forgiven += self.due
        self.due = 0

    def count(self, stats: DatasetStats) -> None:
        """Add the counters of what has happened so far."""
        self.feed.count(stats)
        stats.dropped_samples += self.num_dropped
        stats.forgiven_samples += self.num_forgiven
