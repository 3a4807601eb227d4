"""How many unconfirmed items keep the server busy: the smallest bound that costs no throughput."""

from __future__ import annotations

from benchmarks.actors import Contender, ours
from benchmarks.comparison import Comparison, Effort
from benchmarks.report import Table
from benchmarks.workloads import Workload, small_steps

_BOUNDS = (400, 1_024, 2_048, 4_096, 8_192, 16_384, 32_768)


def in_flight(effort: Effort) -> Table:
    """Throughput by `max_in_flight_items`."""
    workload = Workload(small_steps())
    with Comparison() as comparison:
        for bound in _BOUNDS:
            comparison.add(str(bound), Contender, ours, workload, max_in_flight_items=bound)
        runs = comparison.rounds(effort)
        resident = {name: comparison.rss_bytes(name) / 1e6 for name in runs}
    best = max(run.steps_per_s for run in runs.values())
    rows = [
        [f"{int(name):,}", f"{run.steps_per_s:,.0f}", f"{run.steps_per_s / best:.0%}", f"{resident[name]:.0f}"]
        for name, run in runs.items()
    ]
    return Table(
        "max_in_flight_items, six small leaves, L=20, S=1",
        ["bound", "steps/s", "of the best", "actor, MB resident"],
        rows,
        "On a network, the bound divided by the round trip time also bounds items/s.",
    )
