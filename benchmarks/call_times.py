"""The duration of one call of the observer, as seen by an environment loop."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from benchmarks.actors import Contender, bare_copy, ours, tf_agents
from benchmarks.comparison import Comparison, Effort, progress
from benchmarks.report import Table
from benchmarks.workloads import Workload, small_steps

_INTERVAL_S = 0.001


def call_times(effort: Effort) -> Table:
    """One call, with an environment that takes a step every millisecond, and with one that takes no time."""
    workload = Workload(small_steps())
    contenders = {"ours": ours, "TF-Agents' observer": tf_agents, "a copy alone": bare_copy}
    paces = {"1,000 steps/s": _INTERVAL_S, "as fast as it can": 0.0}
    times: dict[tuple[str, str], list[npt.NDArray[np.float64]]] = {}
    with Comparison() as comparison:
        for name, connect in contenders.items():
            comparison.add(name, Contender, connect, workload)
        for i in range(effort.rounds):
            for pace, interval_s in paces.items():
                num_calls = int(effort.seconds / _INTERVAL_S) * (1 if interval_s else 5)
                for name in contenders:
                    with comparison.turn(name, effort):
                        times.setdefault((name, pace), []).extend(
                            comparison.call(name, "call_times", num_calls, interval_s)
                        )
            progress(f"round {i + 1} of {effort.rounds}")
    rows = []
    for (name, pace), of in times.items():
        micros = np.concatenate(of) * 1e6
        p50, p99 = np.percentile(micros, [50, 99])
        rows.append([f"{name}, {pace}", f"{p50:.1f}", f"{p99:.1f}", f"{micros.max():,.0f}", f"{micros.mean():.1f}"])
    columns = ["", "p50, us", "p99, us", "max, us", "mean, us"]
    note = (
        "As fast as it can means as fast as the server confirms: a call waits while the in-flight window is full. A "
        "copy alone flattens the step and copies its leaves into arrays: no observer can take less."
    )
    return Table("One call of the observer, six small leaves, L=20, S=1", columns, rows, note)
