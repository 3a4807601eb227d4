"""Results as Markdown: tables that read well in a terminal too, and the machine."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

_PACKAGES = (
    "reverb-writer",
    "numpy",
    "grpcio",
    "protobuf",
    "cramjam",
    "dm-reverb",
    "tf-agents",
    "tensorflow",
    "ray",
    "torch",
)


@dataclass(frozen=True)
class Table:
    """The result of one benchmark.

    Attributes:
        title: what was measured.
        columns: their heads; the first names the row.
        rows: text, one a column.
        note: what must be known to read it.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""

    def markdown(self) -> str:
        """Return it as Markdown."""
        lines = [self.columns, *self.rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
        table = "\n".join(_line(cells, widths) for cells in (self.columns, rule, *self.rows))
        return "\n\n".join(part for part in (f"### {self.title}", table, self.note) if part)


def ratio(ours: float, theirs: float, at_least: float) -> tuple[str, str]:
    """Return how many times ours is theirs, and what was asked for, with a word if it was not reached."""
    times = ours / theirs
    return f"{times:.1f}", f">= {at_least:g}" if times >= at_least else f">= {at_least:g}: missed"


def machine() -> str:
    """Return a description of the machine."""
    memory = psutil.virtual_memory().total / 2**30
    cores = f"{len(os.sched_getaffinity(0))} of {os.cpu_count()} cores ({_cpu_model()})"
    versions = ", ".join(f"{name} {version}" for name in _PACKAGES if (version := _version(name)))
    load = os.getloadavg()[0]
    return f"{cores}, {memory:.0f} GiB, load {load:.1f} at the start. CPython {platform.python_version()}, {versions}."


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *rest = (
        cell.ljust(width) if i == 0 else cell.rjust(width)
        for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )
    return f"| {' | '.join([first, *rest])} |"


def _cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
