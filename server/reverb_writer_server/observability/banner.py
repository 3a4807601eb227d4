"""What a server says of itself when it starts, and once a minute."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import metadata

from reverb_writer_server.config.schema import ServedTable, ServerConfig
from reverb_writer_server.observability.describe import bytes_in_words, describe
from reverb_writer_server.observability.memory import Estimate, available_bytes, estimate, used_bytes
from reverb_writer_server.observability.state import State

__all__ = ["figures_line", "memory_lines", "table_lines", "versions_line"]


def versions_line() -> str:
    """Return which versions run."""
    names = ("reverb-writer-server", "dm-reverb", "tensorflow")
    return ", ".join(f"{name} {_version(name)}" for name in names)


def table_lines(tables: Sequence[ServedTable]) -> Iterator[str]:
    """Yield each table in sentences, and what may surprise about it."""
    for table in tables:
        yield f"table `{table.config.name}`:"
        for sentence in describe(table.config):
            yield f"  {sentence}"
        if table.config.signature is not None:
            yield f"  signature: {table.config.signature}"
        for sentence in table.advice:
            yield f"  note: {sentence}"


def memory_lines(config: ServerConfig) -> tuple[list[str], bool]:
    """Return the memory that the tables need, about, against what there is, and whether it is more."""
    estimates = [estimate(table) for table in config.tables]
    available = available_bytes()
    lines = [f"memory of table `{one.table}`: {_needs(one)}" for one in estimates]
    total = sum(one.total_bytes or 0 for one in estimates)
    excess = total > available
    if not any(one.total_bytes for one in estimates):
        return [*lines, f"memory in all: unknown, of {bytes_in_words(available)}"], False
    which = "" if _all_known(estimates) else " for the tables that are known"
    verdict = ": more than there is. Lower max_size or raise the limit" if excess else ""
    lines.append(f"memory in all: about {bytes_in_words(total)}{which}, of {bytes_in_words(available)}{verdict}")
    return lines, excess


def figures_line(state: State, since_s: float) -> str:
    """Return one line that says how it goes."""
    assert state.monitor is not None  # noqa: S101  # the service asks when it serves
    view, rates = state.monitor.latest(), state.monitor.rates(since_s)
    parts = []
    for name, table in view.tables.items():
        inserts, samples = rates[name]
        size = f"{table.current_size:,}/{table.max_size:,}"
        parts.append(f"{name} {size} +{inserts:,.0f}/s -{samples:,.0f}/s")
    memory = f"memory {bytes_in_words(used_bytes(state.processes))} of {bytes_in_words(available_bytes())}"
    return "; ".join([*parts, memory, *(str(one) for one in view.standstills)])


def _needs(one: Estimate) -> str:
    if one.total_bytes is None:
        missing = "sequence_length" if one.steps is None else "signature"
        return f"unknown, give it a {missing}"
    apart = ""
    if one.apart_bytes != one.total_bytes and one.apart_bytes is not None:
        apart = f"; {bytes_in_words(one.apart_bytes)} if no items overlap, as with short episodes"
    size = f"{one.steps:,} steps of {one.step_bytes:,} bytes before compression"
    return f"about {bytes_in_words(one.total_bytes)} ({size}){apart}"


def _all_known(estimates: Sequence[Estimate]) -> bool:
    return all(one.total_bytes is not None for one in estimates)


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "(not installed)"
