"""Memory over ten million steps."""

from __future__ import annotations

import math

from benchmarks.actors import Contender, Run, ours
from benchmarks.comparison import Comparison, Effort, progress
from benchmarks.report import Table
from benchmarks.workloads import Workload, small_steps

_TABLE_SIZE = 50_000
_LEGS = 10


def endurance(effort: Effort) -> Table:
    """Resident memory of actor and server, ten times on the way."""
    rows = []
    resident = []
    with Comparison() as comparison:
        comparison.add("ours", Contender, ours, Workload(small_steps()))
        with comparison.turn("ours", effort, max_size=_TABLE_SIZE) as server:
            for leg in range(1, _LEGS + 1):
                run: Run = comparison.call("ours", "write", math.inf, effort.num_steps // _LEGS)[0]
                resident.append(comparison.rss_bytes("ours") / 1e6)
                cells = [f"{resident[-1]:.1f}", f"{server.rss_bytes() / 1e6:,.0f}", f"{run.steps_per_s:,.0f}"]
                rows.append([f"{leg * effort.num_steps // _LEGS:,}", *cells])
                progress(f"{rows[-1][0]} steps: {cells[0]} MB")
    return Table(
        f"{effort.num_steps:,} steps, L=20, S=1, a table of {_TABLE_SIZE:,} items",
        ["steps so far", "actor, MB resident", "server, MB resident", "steps/s"],
        rows,
        f"From the second to the last line the actor grew by {resident[-1] - resident[1]:.1f} MB.",
    )
