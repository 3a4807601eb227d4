"""Counters of observers."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

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


def sum_of(one: ObserverStats, other: ObserverStats) -> ObserverStats:
    """Return the sum of two records."""
    sums = {
        each.name: getattr(one, each.name) + getattr(other, each.name)
        for each in fields(ObserverStats)
        if each.name != "dropped_steps"
    }
    reasons = one.dropped_steps.keys() | other.dropped_steps.keys()
    dropped = {
        reason: one.dropped_steps.get(reason, 0) + other.dropped_steps.get(reason, 0) for reason in sorted(reasons)
    }
    return ObserverStats(**sums, dropped_steps=dropped)
