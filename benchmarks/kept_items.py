"""The cost of keeping confirmed items for a restart of the server: throughput, processor time and memory."""

from __future__ import annotations

from benchmarks.actors import Contender, ours
from benchmarks.comparison import Comparison, Effort
from benchmarks.report import Table
from benchmarks.workloads import Workload, frame_steps, small_steps

_BOUNDS = (0, 64 << 20)


def kept_small(effort: Effort) -> Table:
    """Kept items, six small leaves, a window at every step."""
    return _measure("six small leaves, L=20, S=1", Workload(small_steps()), effort)


def kept_frames(effort: Effort) -> Table:
    """Kept items, frames, a window every ten steps."""
    return _measure("84 x 84 frames of Breakout, L=20, S=10", Workload(frame_steps(), stride_length=10), effort)


def _measure(what: str, workload: Workload, effort: Effort) -> Table:
    with Comparison() as comparison:
        for bound in _BOUNDS:
            comparison.add(f"{bound >> 20} MiB", Contender, ours, workload, max_kept_bytes=bound)
        runs = comparison.rounds(effort)
        resident = {name: comparison.rss_bytes(name) / 1e6 for name in runs}
    first = next(iter(runs.values())).steps_per_s
    rows = [
        [
            name,
            f"{run.steps_per_s:,.0f}",
            f"{run.steps_per_s / first:.0%}",
            f"{1e6 * run.cpu_s / run.steps:.2f}",
            f"{1e6 * run.server_cpu_s / run.steps:.2f}",
            f"{resident[name]:.0f}",
        ]
        for name, run in runs.items()
    ]
    columns = [
        "max_kept_bytes",
        "steps/s",
        "of 0 MiB",
        "actor CPU, us/step",
        "server CPU, us/step",
        "actor, MB resident",
    ]
    note = "The server makes no checkpoints, and its table is never full: so the memory is always full."
    return Table(f"Kept items, {what}", columns, rows, note)
