"""What a server tells about its tables, and what that says about a call that does not return.

Source of the rate limiter's rule: reverb/cc/rate_limiter.cc (CanInsert, CanSample).
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from reverb_writer.errors import FormatError, StructureError
from reverb_writer.protocol import messages, signatures
from reverb_writer.protocol.table_specs import SPECS_TABLE
from reverb_writer.transport.channel import Channel, describe, no_connection, refused
from reverb_writer.transport.connection import is_silence

__all__ = [
    "RateLimiterInfo",
    "ServerInfo",
    "TableInfo",
    "check_tables_exist",
    "inserts_move",
    "merge_tables",
    "parse_server_info",
    "request_server_info",
    "try_server_info",
    "why_inserts_wait",
    "why_samples_wait",
]

_MAX_TABLES = 10_000
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
        remover_exponent: likewise of the remover.
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
        limiter = self.rate_limiter
        if self.current_size + 1 <= limiter.min_size_to_sample:
            return False
        return limiter.diff + limiter.samples_per_insert > limiter.max_diff

    def blocks_samples(self) -> bool:
        """Return whether the rate limiter lets no further item out; of several servers, none does."""
        if self.servers:
            return all(table.blocks_samples() for table in self.servers)
        limiter = self.rate_limiter
        return self.current_size < limiter.min_size_to_sample or limiter.diff - 1 < limiter.min_diff

    def num_ready(self) -> int:
        """Return how many samples the server would hand out at once, each item once.

        Whoever asks for more of a table with `max_times_sampled` leaves a request behind when it goes, which takes an
        item out for nobody.
        """
        if self.servers:
            return sum(table.num_ready() for table in self.servers)
        if self.blocks_samples():
            return 0
        limiter = self.rate_limiter
        allowed = limiter.diff - limiter.min_diff
        return self.current_size if math.isinf(allowed) else min(self.current_size, math.floor(allowed))


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


def request_server_info(channel: Channel, timeout_s: float) -> ServerInfo:
    """Ask the server for its tables.

    Raises:
        ServerUnavailableError: nothing answers at the address within `timeout_s` seconds.
        ReplayTimeoutError: the server did not answer in time.
        ReverbWriterError: what answers is no Reverb server, or lets this client not in.
        FormatError: the answer cannot be read, or is beyond all measure.
    """
    try:
        reply = channel.call(messages.SERVER_INFO, b"", timeout_s)
    except grpc.RpcError as error:
        raise refused(channel.address, error) from error
    return parse_server_info(reply, time.monotonic())


def try_server_info(
    channel: Channel, timeout_s: float, *, begun: Callable[[Any], object] | None = None
) -> ServerInfo | None:
    """Ask the server for its tables once, without waiting for it to come up; None if it does not answer in time.

    Args:
        channel: the connection.
        timeout_s: how long, seconds.
        begun: gets the call under way, which another thread may `cancel()`; that counts as no answer.

    Raises:
        ServerUnavailableError: there is no connection to it.
        ReverbWriterError: as for `request_server_info`.
    """
    try:
        call = channel.future(messages.SERVER_INFO, b"", timeout_s)
        if begun is not None:
            begun(call)
        reply = call.result()
    except grpc.RpcError as error:
        if error.code() is grpc.StatusCode.UNAVAILABLE:
            if is_silence(str(error.details())):
                return None
            raise no_connection(channel.address, describe(error)) from error
        if error.code() in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED):
            return None  # cancelled: the connection was given up, or `begun` has seen to it
        raise refused(channel.address, error) from error
    return parse_server_info(reply, time.monotonic())


def parse_server_info(reply: bytes, at: float) -> ServerInfo:
    """Read a ServerInfoResponse of the moment `at`, a value of `time.monotonic()`.

    Raises:
        FormatError: the bytes are none, or name more than 10,000 tables.
    """
    try:
        response = messages.ServerInfoResponse.FromString(reply)
    except DecodeError as error:
        raise FormatError(f"{len(reply)} bytes that are no ServerInfoResponse ({error}).") from None
    if len(response.table_info) > _MAX_TABLES:
        raise FormatError(f"a ServerInfoResponse of {len(response.table_info)} tables, expected {_MAX_TABLES} at most.")
    tables = {table.name: _table_info(table) for table in response.table_info}
    state = response.tables_state_id
    return ServerInfo((state.high << 64) | state.low, tables, at)


def merge_tables(servers: Sequence[Mapping[str, TableInfo]]) -> dict[str, TableInfo]:
    """Return what tables that all of several servers have are together.

    Counts, sizes, times and the bounds of rate limiters are added up; `samples_per_insert` is such that `diff` is the
    sum of theirs. Where servers are configured differently, a selector is named as "fifo, lifo", an exponent or a
    signature is None, and of several `max_times_sampled` the largest counts.
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


def why_inserts_wait(before: ServerInfo, now: ServerInfo, tables: set[str]) -> str | None:
    """Say which rate limiter blocks inserts into one of `tables`, with its numbers; None if none does."""
    for name in sorted(tables & now.tables.keys()):
        table = now.tables[name]
        if table.blocks_inserts():
            limiter = table.rate_limiter
            text = (
                f"The rate limiter of table `{name}` blocks inserts: inserts x {limiter.samples_per_insert:g} - "
                f"samples = {limiter.diff:g}, max_diff {limiter.max_diff:g}"
            )
            seconds = now.at - before.at
            earlier = before.tables.get(name)
            if seconds >= 1 and earlier and earlier.rate_limiter.num_samples == limiter.num_samples:
                text += f", and nothing has sampled for {seconds:.0f} s"
            if inserts_move(before, now, {name}) and earlier:
                inserted = limiter.num_inserts - earlier.rate_limiter.num_inserts
                return (
                    f"{text}; it let {inserted} in during the last {seconds:.1f} s, in the order of their arrival. The "
                    "learner is slower than the actors: wait longer, make it faster, or have less in flight."
                )
            return f"{text}. Start the learner or raise `timeout_s`."
    return None


def inserts_move(before: ServerInfo, now: ServerInfo, tables: set[str]) -> bool:
    """Return whether what waits at the rate limiters of `tables` comes nearer: each that blocks has let some in.

    A table takes inserts in the order of their arrival, from whatever stream. So inserts by others are progress for
    ours, but only where a limiter holds them up: an open table confirms at once, or something else is wrong.
    """
    if before.state_id != now.state_id:
        return False
    looks = [(before.tables[name], now.tables[name]) for name in tables & before.tables.keys() & now.tables.keys()]
    held_up = [look for look in looks if any(table.blocks_inserts() for table in look)]
    return bool(held_up) and all(
        first.rate_limiter.num_inserts < last.rate_limiter.num_inserts for first, last in held_up
    )


def why_samples_wait(
    now: ServerInfo,
    table: str,
    before: ServerInfo | None = None,
    *,
    remedy: str | None = None,
) -> str:
    """Say what keeps samples of a table from coming, with the numbers, and what to do.

    Args:
        now: the tables.
        table: the name of the one that is sampled.
        before: the tables earlier, which tell whether actors write.
        remedy: what to do, for a table that is not written by actors.
    """
    if table not in now.tables:
        return f"The server has no table `{table}` any more."
    info = now.tables[table]
    limiter = info.rate_limiter
    new = 0
    written, advice = "", remedy or "Start the actors or raise `timeout_s`."
    if before and table in before.tables and now.at - before.at >= 1:
        new = limiter.num_inserts - before.tables[table].rate_limiter.num_inserts
        written = f" In the last {now.at - before.at:.0f} s {new if new > 0 else 'no'} items were inserted."
    if remedy is None and new > 0:
        advice = "The actors write: wait longer, with a larger `timeout_s`."
    elif remedy is None and (where := _described_but_empty(now, table)) is not None:
        written = f" No item was ever inserted, although an actor has stored the structure of its steps for {where}."
        advice = (
            "If its windows are longer than its episodes, nothing can be written: look at its log, and at "
            "`stats().dropped_steps` of its observer."
        )
    needed = limiter.min_size_to_sample - info.current_size
    if needed > 0:
        what = "is empty" if not info.current_size else f"has {info.current_size} items"
        return (
            f"Table `{table}` {what}; its rate limiter waits for {needed} more (min_size_to_sample "
            f"{limiter.min_size_to_sample}).{written} {advice}"
        )
    if info.blocks_samples():
        missing = math.ceil((limiter.min_diff + 1 - limiter.diff) / limiter.samples_per_insert)
        return (
            f"The rate limiter of table `{table}` waits for {missing} more inserts: inserts x "
            f"{limiter.samples_per_insert:g} - samples = {limiter.diff:g}, min_diff {limiter.min_diff:g}.{written} "
            f"{advice}"
        )
    return f"Table `{table}` has {info.current_size} items and its rate limiter lets them out: the server is busy."


def _described_but_empty(info: ServerInfo, table: str) -> str | None:
    """Name the tables of one of which an actor has stored the step spec but no item, if `table` may be that; else None.

    The server counts the specs that it has, and does not say of which tables they are.
    """
    empty = [
        name
        for name, one in info.tables.items()
        if name != SPECS_TABLE and one.signature is None and not (one.current_size or one.rate_limiter.num_inserts)
    ]
    num_others = sum(one.signature is None for name, one in info.tables.items() if name != SPECS_TABLE) - len(empty)
    if SPECS_TABLE not in info.tables or table not in empty or info.tables[SPECS_TABLE].current_size <= num_others:
        return None
    return "it" if len(empty) == 1 else f"one of {', '.join(f'`{name}`' for name in sorted(empty))}"


def check_tables_exist(tables: Iterable[str], info: ServerInfo, address: str) -> None:
    """Refuse tables that the server does not have.

    Raises:
        StructureError: names them, and the tables that there are.
    """
    missing = sorted(set(tables) - info.tables.keys())
    if missing:
        there = ", ".join(f"`{name}`" for name in sorted(info.tables) if not name.startswith("__")) or "none"
        raise StructureError(
            f"table {', '.join(f'`{name}`' for name in missing)} is not on the server at {address}; it has {there}."
        )


def _table_info(table: Any) -> TableInfo:
    limiter = table.rate_limiter_info
    work = table.table_worker_time
    return TableInfo(
        name=table.name,
        sampler=_selector(table.sampler_options),
        remover=_selector(table.remover_options),
        max_size=table.max_size,
        max_times_sampled=table.max_times_sampled,
        current_size=table.current_size,
        num_episodes=table.num_episodes,
        num_deleted_episodes=table.num_deleted_episodes,
        num_unique_samples=table.num_unique_samples,
        rate_limiter=RateLimiterInfo(
            samples_per_insert=limiter.samples_per_insert,
            min_diff=_unbounded(limiter.min_diff),
            max_diff=_unbounded(limiter.max_diff),
            min_size_to_sample=limiter.min_size_to_sample,
            num_inserts=limiter.insert_stats.completed,
            num_samples=limiter.sample_stats.completed,
        ),
        signature=signatures.decode(table.signature) if table.HasField("signature") else None,
        sampler_exponent=_exponent(table.sampler_options),
        remover_exponent=_exponent(table.remover_options),
        worker_time_ms={
            state: getattr(work, f"{state}_ms")
            for state in ("running", "sampling", "inserting", "sleeping", "waiting_for_sampling", "waiting_for_inserts")
        },
    )


def _unbounded(diff: float) -> float:
    """Return infinity for the largest float, with which Reverb says that there is no bound."""
    return math.copysign(math.inf, diff) if abs(diff) >= sys.float_info.max / 2 else diff


def _selector(options: Any) -> str:
    kind = options.WhichOneof("distribution")
    if kind == "heap":
        return "min_heap" if options.heap.min_heap else "max_heap"
    return kind or "unknown"


def _exponent(options: Any) -> float | None:
    return float(options.prioritized.priority_exponent) if options.WhichOneof("distribution") == "prioritized" else None
