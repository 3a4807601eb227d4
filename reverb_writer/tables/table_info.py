"""The tables that one server reports, or several servers together: sizes, counters, rate limiters. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from reverb_writer.errors import StructureError
from reverb_writer.scalars import Scalars
from reverb_writer.tables import Balance
from reverb_writer.tables.saves import Saves

COUNTS = ("max_size", "current_size", "num_episodes", "num_deleted_episodes", "num_unique_samples")


@dataclass(frozen=True)
class RateLimiterInfo(Scalars):
    """A table's rate limiter and its counters.

    Attributes:
        samples_per_insert: ratio that the rate limiter keeps.
        min_diff: smallest `diff`; sampling waits if `diff` would fall below it.
        max_diff: largest `diff`; inserting waits if `diff` would rise above it.
        min_size_to_sample: number of items that the table needs before items are sampled.
        num_inserts: items inserted since the server started or the table was reset.
        num_samples: samples sent, including samples that learners fetched ahead.
    """

    samples_per_insert: float
    min_diff: float
    max_diff: float
    min_size_to_sample: int
    num_inserts: int
    num_samples: int

    @property
    def diff(self) -> float:
        """Inserts x samples_per_insert - samples; the rate limiter keeps it between `min_diff` and `max_diff`."""
        return self.num_inserts * self.samples_per_insert - self.num_samples

    @property
    def balance(self) -> Balance:
        """The rule of the rate limiter."""
        return Balance(self.samples_per_insert, self.min_size_to_sample, self.min_diff, self.max_diff)


@dataclass(frozen=True)
class TableInfo(Scalars):
    """One table of a server, or of several servers together.

    Attributes:
        name: name of the table.
        sampler: rule that chooses items to sample: "uniform", "fifo", "lifo", "prioritized", "max_heap", "min_heap".
        remover: rule that chooses items to remove, by the same names.
        max_size: maximum number of items.
        max_times_sampled: samples after which an item is removed; 0 for no limit.
        current_size: number of items.
        num_episodes: episodes of the items.
        num_deleted_episodes: episodes whose items were all removed.
        num_unique_samples: items that were sampled at least once.
        rate_limiter: the table's rate limiter, a `RateLimiterInfo`.
        signature: nest of `ArraySpec`, with the time dimension; None without a signature that can be read.
        worker_time_ms: cumulative time of the table's thread in each state, milliseconds.
        sampler_exponent: exponent of priorities of a "prioritized" sampler; None for other samplers.
        remover_exponent: exponent of priorities of a "prioritized" remover; None for other removers.
        servers: the table on each server, if the client has several servers; otherwise empty.
    """

    name: str
    sampler: str
    remover: str
    max_size: int
    max_times_sampled: int
    current_size: int
    num_episodes: int
    num_deleted_episodes: int
    num_unique_samples: int
    rate_limiter: RateLimiterInfo
    signature: Any
    worker_time_ms: dict[str, int]
    sampler_exponent: float | None = None
    remover_exponent: float | None = None
    servers: tuple[TableInfo, ...] = ()

    def blocks_inserts(self) -> bool:
        """Return whether the rate limiter blocks the next insert; with several servers, on each server."""
        if self.servers:
            return all(table.blocks_inserts() for table in self.servers)
        limiter = self.rate_limiter
        return limiter.balance.blocks_inserts(self.current_size, limiter.num_inserts, limiter.num_samples)

    def blocks_samples(self) -> bool:
        """Return whether the rate limiter blocks the next sample; with several servers, on each server."""
        if self.servers:
            return all(table.blocks_samples() for table in self.servers)
        limiter = self.rate_limiter
        return limiter.balance.blocks_samples(self.current_size, limiter.num_inserts, limiter.num_samples)

    def num_ready(self) -> int:
        """Return the number of samples that the server would send now, each item once.

        If a table has `max_times_sampled`, a request for more samples remains at the server when the client
        disconnects, and consumes an item that no client receives.
        """
        if self.servers:
            return sum(table.num_ready() for table in self.servers)
        limiter = self.rate_limiter
        allowed = limiter.balance.num_samples_allowed(self.current_size, limiter.num_inserts, limiter.num_samples)
        return int(min(self.current_size, allowed))


@dataclass(frozen=True)
class ServerInfo:
    """A server's tables at one moment.

    Attributes:
        state_id: random number, new at every start of the server.
        tables: the tables by name.
        at: `time.monotonic()` at that moment.
        saves: the server's saves; None if it does not count them, as dm-reverb by itself.
    """

    state_id: int
    tables: dict[str, TableInfo]
    at: float
    saves: Saves | None = None


def check_tables_exist(tables: Iterable[str], info: ServerInfo, address: str) -> None:
    """Check that the server has these tables."""
    missing = sorted(set(tables) - info.tables.keys())
    if missing:
        there = ", ".join(f"`{name}`" for name in sorted(info.tables) if not name.startswith("__")) or "none"
        raise StructureError(
            f"table {', '.join(f'`{name}`' for name in missing)} is not on the server at {address}; it has {there}."
        )


def merge_tables(servers: Sequence[Mapping[str, TableInfo]]) -> dict[str, TableInfo]:
    """Return the tables that all servers have, each as one table.

    Counts, sizes, times and the bounds of rate limiters are added up; `samples_per_insert` is such that `diff` is the
    sum over the servers. If configurations differ, a selector has a name like "fifo, lifo", an exponent or a signature
    is None, and `max_times_sampled` is the largest.
    """
    if len(servers) == 1:
        return dict(servers[0])
    names = [name for name in servers[0] if all(name in server for server in servers)]
    return {name: _merged([server[name] for server in servers]) for name in names}


def _merged(tables: Sequence[TableInfo]) -> TableInfo:
    first = tables[0]
    limits = [table.max_times_sampled for table in tables]
    return replace(
        first,
        **{count: sum(getattr(table, count) for table in tables) for count in COUNTS},
        sampler=", ".join(dict.fromkeys(table.sampler for table in tables)),
        remover=", ".join(dict.fromkeys(table.remover for table in tables)),
        sampler_exponent=_common([table.sampler_exponent for table in tables]),
        remover_exponent=_common([table.remover_exponent for table in tables]),
        max_times_sampled=max(limits) if min(limits) > 0 else 0,
        signature=_common([table.signature for table in tables]),
        rate_limiter=_merged_limiter([table.rate_limiter for table in tables]),
        worker_time_ms={state: sum(table.worker_time_ms[state] for table in tables) for state in first.worker_time_ms},
        servers=tuple(tables),
    )


def _merged_limiter(limiters: Sequence[RateLimiterInfo]) -> RateLimiterInfo:
    counts = ("min_diff", "max_diff", "min_size_to_sample", "num_inserts", "num_samples")
    summed = {name: sum(getattr(limiter, name) for limiter in limiters) for name in counts}
    ratio = _common([limiter.samples_per_insert for limiter in limiters])
    if ratio is None and summed["num_inserts"]:
        ratio = (sum(limiter.diff for limiter in limiters) + summed["num_samples"]) / summed["num_inserts"]
    elif ratio is None:
        ratio = sum(limiter.samples_per_insert for limiter in limiters) / len(limiters)
    return RateLimiterInfo(samples_per_insert=ratio, **summed)


def _common(values: Sequence[Any]) -> Any:
    """Return the common value; None if values differ."""
    return values[0] if all(value == values[0] for value in values) else None
