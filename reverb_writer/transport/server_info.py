"""Ask a server for its tables; `table_info` says what they are, and `rate_limits` why a call waits for them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from reverb_writer.errors import FormatError, ReverbWriterError
from reverb_writer.protocol import messages, signatures
from reverb_writer.protocol.responses import parse
from reverb_writer.tables.table_info import RateLimiterInfo, ServerInfo, TableInfo
from reverb_writer.tables.table_messages import read_balance, selector_name
from reverb_writer.transport.channel import Channel
from reverb_writer.transport.pending_call import PendingCall

_MAX_TABLES = 10_000


def request_server_info(channel: Channel, timeout_s: float) -> ServerInfo:
    """Ask the server for its tables.

    Raises:
        ServerUnavailableError: nothing answers at the address within `timeout_s` seconds.
        ReplayTimeoutError: the server did not answer in time.
        ReverbWriterError: what answers is not a Reverb server, or refuses this client.
        FormatError: the answer cannot be read, or names too many tables.
    """
    return parse_server_info(channel.call(messages.SERVER_INFO, b"", timeout_s), time.monotonic())


def ask_server_info(channel: Channel, timeout_s: float) -> ServerInfo:
    """Ask the server for its tables once, without waiting for it to come up; raises as `request_server_info`."""
    return parse_server_info(channel.start(messages.SERVER_INFO, b"", timeout_s).result(), time.monotonic())


def start_server_info(
    channel: Channel, timeout_s: float, deliver: Callable[[ServerInfo | ReverbWriterError], object]
) -> PendingCall:
    """Ask the server for its tables once; never waits. `deliver` gets the answer, or the error that came instead.

    It is called in the loop's thread and must not wait. A call that is cancelled or late brings ReplayTimeoutError.
    """

    def read(outcome: bytes | ReverbWriterError) -> None:
        try:
            deliver(outcome if isinstance(outcome, ReverbWriterError) else parse_server_info(outcome, time.monotonic()))
        except FormatError as error:
            deliver(error)

    return channel.start(messages.SERVER_INFO, b"", timeout_s, read)


def parse_server_info(reply: bytes, at: float) -> ServerInfo:
    """Read a ServerInfoResponse of the moment `at`, a value of `time.monotonic()`."""
    response = parse("ServerInfoResponse", messages.ServerInfoResponse, reply)
    if len(response.table_info) > _MAX_TABLES:
        raise FormatError(f"a ServerInfoResponse of {len(response.table_info)} tables, expected {_MAX_TABLES} at most.")
    tables = {table.name: _table_info(table) for table in response.table_info}
    state = response.tables_state_id
    return ServerInfo((state.high << 64) | state.low, tables, at)


def _table_info(table: Any) -> TableInfo:
    limiter = table.rate_limiter_info
    balance = read_balance(limiter)
    work = table.table_worker_time
    return TableInfo(
        name=table.name,
        sampler=selector_name(table.sampler_options),
        remover=selector_name(table.remover_options),
        max_size=table.max_size,
        max_times_sampled=table.max_times_sampled,
        current_size=table.current_size,
        num_episodes=table.num_episodes,
        num_deleted_episodes=table.num_deleted_episodes,
        num_unique_samples=table.num_unique_samples,
        rate_limiter=RateLimiterInfo(
            samples_per_insert=balance.samples_per_insert,
            min_diff=balance.min_diff,
            max_diff=balance.max_diff,
            min_size_to_sample=balance.min_size,
            num_inserts=limiter.insert_stats.completed,
            num_samples=limiter.sample_stats.completed,
        ),
        signature=signatures.decode(table.signature),
        sampler_exponent=_exponent(table.sampler_options),
        remover_exponent=_exponent(table.remover_options),
        worker_time_ms={
            state: getattr(work, f"{state}_ms")
            for state in ("running", "sampling", "inserting", "sleeping", "waiting_for_sampling", "waiting_for_inserts")
        },
    )


def _exponent(options: Any) -> float | None:
    return float(options.prioritized.priority_exponent) if options.WhichOneof("distribution") == "prioritized" else None
