"""Read servers in turn: each batch comes from one server.

A server whose turn it is, and which has no batch, is waited for a moment. Then it is left out until it has a batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from reverb_writer.protocol.responses import NO_SAMPLES, Samples
from reverb_writer.shards.shard_feed import ShardFeed

_PATIENCE_S = 0.1  # wait for the server whose turn it is, or the fastest server gives most batches


class InTurn:
    """The servers give batches in turn. For the thread that fetches.

    Attributes:
        is_ending: whether no more samples will be requested.
        num_drawn: samples of a batch that is not whole, which were taken from their servers: none.
    """

    num_drawn = 0

    def __init__(self, batch_size: int) -> None:
        """Begin with the first server."""
        self.is_ending = False
        self._batch_size = batch_size
        self._turn = 0
        self._of_batch: ShardFeed | None = None  # the server of the present batch
        self._has_others = False
        self._waits_since: float | None = None

    def look(self, present: Sequence[ShardFeed], now: float) -> float:  # noqa: ARG002  # as of the other rule
        """Return when the patience with the server whose turn it is ends."""
        return math.inf if self._waits_since is None else self._waits_since + _PATIENCE_S

    def take(
        self, present: Sequence[ShardFeed], leaving: Sequence[ShardFeed], num_samples: int, now: float, *, rest: bool
    ) -> Samples:
        """Return at most `num_samples` samples of the server of the batch.

        Servers that are `leaving` have samples that would otherwise be lost. With `rest`, the server may be one that
        has no batch.
        """
        self._has_others = len(present) > 1
        if num_samples >= self._batch_size:  # the batch is still empty: its samples were left out
            self._of_batch = None
        one = self._of_batch or self._next(present, leaving, now, rest=rest)
        if one is None:
            return NO_SAMPLES
        self._of_batch = one
        return one.take(num_samples)

    @property
    def is_starved(self) -> bool:
        """Whether the server of the batch gives no more samples."""
        one = self._of_batch
        if one is None or one.feed.waiting:
            return False
        return one.feed.is_done or (one.is_lost and self._has_others)

    def end_batch(self) -> str:
        """End the present batch; return the address of its server."""
        one, self._of_batch = self._of_batch, None
        return "" if one is None else one.shard.address

    def _next(
        self, present: Sequence[ShardFeed], leaving: Sequence[ShardFeed], now: float, *, rest: bool
    ) -> ShardFeed | None:
        """Return the server of the next batch; None if no server has a batch, or a server is awaited."""
        waits_since, self._waits_since = self._waits_since, None
        for one in (*leaving, *present):
            if one.feed.waiting and (len(present) == 1 or one.stream.is_closed):
                return one
        for ahead in range(len(present)):
            number = (self._turn + ahead) % len(present)
            one = present[number]
            if one.feed.waiting and (rest or one.num_waiting >= self._batch_size or one.feed.is_done):
                if ahead and not rest and self._is_awaited(present[self._turn % len(present)], waits_since, now):
                    return None
                self._turn = (number + 1) % len(present)
                one.is_late = False
                return one
        return None

    def _is_awaited(self, one: ShardFeed, waits_since: float | None, now: float) -> bool:
        """Whether to keep waiting for the server whose turn it is; the wait began at `waits_since`."""
        if one.is_late or one.is_lost or one.feed.is_done:
            return False
        waits_since = now if waits_since is None else waits_since
        one.is_late = now - waits_since >= _PATIENCE_S
        self._waits_since = None if one.is_late else waits_since
        return not one.is_late
