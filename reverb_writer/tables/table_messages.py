"""Convert a table's rules to Reverb's messages and back: for servers, checkpoints and Reverb's own configurations.

TableConfig    PriorityTableCheckpoint, in checkpoints and in Reverb's textproto
Selector       KeyDistributionOptions
Balance        RateLimiterCheckpoint and RateLimiterInfo, whose fields have the same names
signature      StructuredValue; its leaves may be anything with `shape` and `dtype`, such as `tf.TensorSpec`
"""

from __future__ import annotations

import math
import sys
from typing import Any

import tree

from reverb_writer.errors import FormatError, SpecError
from reverb_writer.protocol import messages, signatures
from reverb_writer.protocol.responses import parse
from reverb_writer.protocol.signatures import ArraySpec
from reverb_writer.tables import (
    SAVES,
    Balance,
    MinSize,
    Prioritized,
    Queue,
    RateLimiter,
    SampleToInsertRatio,
    Selector,
    Stack,
    TableConfig,
)
from reverb_writer.tables.saves import read_saves
from reverb_writer.tables.table_info import COUNTS, RateLimiterInfo, ServerInfo, TableInfo

_MAX_TABLES = 10_000
_HUGE = sys.float_info.max / 2  # Reverb writes the largest float for no bound


def read_table(message: Any) -> TableConfig:
    """Return the configuration in a PriorityTableCheckpoint; raise SpecError if no `TableConfig` has such rules."""
    try:
        sampler, remover = read_selector(message.sampler), read_selector(message.remover)
        limiter = _read_rate_limiter(message, sampler)
    except SpecError as error:
        raise SpecError(f"table `{message.table_name}`: {error}") from error
    return TableConfig(
        message.table_name,
        message.max_size,
        sampler,
        remover,
        limiter,
        max(0, message.max_times_sampled),
        signatures.decode(message.signature),
    )


def write_table(table: TableConfig, message: Any) -> None:
    """Set the rules of a PriorityTableCheckpoint, not its counters.

    Raises:
        SpecError, StructureError: Reverb cannot store the signature.
    """
    message.table_name, message.max_size = table.name, table.max_size
    message.max_times_sampled = table.max_times_sampled
    write_selector(table.sampler, message.sampler)
    write_selector(table.remover, message.remover)
    write_balance(table.rate_limiter.balance, message.rate_limiter)
    message.ClearField("signature")
    if table.signature is not None:
        message.signature.CopyFrom(encode_signature(table.signature))


def read_selector(options: Any) -> Selector:
    """Return the selector of a KeyDistributionOptions; raise SpecError if it sets none."""
    name = selector_name(options)
    if name == "prioritized":
        return Prioritized(options.prioritized.priority_exponent)
    if name == "unknown":
        raise SpecError("a selector must be fifo, lifo, uniform, heap or prioritized, got none.")
    return name  # type: ignore[return-value]  # one of the names


def selector_name(options: Any) -> str:
    """Return the selector's name without its exponent; "unknown" if a KeyDistributionOptions sets none."""
    kind = options.WhichOneof("distribution")
    if kind == "heap":
        return "min_heap" if options.heap.min_heap else "max_heap"
    return kind if kind is not None and getattr(options, kind) else "unknown"


def write_selector(selector: Selector, options: Any) -> None:
    """Set a KeyDistributionOptions."""
    options.Clear()
    if isinstance(selector, Prioritized):
        options.prioritized.priority_exponent = selector.exponent
    elif selector in ("max_heap", "min_heap"):
        options.heap.min_heap = selector == "min_heap"
    else:
        setattr(options, selector, True)
    options.is_deterministic = selector != "uniform" and not isinstance(selector, Prioritized)


def read_balance(limiter: Any) -> Balance:
    """Return the numbers of a rate limiter; a missing bound is infinite."""
    low = -math.inf if limiter.min_diff <= -_HUGE else limiter.min_diff
    high = math.inf if limiter.max_diff >= _HUGE else limiter.max_diff
    return Balance(limiter.samples_per_insert, limiter.min_size_to_sample, low, high)


def write_balance(balance: Balance, limiter: Any) -> None:
    """Set the numbers of a rate limiter, not its counters."""
    limiter.samples_per_insert, limiter.min_size_to_sample = balance.samples_per_insert, balance.min_size
    limiter.min_diff = max(balance.min_diff, -sys.float_info.max)
    limiter.max_diff = min(balance.max_diff, sys.float_info.max)


def encode_signature(signature: Any) -> Any:
    """Return a table's signature as a `messages.StructuredValue`; None if it has none.

    Raises:
        SpecError, StructureError: a leaf has no shape and dtype, or the message cannot express the nest.
    """
    return None if signature is None else signatures.encode(tree.map_structure(_spec, signature))


def read_server_info(reply: bytes, at: float) -> ServerInfo:
    """Read a ServerInfoResponse that arrived at `at` of `time.monotonic()`; the reserved table becomes `saves`."""
    response = parse("ServerInfoResponse", messages.ServerInfoResponse, reply)
    if len(response.table_info) > _MAX_TABLES:
        raise FormatError(f"a ServerInfoResponse of {len(response.table_info)} tables, expected at most {_MAX_TABLES}.")
    tables = {table.name: _table_info(table) for table in response.table_info}
    state, saves = response.tables_state_id, None
    if (counts := tables.pop(SAVES, None)) is not None:
        limiter = counts.rate_limiter
        saves = read_saves(limiter.num_inserts, limiter.num_samples, counts.signature)
    return ServerInfo((state.high << 64) | state.low, tables, at, saves)


def _read_rate_limiter(message: Any, sampler: Selector) -> RateLimiter:
    limiter = message.rate_limiter
    ratio, min_size = limiter.samples_per_insert, limiter.min_size_to_sample
    if limiter.min_diff <= -_HUGE and limiter.max_diff >= _HUGE:
        return MinSize(min_size)
    once = (ratio, min_size, limiter.min_diff, message.max_times_sampled) == (1, 1, 0, 1)
    if once and sampler in ("fifo", "lifo") and limiter.max_diff == message.max_size:
        return (Queue if sampler == "fifo" else Stack)(message.max_size)
    return SampleToInsertRatio(ratio, min_size, (limiter.min_diff, limiter.max_diff))


def _spec(leaf: Any) -> ArraySpec | None:
    if leaf is None or isinstance(leaf, ArraySpec):
        return leaf
    try:
        shape = leaf.shape
        if hasattr(shape, "rank"):  # TensorFlow's; without a known rank it cannot be iterated over
            shape = None if shape.rank is None else tuple(shape)
        dtype = getattr(leaf.dtype, "as_numpy_dtype", leaf.dtype)  # NumPy does not take TensorFlow's
        return ArraySpec(shape, dtype, getattr(leaf, "name", None) or "")
    except (AttributeError, TypeError, ValueError) as error:
        expected = "an object with `shape` and `dtype`, such as ArraySpec"
        raise SpecError(f"a leaf of `signature` must be {expected}, got {leaf!r}.") from error


def _table_info(table: Any) -> TableInfo:
    limiter, balance, work = table.rate_limiter_info, read_balance(table.rate_limiter_info), table.table_worker_time
    states = ("running", "sampling", "inserting", "sleeping", "waiting_for_sampling", "waiting_for_inserts")
    return TableInfo(
        **{name: getattr(table, name) for name in ("name", "max_times_sampled", *COUNTS)},
        sampler=selector_name(table.sampler_options),
        remover=selector_name(table.remover_options),
        rate_limiter=RateLimiterInfo(
            balance.samples_per_insert,
            balance.min_diff,
            balance.max_diff,
            balance.min_size,
            num_inserts=limiter.insert_stats.completed,
            num_samples=limiter.sample_stats.completed,
        ),
        signature=signatures.decode(table.signature),
        worker_time_ms={state: getattr(work, f"{state}_ms") for state in states},
        sampler_exponent=_exponent(table.sampler_options),
        remover_exponent=_exponent(table.remover_options),
    )


def _exponent(options: Any) -> float | None:
    return float(options.prioritized.priority_exponent) if options.WhichOneof("distribution") == "prioritized" else None
