"""Who waits for whom at a table: the room that is left to either side, who stands still, and what would end it.

    look 1 ──── a second or more ──── look 2
                  nothing was inserted, and the server spent the time waiting for samples:   inserts stand still
                  nothing was sampled, and it spent the time waiting for inserts:            samples stand still

A side that nobody uses does not wait: the server counts the time only while a request is in its queue. But it keeps the
request of an actor or a learner that has gone, so a side may stand still for nobody. A learner that waits for the next
insert between two samples is not standing still either; that is a rate limiter at work.

Source: Reverb 0.14, `table.cc` (the states of a table's worker) and `rate_limiter.cc`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from reverb_writer.transport.server_info import ServerInfo, TableInfo

__all__ = ["Side", "Standstill", "Watch", "figures", "insert_room", "rates", "reached_ratio", "reason", "sample_room"]

Side: TypeAlias = Literal["inserts", "samples"]
_WAITING: dict[Side, str] = {"inserts": "waiting_for_sampling", "samples": "waiting_for_inserts"}
_QUEUED: dict[Side, str] = {
    "inserts": "An insert is in the server's queue, of an actor that may have gone.",
    "samples": "A request for samples is in the server's queue, of a learner that may have gone.",
}


@dataclass(frozen=True)
class Standstill:
    """One side of a table, blocked by its rate limiter.

    Attributes:
        table: its name.
        side: "inserts" or "samples".
        seconds: for how long, at least: as far back as was looked.
        why: what is in the server's queue, and the limiter's rule with its numbers: two sentences.
        remedy: what would end it, a sentence.
    """

    table: str
    side: Side
    seconds: float
    why: str
    remedy: str

    def __str__(self) -> str:
        """Say all of it."""
        what = f"table `{self.table}`: {self.side} have stood still for {self.seconds:.0f} s or more."
        return f"{what} {self.why} {self.remedy}"


class Watch:
    """Tells from one look to the next which sides stand still, and since when. Not thread-safe."""

    def __init__(self) -> None:
        """Know nothing yet: it takes two looks."""
        self._last: ServerInfo | None = None
        self._since: dict[tuple[str, Side], float] = {}

    def look(self, info: ServerInfo) -> list[Standstill]:
        """Return the sides that have stood still since the last look, in the order of the tables."""
        before, self._last = self._last, info
        since: dict[tuple[str, Side], float] = {}
        found: list[Standstill] = []
        if before is not None and before.state_id == info.state_id:
            for name in info.tables.keys() & before.tables.keys():
                for side in _WAITING:
                    if _stood_still(before.tables[name], info.tables[name], side):
                        since[name, side] = self._since.get((name, side), before.at)
            found = [
                _standstill(table, side, info.at - since[name, side])
                for name, table in info.tables.items()
                for side in _WAITING
                if (name, side) in since
            ]
        self._since = since
        return found


def insert_room(table: TableInfo) -> float:
    """Return how many items the rate limiter lets in before something must be sampled; infinity without a bound."""
    limiter = table.rate_limiter
    until_min_size = max(0, limiter.min_size_to_sample - table.current_size)
    if math.isinf(limiter.max_diff):
        return math.inf
    return max(until_min_size, math.floor((limiter.max_diff - limiter.diff) / limiter.samples_per_insert), 0)


def sample_room(table: TableInfo) -> float:
    """Return how many items the rate limiter lets out before something must be inserted; infinity without a bound."""
    limiter = table.rate_limiter
    if table.current_size < limiter.min_size_to_sample:
        return 0
    return math.inf if math.isinf(limiter.min_diff) else max(math.floor(limiter.diff - limiter.min_diff), 0)


def reached_ratio(table: TableInfo) -> float | None:
    """Return samples per insert so far; None before the first insert."""
    limiter = table.rate_limiter
    return limiter.num_samples / limiter.num_inserts if limiter.num_inserts else None


def rates(before: TableInfo, now: TableInfo, seconds: float) -> tuple[float, float]:
    """Return inserts and samples a second from one look to the next, >= 0.

    A counter that has begun anew meanwhile, by a reset or a restart, counts as 0, for nobody knows how far it had come.
    """
    first, last = before.rate_limiter, now.rate_limiter
    done = (last.num_inserts - first.num_inserts, last.num_samples - first.num_samples)
    inserts, samples = (max(count, 0) / seconds if seconds > 0 else 0.0 for count in done)
    return inserts, samples


def reason(table: TableInfo, side: Side) -> tuple[str, str]:
    """Say why a side of a table has to wait, with the numbers, and what would end it: two sentences."""
    return _why_inserts(table) if side == "inserts" else _why_samples(table)


def figures(table: TableInfo) -> dict[str, Any]:
    """Return what there is to know of a table as JSON scalars; None where there is no bound or nothing to divide."""
    limiter = table.rate_limiter
    return {
        "name": table.name,
        "size": table.current_size,
        "max_size": table.max_size,
        "fill": table.current_size / table.max_size,
        "inserts": limiter.num_inserts,
        "samples": limiter.num_samples,
        "unique_samples": table.num_unique_samples,
        "episodes": table.num_episodes,
        "deleted_episodes": table.num_deleted_episodes,
        "ratio_wanted": limiter.samples_per_insert if _keeps_ratio(table) else None,
        "ratio_reached": reached_ratio(table),
        "diff": limiter.diff,
        "min_diff": _finite(limiter.min_diff),
        "max_diff": _finite(limiter.max_diff),
        "min_size_to_sample": limiter.min_size_to_sample,
        "insert_room": _finite(insert_room(table)),
        "sample_room": _finite(sample_room(table)),
        "sampler": table.sampler,
        "remover": table.remover,
        "max_times_sampled": table.max_times_sampled,
        "worker_time_ms": table.worker_time_ms,
    }


def _standstill(table: TableInfo, side: Side, seconds: float) -> Standstill:
    why, remedy = reason(table, side)
    return Standstill(table.name, side, seconds, f"{_QUEUED[side]} {why}", remedy)


def _stood_still(before: TableInfo, now: TableInfo, side: Side) -> bool:
    done = "num_inserts" if side == "inserts" else "num_samples"
    if getattr(before.rate_limiter, done) != getattr(now.rate_limiter, done):
        return False
    if now.worker_time_ms[_WAITING[side]] > before.worker_time_ms[_WAITING[side]]:
        return True
    # The worker has one clock: with both sides in its queue it says that it waits for inserts.
    return side == "inserts" and now.blocks_inserts() and now.blocks_samples() and _stood_still(before, now, "samples")


def _why_inserts(table: TableInfo) -> tuple[str, str]:
    limiter = table.rate_limiter
    if not table.blocks_inserts():
        return "The rate limiter lets inserts in; the server is slow or has just begun to move.", "Look again."
    needed = max(1, math.ceil(limiter.diff + limiter.samples_per_insert - limiter.max_diff))
    why = (
        f"One more would bring inserts x {limiter.samples_per_insert:g} - samples from {limiter.diff:g} above max_diff "
        f"{limiter.max_diff:g}."
    )
    return why, f"{_count(needed, 'sample')} the next insert in; so does a higher max_diff."


def _why_samples(table: TableInfo) -> tuple[str, str]:
    limiter = table.rate_limiter
    missing = limiter.min_size_to_sample - table.current_size
    if missing > 0:
        why = f"The table holds {table.current_size} items; sampling starts at {limiter.min_size_to_sample}."
        return why, f"{_count(missing, 'insert')} sampling start; so does a lower min_size."
    if not table.blocks_samples():
        return "The rate limiter lets samples out; the server is slow or has just begun to move.", "Look again."
    needed = max(1, math.ceil((limiter.min_diff + 1 - limiter.diff) / limiter.samples_per_insert))
    why = (
        f"One more would bring inserts x {limiter.samples_per_insert:g} - samples from {limiter.diff:g} below min_diff "
        f"{limiter.min_diff:g}."
    )
    return why, f"{_count(needed, 'insert')} the next sample out; so does a lower min_diff."


def _count(number: int, noun: str) -> str:
    """Return the subject of a sentence, and its verb."""
    return f"{number} {noun} lets" if number == 1 else f"{number} {noun}s let"


def _keeps_ratio(table: TableInfo) -> bool:
    return math.isfinite(table.rate_limiter.min_diff) or math.isfinite(table.rate_limiter.max_diff)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
