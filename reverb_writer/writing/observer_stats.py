"""Counters of observers."""

from __future__ import annotations

import collections
from dataclasses import dataclass, field

from reverb_writer.scalars import Scalars


@dataclass(frozen=True)
class ObserverStats(Scalars):
    """What an observer has done so far; cumulative but for the pending ones.

    Attributes:
        steps: steps taken, boundary steps included, padding not.
        episodes: episodes ended.
        items: windows completed, counted once for each table.
        acknowledged_items: of them, those that the server has confirmed.
        pending_items: of them, those that it has not confirmed yet.
        pending_bytes: bytes that the encoded ones occupy here.
        dropped_items: of them, those given up: under `on_block="drop_oldest"`, with a shard that was lost, at a close
            that ran out of time, or because their priority function failed.
        dropped_steps: steps that are in no window, by reason; with several kinds of windows, summed over the kinds.
            Steps appended = steps in a window + steps dropped, for each kind, once its episode has ended.
        blocked_s: seconds that calls have waited.
        reconnects: connections made again after a loss.
        server_restarts: of them, those that found the server restarted.
        resent_items: items sent again after a lost connection; a server keeps each once.
        lost_shards: how often one of several servers was given up.
        unconfirmed_items: of the dropped items, those that a lost shard had not confirmed; some may be stored there.
        failed_priorities: of the dropped items, those whose priority function failed.
        unmarked_steps: steps since the last mark of an episode's end, if there never was one for 10,000 steps.
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
    """The counters behind `ObserverStats`, of a sender and of those before it; only the sender's thread changes them.

    Attributes:
        counts: by the name of the field.
        dropped_steps: by reason.
    """

    def __init__(self) -> None:
        """Begin with zeros."""
        self.counts: collections.Counter[str] = collections.Counter()
        self.dropped_steps: collections.Counter[str] = collections.Counter()

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
