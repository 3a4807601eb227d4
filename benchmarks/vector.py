"""64 environments that step together: one observer of ours, 64 of TF-Agents."""

from __future__ import annotations

from benchmarks.actors import Contender, ours_vector, tf_agents_vector
from benchmarks.comparison import Comparison, Effort
from benchmarks.report import Table, ratio
from benchmarks.workloads import Workload, small_steps

_NUM_ENVS = 64


def write_vector(effort: Effort) -> Table:
    """64 environments of six small leaves, a window at every step."""
    workload = Workload(small_steps())
    with Comparison() as comparison:
        comparison.add("one observer", Contender, ours_vector, workload, num_envs=_NUM_ENVS)
        comparison.add("64 TF-Agents observers", Contender, tf_agents_vector, workload, num_envs=_NUM_ENVS)
        runs = comparison.rounds(effort)
    one, many = runs.values()
    rows = []
    for name, run in runs.items():
        times = ratio(one.steps_per_s, many.steps_per_s, 20) if run is many else ("", "")
        rows.append([name, f"{run.steps_per_s:,.0f}", f"{1e6 * run.cpu_s / run.steps:.2f}", *times])
    return Table(
        f"{_NUM_ENVS} environments, six small leaves, L=20, S=1",
        ["", "environment steps/s", "actor CPU, us/step", "ours is x times", "required"],
        rows,
        "TF-Agents' observers get their steps ready made; ours takes the batch as the environments give it.",
    )
