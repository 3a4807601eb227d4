"""Counters of observers."""

from __future__ import annotations

import collections
import operator
from dataclasses import astuple, dataclass, field
from typing import TypeAlias, TypeVar

from reverb_writer.scalars import Scalars
from reverb_writer.transport.in_flight import InsertStats
from reverb_writer.writing.sequence_writer import SequenceWriter
from reverb_writer.writing.vector_writer import VectorWriter

Writer: TypeAlias = SequenceWriter | VectorWriter
AnyWriter = TypeVar("AnyWriter", bound=Writer)


@dataclass(frozen=True)
class Counts:
    """Counters of writers; see `ObserverStats`."""

    steps: int = 0
    episodes: int = 0
    dropped: collections.Counter[str] = field(default_factory=collections.Counter)

    def plus(self, writer: Writer) -> Counts:
        """Return the sum."""
        dropped = self.dropped + writer.dropped
        return Counts(self.steps + writer.total_steps, self.episodes + writer.num_episodes, dropped)


@dataclass(frozen=True)
class Moves:
    """Counters of changes of the shard; see `ObserverStats`."""

    shard_changes: int = 0
    unconfirmed_items: int = 0
    resent_items: int = 0


@dataclass(frozen=True)
class ObserverStats(Scalars):
    """What an observer has done so far; cumulative but for the pending ones.

    Attributes:
        steps: steps taken, boundary steps included, padding not.
        episodes: episodes ended.
        items: windows completed, counted once for each table.
        acknowledged_items: of them, those that the server has confirmed.
        pending_items: of them, those that it has not, yet.
        pending_bytes: bytes that they occupy here.
        dropped_items: of them, those given up under `on_block="drop_oldest"` or at a close that ran out of time.
        dropped_steps: steps that are in no window, by reason; with several kinds of windows, summed over the kinds.
            Steps appended = steps in a window + steps dropped, for each kind, once its episode has ended.
        blocked_s: seconds that calls have waited.
        reconnects: connections made again after a loss.
        server_restarts: of them, those that found the server restarted.
        shard_changes: how often the observer went to another one of several servers.
        unconfirmed_items: of the dropped items, those that a server had not confirmed when the observer left it; some
            may be there all the same.
        resent_items: items that were sent to another server instead; some may be on both.
    """

    steps: int
    episodes: int
    items: int
    acknowledged_items: int
    pending_items: int
    pending_bytes: int
    dropped_items: int
    dropped_steps: dict[str, int]
    blocked_s: float
    reconnects: int
    server_restarts: int
    shard_changes: int = 0
    unconfirmed_items: int = 0
    resent_items: int = 0


_Counters = TypeVar("_Counters", InsertStats, Moves)


def add(one: _Counters, other: _Counters) -> _Counters:
    """Return the sum."""
    return type(one)(*map(operator.add, astuple(one), astuple(other)))
