"""Counters of observers."""

from __future__ import annotations

import collections
from dataclasses import dataclass, field

from reverb_writer.scalars import Scalars


@dataclass(frozen=True)
class ObserverStats(Scalars):
    """Counters of an observer since it was made. `pending_items` and `pending_bytes` are present values.

    Attributes:
        steps: steps taken, including boundary steps, without padding.
        episodes: episodes ended.
        items: windows completed, counted once for each table.
        acknowledged_items: items that the server has confirmed.
        pending_items: items that the server has not confirmed yet.
        pending_bytes: memory of pending items that are encoded, bytes.
        dropped_items: items that were given up: by `on_block="drop_oldest"`, with a lost shard, by a close that ran out
            of time, or because a priority function failed.
        dropped_steps: steps that are in no window, by reason; with several kinds of windows, summed over the kinds.
            Steps appended = steps in a window + steps dropped, for each kind, once its episode has ended.
        blocked_s: seconds that calls have waited.
        reconnects: lost connections that were made again.
        server_restarts: reconnections to a server that was restarted.
        resent_items: items sent again after a lost connection; a server stores each item once.
        lost_shards: number of times that one of several servers was given up.
        unconfirmed_items: dropped items that a lost shard had not confirmed; the shard may have stored some.
        failed_priorities: dropped items whose priority function failed.
        unmarked_steps: steps since the last mark of an episode's end, once 10,000 steps have come without a mark.
    """

    steps: int = 0
    episodes: int = 0
    items: int = 0
    acknowledged_items: int = 0
    pending_items: int = 0
    pending_bytes: int = 0
    dropped_items: int = 0
    dropped_steps: dict[str, int] = field(default_factory=dict)
    blocked_s: float = 0.0
    reconnects: int = 0
    server_restarts: int = 0
    resent_items: int = 0
    lost_shards: int = 0
    unconfirmed_items: int = 0
    failed_priorities: int = 0
    unmarked_steps: int = 0


class Books:
    """The counters behind `ObserverStats`, of a sender and of the senders before it. Only their threads change them."""

    def __init__(self) -> None:
        """Begin with zeros."""
        self.counts: collections.Counter[str] = collections.Counter()  # by the name of the field
        self.dropped_steps: collections.Counter[str] = collections.Counter()  # by reason

    def stats(self, *, pending_items: int, pending_bytes: int) -> ObserverStats:
        """Return the counters now, without those of the observer's own thread; for the sender's thread."""
        counts = self.counts
        return ObserverStats(
            **counts,
            pending_items=pending_items,
            pending_bytes=pending_bytes,
            dropped_items=counts["items"] - counts["acknowledged_items"] - pending_items,
            dropped_steps=dict(self.dropped_steps),
        )
