"""Rate limiters of tables: the room of each side, the blocked side, and its remedy. Pure.

Two answers of a server, at least a second apart, show whether a side stands still:

    nothing was inserted, and the server spent the time waiting for samples:   inserts stand still
    nothing was sampled, and the server spent the time waiting for inserts:    samples stand still

An unused side does not wait: the server counts the time only while a request is in its queue. But the server keeps the
request of an actor or a learner that has left, so a side may stand still although no one waits. A learner that only
waits for the next insert between two samples does not stand still.

Source: Reverb 0.14, `table.cc` (the states of a table's worker) and `rate_limiter.cc`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from reverb_writer.tables.table_info import ServerInfo, TableInfo

Side: TypeAlias = Literal["inserts", "samples"]
_WAITING: dict[Side, str] = {"inserts": "waiting_for_sampling", "samples": "waiting_for_inserts"}
_QUEUED: dict[Side, str] = {
    "inserts": "An insert is in the server's queue; its actor may have ended.",
    "samples": "A request for samples is in the server's queue; its learner may have ended.",
}
_LEAST_S = 1.0  # least time between two answers of a server whose differences are reported


def rates(before: TableInfo, now: TableInfo, seconds: float) -> tuple[float, float]:
    """Return inserts and samples per second between two answers, >= 0.

    If a counter was reset in between, its rate is 0, because its last value is unknown.
    """
    first, last = before.rate_limiter, now.rate_limiter
    done = (last.num_inserts - first.num_inserts, last.num_samples - first.num_samples)
    inserts, samples = (max(count, 0) / seconds if seconds > 0 else 0.0 for count in done)
    return inserts, samples


def inserts_progress(before: ServerInfo, now: ServerInfo, tables: set[str]) -> bool:
    """Return whether each rate limiter of `tables` that blocks inserts has admitted some between two answers.

    A table takes the inserts of all streams in the order of their arrival. So other actors' inserts are progress for
    this actor, but only if a rate limiter blocks: a table that does not block confirms at once.
    """
    if before.state_id != now.state_id:
        return False
    pairs = [(before.tables[name], now.tables[name]) for name in tables & before.tables.keys() & now.tables.keys()]
    blocking = [pair for pair in pairs if any(table.blocks_inserts() for table in pair)]
    return bool(blocking) and all(
        first.rate_limiter.num_inserts < last.rate_limiter.num_inserts for first, last in blocking
    )


def figures(table: TableInfo) -> dict[str, Any]:
    """Return a table's figures; bounds may be infinite, and None is a ratio that does not exist.

    `insert_room` is how many inserts the rate limiter allows before the next sample, and `sample_room` how many samples
    before the next insert.
    """
    limiter, balance = table.rate_limiter, table.rate_limiter.balance
    state = table.current_size, limiter.num_inserts, limiter.num_samples
    keeps_ratio = math.isfinite(limiter.min_diff) or math.isfinite(limiter.max_diff)
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
        "ratio_wanted": limiter.samples_per_insert if keeps_ratio else None,
        "ratio_reached": limiter.num_samples / limiter.num_inserts if limiter.num_inserts else None,
        "diff": limiter.diff,
        "min_diff": limiter.min_diff,
        "max_diff": limiter.max_diff,
        "min_size_to_sample": limiter.min_size_to_sample,
        "insert_room": balance.num_inserts_allowed(*state),
        "sample_room": balance.num_samples_allowed(*state),
        "sampler": table.sampler,
        "remover": table.remover,
        "max_times_sampled": table.max_times_sampled,
        "worker_time_ms": table.worker_time_ms,
    }


def json_figures(table: TableInfo) -> dict[str, Any]:
    """Return a table's figures as JSON scalars, with None for an infinite bound."""
    return {name: None if value in (math.inf, -math.inf) else value for name, value in figures(table).items()}


def _missing(table: TableInfo) -> int:
    """Return how many items the table lacks before sampling starts; <= 0 if it has enough."""
    return table.rate_limiter.min_size_to_sample - table.current_size


def inserts_until_sample(table: TableInfo) -> int:
    """Return how many inserts a table that blocks samples needs before the next sample; 0 if it does not block."""
    if (missing := _missing(table)) > 0:
        return missing
    if not table.blocks_samples():
        return 0
    limiter = table.rate_limiter
    return limiter.balance.num_inserts_needed(limiter.num_inserts, limiter.num_samples)


def explain_side(table: TableInfo, side: Side) -> tuple[str, str]:
    """Return two sentences: the reason why a side of a table waits, with its numbers, and the remedy."""
    why = _explain_block(table, side)
    if why is None:
        why = f"The rate limiter of table `{table.name}` does not block {side}: the server is slow or busy"
        return f"{why}.", "Ask again."
    limiter = table.rate_limiter
    if side == "inserts":
        rule = (limiter.samples_per_insert, limiter.min_diff, limiter.max_diff, table.max_times_sampled)
        wider = "larger `max_size`" if rule == (1, 0, table.max_size, 1) else "larger `error_buffer`"
        number = limiter.balance.num_samples_needed(limiter.num_inserts, limiter.num_samples)
        remedy = f"{_count(number, 'sample')} the next insert; so does a {wider}."
    elif _missing(table) > 0:
        lower = "; so does a lower `min_size`" if limiter.min_size_to_sample > 1 else ""
        remedy = f"{_count(_missing(table), 'insert')} sampling{lower}."
    else:
        remedy = f"{_count(inserts_until_sample(table), 'insert')} the next sample; so does a larger `error_buffer`."
    return f"{why}.", remedy


def explain_inserts(before: ServerInfo, now: ServerInfo, tables: set[str]) -> str | None:
    """Return which rate limiter blocks inserts into one of `tables`, with its numbers; None if none blocks."""
    for name in sorted(tables & now.tables.keys()):
        table = now.tables[name]
        why = _explain_block(table, "inserts")
        if why is None:
            continue
        limiter, seconds = table.rate_limiter, now.at - before.at
        earlier = before.tables.get(name)
        if earlier and seconds >= _LEAST_S and earlier.rate_limiter.num_samples == limiter.num_samples:
            why += f", and nothing has sampled for {seconds:.0f} s"
        if earlier and inserts_progress(before, now, {name}):
            inserted = limiter.num_inserts - earlier.rate_limiter.num_inserts
            return (
                f"{why}; it let {inserted} in during the last {seconds:.1f} s, in the order of their arrival. The "
                "learner is slower than the actors: wait longer, make it faster, or lower `max_in_flight_items`."
            )
        return f"{why}. Start the learner or raise `timeout_s`."
    return None


def explain_limiter(now: ServerInfo, tables: set[str]) -> str | None:
    """Return which rate limiter blocks inserts into one of `tables`, and the remedy; None if none blocks."""
    for name in sorted(tables & now.tables.keys()):
        if now.tables[name].blocks_inserts():
            return " ".join(explain_side(now.tables[name], "inserts"))
    return None


def explain_samples(now: ServerInfo, table: str, before: ServerInfo) -> str:
    """Return why no samples of a table arrive, with the numbers, and what to do.

    An earlier answer, `before`, shows whether actors write.
    """
    if table not in now.tables:
        return f"The server no longer has a table `{table}`."
    why = _explain_block(now.tables[table], "samples")
    if why is None:
        size = now.tables[table].current_size
        what = f"Table `{table}` has {size} items, and its rate limiter does not block samples"
        return f"{what}: the server is busy, or samples are left out."
    num_new, trend, advice = 0, "", "Start the actors or raise `timeout_s`."
    if table in before.tables and now.at - before.at >= _LEAST_S:
        num_new = now.tables[table].rate_limiter.num_inserts - before.tables[table].rate_limiter.num_inserts
        trend = f" In the last {now.at - before.at:.0f} s {num_new if num_new > 0 else 'no'} items were inserted."
    if num_new > 0:
        advice = "If actors still write, raise `timeout_s`. A thread that writes and samples in turn must write more."
    return f"{why}.{trend} {advice}"


def _explain_block(table: TableInfo, side: Side) -> str | None:
    """Return why the rate limiter blocks a side, with its numbers and without a full stop; None if it does not."""
    limiter = table.rate_limiter
    balance = f"inserts x {limiter.samples_per_insert:g} - samples = {limiter.diff:g}"
    if side == "inserts":
        if not table.blocks_inserts():
            return None
        return f"The rate limiter of table `{table.name}` blocks inserts: {balance}, max_diff {limiter.max_diff:g}"
    if (missing := _missing(table)) > 0:
        holds = f"has {table.current_size} items" if table.current_size else "is empty"
        return (
            f"Table `{table.name}` {holds}; its rate limiter waits for {missing} more "
            f"(min_size_to_sample {limiter.min_size_to_sample})"
        )
    if not table.blocks_samples():
        return None
    number = inserts_until_sample(table)
    return (
        f"The rate limiter of table `{table.name}` waits for {number} more insert{'s' if number > 1 else ''}: "
        f"{balance}, min_diff {limiter.min_diff:g}"
    )


def _count(number: int, noun: str) -> str:
    """Return the subject of a sentence, and its verb."""
    return f"{number} {noun} unblocks" if number == 1 else f"{number} {noun}s unblock"


@dataclass(frozen=True)
class Standstill:
    """One side of a table, blocked by its rate limiter."""

    table: str
    side: Side
    seconds: float  # at least this long: since the first answer that showed it
    why: str  # two sentences: the request in the server's queue, and the limiter's rule with its numbers
    remedy: str  # a sentence: the action that ends it

    def __str__(self) -> str:
        what = f"table `{self.table}`: {self.side} have stood still for {self.seconds:.0f} s or more."
        return f"{what} {self.why} {self.remedy}"


class StandstillDetector:
    """Finds the sides that stand still, and since when, from consecutive answers of a server. Not thread-safe."""

    def __init__(self) -> None:
        """Start without an answer; rates need two."""
        self._last: ServerInfo | None = None
        self._since: dict[tuple[str, Side], float] = {}

    def update(self, info: ServerInfo) -> list[Standstill]:
        """Return the sides that have stood still since the last answer, in the order of the tables."""
        before, self._last = self._last, info
        since: dict[tuple[str, Side], float] = {}
        found: list[Standstill] = []
        for name, table in info.tables.items():
            if before is None or before.state_id != info.state_id or name not in before.tables:
                continue
            for side in _WAITING:
                if _stood_still(before.tables[name], table, side):
                    since[name, side] = self._since.get((name, side), before.at)
                    why, remedy = explain_side(table, side)
                    found.append(Standstill(name, side, info.at - since[name, side], f"{_QUEUED[side]} {why}", remedy))
        self._since = since
        return found


def _stood_still(before: TableInfo, now: TableInfo, side: Side) -> bool:
    done = "num_inserts" if side == "inserts" else "num_samples"
    if getattr(before.rate_limiter, done) != getattr(now.rate_limiter, done):
        return False
    if now.worker_time_ms[_WAITING[side]] > before.worker_time_ms[_WAITING[side]]:
        return True
    # The worker has one clock: if both sides are in its queue, it reports that it waits for inserts.
    return side == "inserts" and now.blocks_inserts() and now.blocks_samples() and _stood_still(before, now, "samples")
