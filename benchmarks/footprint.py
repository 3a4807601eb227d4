"""The cost of an idle actor: import time, resident memory, installed size."""

from __future__ import annotations

import importlib.metadata
import statistics
import subprocess
import sys
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import reverb_writer
from benchmarks.actors import Contender, ours, tf_agents
from benchmarks.comparison import Comparison, Effort, progress
from benchmarks.report import Table
from benchmarks.workloads import Workload, small_steps

_IMPORTS = {
    "ours": "import reverb_writer; reverb_writer.TrajectoryObserver",
    "TF-Agents": "import reverb; from tf_agents.replay_buffers.reverb_utils import ReverbAddTrajectoryObserver",
}
_TIMED = "import time; start = time.perf_counter(); {}; print(time.perf_counter() - start)"
_REQUIRED = ["< 0.3", "< 80", "< 150"]


def footprint(effort: Effort) -> Table:
    """Import time, memory of a process that writes, and bytes on disk."""
    import_s = {name: statistics.median(times) for name, times in _import_times(effort.rounds).items()}
    rss = _resident_bytes(effort)
    installed = {
        "ours": installed_bytes("reverb-writer") + _source_bytes(),
        "TF-Agents": installed_bytes("tf-agents", "reverb"),
    }
    rows = [
        [name, f"{import_s[name]:.2f}", f"{rss[name] / 1e6:,.0f}", f"{installed[name] / 1e6:,.0f}"] for name in _IMPORTS
    ]
    return Table(
        "An actor at rest",
        ["", "import, s", "resident, MB", "installed, MB"],
        [*rows, ["required of ours", *_REQUIRED]],
        "The import is the statement that brings the observer. Resident is a process that has written, steps included. "
        "Installed is the package and all that it requires, as pip records it.",
    )


def installed_bytes(distribution: str, *extras: str) -> int:
    """Return the size of all files of a distribution and of what it requires here."""
    wanted = [(canonicalize_name(distribution), frozenset(extras))]
    seen: set[tuple[str, frozenset[str]]] = set()
    while wanted:
        wish = wanted.pop()
        if wish in seen:
            continue
        seen.add(wish)
        name, chosen = wish
        for line in importlib.metadata.requires(name) or ():
            requirement = Requirement(line)
            if requirement.marker is None or any(requirement.marker.evaluate({"extra": e}) for e in ("", *chosen)):
                wanted.append((canonicalize_name(requirement.name), frozenset(requirement.extras)))
    files = {
        Path(str(file.locate()))
        for name, _ in seen
        for file in importlib.metadata.files(name) or ()
        if file.size is not None
    }
    return sum(file.stat().st_size for file in files if file.is_file())


def _source_bytes() -> int:
    """Return the size of our own modules, which an editable install does not record."""
    return sum(path.stat().st_size for path in Path(reverb_writer.__file__).parent.rglob("*") if path.is_file())


def _import_times(rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in _IMPORTS}
    for i in range(rounds + 1):
        for name, statement in _IMPORTS.items():
            command = [sys.executable, "-c", _TIMED.format(statement)]
            took = float(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
            if i:  # the first one reads from disk
                times[name].append(took)
                progress(f"round {i} of {rounds}: {name}: import {took:.2f} s")
    return times


def _resident_bytes(effort: Effort) -> dict[str, int]:
    workload = Workload(small_steps())
    resident = {}
    with Comparison() as comparison:
        for name, connect in zip(_IMPORTS, (ours, tf_agents), strict=True):
            comparison.add(name, Contender, connect, workload)
            with comparison.turn(name, effort):
                resident[name] = comparison.rss_bytes(name)
    return resident
