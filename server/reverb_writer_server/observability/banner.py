"""Sentences about the server for its log: its tables, their limits, its memory, and its figures once a minute."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import platform
from collections.abc import Iterator, Sequence
from importlib import metadata

from reverb_writer.tables import Prioritized, Queue, Selector, TableConfig
from reverb_writer.tables.memory_estimate import PROCESS_BYTES, Estimate, need
from reverb_writer.tables.rate_limits import rates
from reverb_writer_server.config.schema import ServedTable, ServerConfig
from reverb_writer_server.machine import available_bytes, used_bytes
from reverb_writer_server.observability.monitor import ServerSnapshot
from reverb_writer_server.observability.state import ServiceState
from reverb_writer_server.reverb.sockets import ALL

_SELECTED_ITEM = {
    "fifo": "the oldest item",
    "lifo": "the newest item",
    "uniform": "any item, with equal probability",
    "max_heap": "the item of highest priority",
    "min_heap": "the item of lowest priority",
}
_KB = 1024


@functools.cache
def versions() -> dict[str, str]:
    """Return the versions of the installed packages, by name in snake case."""
    names = ("reverb-writer-server", "dm-reverb", "tensorflow")
    return {**{name.replace("-", "_"): _version(name) for name in names}, "python": platform.python_version()}


def start_lines(config: ServerConfig) -> Iterator[tuple[int, str]]:
    """Yield level and text of log lines about a configuration that is about to be served."""
    yield logging.INFO, ", ".join(f"{name.replace('_', '-')} {version}" for name, version in versions().items())
    if config.bind == ALL and config.gateway_certificate is None:
        exposure = (
            f"bind is {ALL}: everyone who reaches its port can read, change and delete all data. Put a "
            "gateway or a firewall in front (SECURITY.md)"
        )
        yield logging.WARNING, exposure
    for line in table_lines(config.tables):
        yield logging.INFO, line
    lines, excess = memory_lines(config)
    for line in lines:
        yield logging.WARNING if excess else logging.INFO, line


def table_lines(tables: Sequence[ServedTable]) -> Iterator[str]:
    """Yield the rules of each table, and warnings about them."""
    for table in tables:
        yield f"table `{table.config.name}`:"
        for sentence in describe(table.config):
            yield f"  {sentence}"
        if table.config.signature is not None:
            yield f"  signature: {table.config.signature}"
        for sentence in (*table.advice, *_advice(table.config)):
            yield f"  note: {sentence}"


def memory_lines(config: ServerConfig) -> tuple[list[str], bool]:
    """Return lines about the estimated memory of the tables, and whether it exceeds the available memory."""
    estimates = [table.estimate() for table in config.tables]
    available = available_bytes()
    lines = [f"memory of table `{one.table}`: {_describe_estimate(one)}" for one in estimates]
    total, saving, unknown = need(estimates, saves=config.checkpoints_directory is not None)
    excess = total > available
    about = (
        f"at least {format_bytes(total)}, without {', '.join(f'`{name}`' for name in unknown)}"
        if unknown
        else f"about {format_bytes(total)}"
    )
    verdict = ": more than is available. Lower max_size or raise the limit" if excess else ""
    parts = f"{format_bytes(PROCESS_BYTES)} for the processes"
    if saving:
        parts += f", {format_bytes(saving)} while a checkpoint is written"
    lines.append(f"total memory: {about} ({parts}), available: {format_bytes(available)}{verdict}")
    return lines, excess


def figures_line(state: ServiceState, before: ServerSnapshot) -> str:
    """Return a line with the sizes of the tables and their rates since `before`, or with the reason why it has none.

    A rate is left out if it is unknown, because `before` has no figures of the table or is the same snapshot.
    """
    assert state.monitor is not None  # noqa: S101  # the service calls it while it serves
    if not state.monitor.answers():
        return str(state.monitor.fault())
    snapshot, parts = state.monitor.latest(), []
    for name, table in snapshot.tables.items():
        seconds = snapshot.at - before.at
        part = f"{name} {table.current_size:,}/{table.max_size:,}"
        if name in before.tables and seconds > 0:
            inserts, samples = rates(before.tables[name], table, seconds)
            part += f" +{inserts:,.0f}/s -{samples:,.0f}/s"
        parts.append(part)
    memory = f"memory {format_bytes(used_bytes(state.process_ids))} of {format_bytes(available_bytes())}"
    return "; ".join([*parts, memory, *(str(one) for one in snapshot.standstills)])


def _describe_estimate(one: Estimate) -> str:
    if one.total_bytes is None:
        missing = [
            key for key, value in (("signature", one.step_bytes), ("sequence_length", one.steps)) if value is None
        ]
        return f"unknown, set its {' and '.join(missing)}"
    return f"about {format_bytes(one.total_bytes)} ({one.steps:,} steps of {one.step_bytes:,} bytes before compression)"


def _version(name: str) -> str:
    for package in (name, f"{name}-cpu"):  # TensorFlow's release for CPUs has another name
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(package)
    return "(not installed)"


def describe(table: TableConfig) -> list[str]:
    """Return the rules of a table, a sentence each.

    >>> describe(TableConfig("weights", 1))[0]
    'holds up to 1 item; when it is full, an insert removes the oldest item'
    >>> for sentence in describe(TableConfig.queue("q", 10)):
    ...     print(sentence)
    holds up to 10 items
    samples the oldest item, each once
    blocks samples while it is empty
    blocks inserts while it holds 10 items
    """
    limiter, balance = table.rate_limiter, table.rate_limiter.balance
    holds = f"holds up to {_items(table.max_size)}"
    times = {0: "", 1: ", each once"}.get(table.max_times_sampled, f", each at most {table.max_times_sampled} times")
    sentences = [
        holds
        if isinstance(limiter, Queue)
        else f"{holds}; when it is full, an insert removes {_describe_selector(table.remover)}",
        f"samples {_describe_selector(table.sampler)}{times}",
    ]
    if isinstance(limiter, Queue):
        return [*sentences, "blocks samples while it is empty", f"blocks inserts while it holds {_items(limiter.size)}"]
    low, high = math.isfinite(balance.min_diff), math.isfinite(balance.max_diff)
    diff = f"inserts x {balance.samples_per_insert:g} - samples"
    few = "while it is empty" if balance.min_size == 1 else f"while it holds fewer than {balance.min_size:,} items"
    sentences.append(
        f"blocks samples {few}" + (f", or when {diff} would fall below {balance.min_diff:,g}" if low else "")
    )
    if high:
        sentences.append(
            f"blocks inserts when {diff} would rise above {balance.max_diff:,g}, once it holds {balance.min_size:,}"
        )
        behind = math.floor((balance.max_diff - balance.min_diff) / balance.samples_per_insert)
        sentences.append(
            f"a learner takes {balance.samples_per_insert:g} samples per insert and may fall {behind:,} inserts behind"
        )
    else:
        sentences.append("never blocks inserts")
    return sentences


def _advice(table: TableConfig) -> list[str]:
    """Return a warning about a ratio that `max_times_sampled` makes unreachable."""
    balance, times = table.rate_limiter.balance, table.max_times_sampled
    if not times or not math.isfinite(balance.max_diff) or balance.samples_per_insert <= times:
        return []
    grows, most = balance.samples_per_insert - times, math.ceil(balance.samples_per_insert)
    sentence = (
        f"samples_per_insert {balance.samples_per_insert:g} cannot be reached, because an "
        f"item is removed after {times} samples: each insert raises diff by {grows:g} permanently. After "
        f"{math.floor(balance.max_diff / grows)} inserts the limiter blocks inserts that would take the table above "
        f"min_size {balance.min_size}. Raise max_times_sampled to {most}."
    )
    return [sentence]


def format_bytes(number: float) -> str:
    """Return a number of bytes with a unit.

    >>> format_bytes(1_610_612_736)
    '1.5 GiB'
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < _KB:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= _KB
    return f"{number:.1f} TiB"


def _items(count: int) -> str:
    return f"{count:,} item" + "s" * (count != 1)


def _describe_selector(selector: Selector) -> str:
    if isinstance(selector, Prioritized):
        return f"an item with probability ~ priority ** {selector.exponent:g}"
    return _SELECTED_ITEM[selector]
