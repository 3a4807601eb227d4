"""Configurations in Reverb's own format, `ReverbServerConfig` as text."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from google.protobuf import text_format

from reverb_writer.errors import SpecError
from reverb_writer.protocol import messages, signatures
from reverb_writer.tables import (
    MinSize,
    Prioritized,
    Queue,
    RateLimiter,
    SampleToInsertRatio,
    Selector,
    Stack,
    TableConfig,
    check_unique_names,
)
from reverb_writer_server.config.sources import ConfigError

SUFFIXES = frozenset({".textproto", ".textpb", ".pbtxt", ".prototxt"})
_HUGE = sys.float_info.max / 2  # Reverb writes it for no bound


def read(path: Path) -> tuple[int, list[TableConfig]]:
    """Return the port, 0 if there is none, and the tables.

    Raises:
        ConfigError: the file is not valid; the message names the line, or the table and what is allowed.
    """
    message = messages.ReverbServerConfig()
    try:
        text_format.Parse(path.read_text(), message)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}). Check the path and its permissions.") from error
    except text_format.ParseError as error:
        raise ConfigError(f"{path}: line {error}. Allowed: a ReverbServerConfig of Reverb 0.14 as text.") from error
    if not message.tables:
        raise ConfigError(f"{path}: `tables`: got none, allowed: at least one.")
    try:
        check_unique_names([table.table_name for table in message.tables])
        return message.port, [_table(table) for table in message.tables]
    except SpecError as error:
        raise ConfigError(f"{path}: {error}") from error


def selector(options: Any) -> Selector:
    """Return the selector of a KeyDistributionOptions.

    Raises:
        SpecError: it sets no selector.
    """
    kind = options.WhichOneof("distribution")
    if kind == "heap":
        return "min_heap" if options.heap.min_heap else "max_heap"
    if kind == "prioritized":
        return Prioritized(options.prioritized.priority_exponent)
    if kind is None or not getattr(options, kind):
        raise SpecError("a selector must be fifo, lifo, uniform, heap or prioritized, got none.")
    return kind  # type: ignore[no-any-return]  # one of the names


def _table(table: Any) -> TableConfig:
    try:
        sampler, remover = selector(table.sampler), selector(table.remover)
    except SpecError as error:
        raise SpecError(f"table `{table.table_name}`: {error}") from error
    return TableConfig(
        table.table_name,
        table.max_size,
        sampler,
        remover,
        _rate_limiter(table, sampler),
        max(0, table.max_times_sampled),
        signatures.decode(table.signature) if table.HasField("signature") else None,
    )


def _rate_limiter(table: Any, sampler: Selector) -> RateLimiter:
    limiter = table.rate_limiter
    ratio, min_size = limiter.samples_per_insert, limiter.min_size_to_sample
    if limiter.min_diff <= -_HUGE and limiter.max_diff >= _HUGE:
        return MinSize(min_size)
    once = (ratio, min_size, limiter.min_diff, table.max_times_sampled) == (1, 1, 0, 1)
    if once and sampler in ("fifo", "lifo") and limiter.max_diff == table.max_size:
        return (Queue if sampler == "fifo" else Stack)(table.max_size)
    return SampleToInsertRatio(ratio, min_size, (limiter.min_diff, limiter.max_diff))
