"""The tables of a server as it reports them: sizes, counters, rate limiters; of one server or several together. Pure.

Source of the rate limiter's rule: reverb/cc/rate_limiter.cc (CanInsert, CanSample).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from reverb_writer.errors import StructureError
from reverb_writer.tables.table_config import Balance

_COUNTS = ("max_size", "current_size", "num_episodes", "num_deleted_episodes", "num_unique_samples")


@dataclass(frozen=True)
class RateLimiterInfo:
    """A table's rate limiter and where it stands.

    Attributes:
        samples_per_insert: the ratio that it keeps.
        min_diff: sampling waits while `diff` would fall below.
        max_diff: inserting waits while `diff` would rise above.
        min_size_to_sample: items that must be there before anything is sampled.
        num_inserts: items inserted since the server started or the table was reset.
        num_samples: items handed to samplers, those fetched ahead included.
    """

    samples_per_insert: float
    min_diff: float
    max_diff: float
    min_size_to_sample: int
    num_inserts: int
    num_samples: int

    @property
    def diff(self) -> float:
        """Inserts x samples_per_insert - samples, which the limiter keeps between `min_diff` and `max_diff`."""
        return self.num_inserts * self.samples_per_insert - self.num_samples

    @property
    def balance(self) -> Balance:
        """The rule that it keeps."""
        return Balance(self.samples_per_insert, self.min_size_to_sample, self.min_diff, self.max_diff)


@dataclass(frozen=True)
class TableInfo:
    """One table of a server.

    Attributes:
        name: its name.
        sampler: how items are chosen to be sampled: "uniform", "fifo", "lifo", "prioritized", "max_heap", "min_heap".
        remover: how they are chosen to be removed.
        max_size: items it holds at most.
        max_times_sampled: samples after which an item is removed; 0 for no limit.
        current_size: items it holds.
        num_episodes: episodes that its items come from.
        num_deleted_episodes: episodes of which no item is left.
        num_unique_samples: items sampled at least once.
        rate_limiter: its rate limiter.
        signature: nest of `ArraySpec`, with the time dimension; None if it has none or one that cannot be read.
        worker_time_ms: cumulative time of its worker thread in each state.
        sampler_exponent: to what power a "prioritized" sampler raises priorities; None for any other.
        remover_exponent: the same of the remover.
        servers: the table on each of several servers, if this is what they hold together, see `merge_tables`.
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
        """Return whether the rate limiter lets no further item in; of several servers, none does."""
        if self.servers:
            return all(table.blocks_inserts() for table in self.servers)
        return self.rate_limiter.balance.blocks_inserts(self.current_size, self.rate_limiter.diff)

    def blocks_samples(self) -> bool:
        """Return whether the rate limiter lets no further item out; of several servers, none does."""
        if self.servers:
            return all(table.blocks_samples() for table in self.servers)
        return self.rate_limiter.balance.blocks_samples(self.current_size, self.rate_limiter.diff)

    def num_ready(self) -> int:
        """Return how many samples the server would hand out at once, each item once.

        A request for more, of a table with `max_times_sampled`, stays at the server when its client leaves and takes an
        item that no client receives.
        """
        if self.servers:
            return sum(table.num_ready() for table in self.servers)
        allowed = self.rate_limiter.balance.num_samples_allowed(self.current_size, self.rate_limiter.diff)
        return int(min(self.current_size, allowed))


@dataclass(frozen=True)
class ServerInfo:
    """A server's tables at one moment.

    Attributes:
        state_id: random at every start of the server.
        tables: by name.
        at: `time.monotonic()` of that moment.
    """

    state_id: int
    tables: dict[str, TableInfo]
    at: float


def check_tables_exist(tables: Iterable[str], info: ServerInfo, address: str) -> None:
    """Check that the server has these tables."""
    missing = sorted(set(tables) - info.tables.keys())
    if missing:
        there = ", ".join(f"`{name}`" for name in sorted(info.tables) if not name.startswith("__")) or "none"
        raise StructureError(
            f"table {', '.join(f'`{name}`' for name in missing)} is not on the server at {address}; it has {there}."
        )


def merge_tables(servers: Sequence[Mapping[str, TableInfo]]) -> dict[str, TableInfo]:
    """Return what tables that all of several servers have are together.

    Counts, sizes, times and the bounds of rate limiters are added up; `samples_per_insert` is such that `diff` is the
    sum of theirs. Where servers are configured differently, a selector is named as "fifo, lifo", an exponent or a
    signature is None; of several `max_times_sampled` the largest counts.
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
        **{count: sum(getattr(table, count) for table in tables) for count in _COUNTS},
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
    num_inserts = sum(limiter.num_inserts for limiter in limiters)
    # Each counts as often as items were inserted there; before the first one, they count equally.
    weights = [limiter.num_inserts / num_inserts if num_inserts else 1 / len(limiters) for limiter in limiters]
    ratio = _common([limiter.samples_per_insert for limiter in limiters])
    if ratio is None:
        ratio = sum(weight * limiter.samples_per_insert for weight, limiter in zip(weights, limiters, strict=True))
    return RateLimiterInfo(
        samples_per_insert=ratio,
        min_diff=sum(limiter.min_diff for limiter in limiters),
        max_diff=sum(limiter.max_diff for limiter in limiters),
        min_size_to_sample=sum(limiter.min_size_to_sample for limiter in limiters),
        num_inserts=num_inserts,
        num_samples=sum(limiter.num_samples for limiter in limiters),
    )


def _common(values: Sequence[Any]) -> Any:
    """Return the value that all have; None if they differ."""
    return values[0] if all(value == values[0] for value in values) else None
