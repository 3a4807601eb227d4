"""One environment through one observer: steps a second until the server has confirmed all items."""

from __future__ import annotations

import time
from collections.abc import Mapping

import cramjam
import numpy as np

from benchmarks.actors import Contender, Run, ours, structured, tf_agents
from benchmarks.comparison import Comparison, Effort, progress
from benchmarks.report import Table, ratio
from benchmarks.workloads import Workload, frame_steps, small_steps
from reverb_writer import Trajectory

_DEEP, _DEPTH = "ours, 16,384 in flight", 16_384
_TF_AGENTS, _STRUCTURED = "TF-Agents' observer", "Reverb's StructuredWriter"


def write_small(effort: Effort) -> Table:
    """Six small leaves, a window at every step."""
    runs = _race(Workload(small_steps()), effort)
    return _table("Six small leaves, L=20, S=1", runs, {_TF_AGENTS: 20, _STRUCTURED: 8})


def write_small_strided(effort: Effort) -> Table:
    """Six small leaves, a window every ten steps."""
    runs = _race(Workload(small_steps(), stride_length=10), effort)
    return _table("Six small leaves, L=20, S=10", runs, {_TF_AGENTS: 10, _STRUCTURED: 2})


def write_frames(effort: Effort) -> Table:
    """Frames of a real Atari game, a window every ten steps."""
    steps = frame_steps()
    runs = _race(Workload(steps, stride_length=10), effort)
    frame_bytes = steps.observation[0, 0].nbytes
    ours_mb_s = runs["ours"].steps_per_s * frame_bytes / 1e6
    note = (
        f"{frame_bytes} bytes a frame: ours writes {ours_mb_s:,.0f} MB/s of frames. Snappy alone compresses the same "
        f"frames, ten at a time, at {_snappy_mb_s(steps, effort):,.0f} MB/s on one core."
    )
    return _table("84 x 84 frames of Breakout, L=20, S=10", runs, {_TF_AGENTS: 7, _STRUCTURED: 2}, note)


def _race(workload: Workload, effort: Effort) -> dict[str, Run]:
    with Comparison() as comparison:
        comparison.add("ours", Contender, ours, workload)
        comparison.add(_DEEP, Contender, ours, workload, max_in_flight_items=_DEPTH)
        comparison.add(_TF_AGENTS, Contender, tf_agents, workload)
        comparison.add(_STRUCTURED, Contender, structured, workload)
        return comparison.rounds(effort)


def _table(title: str, runs: Mapping[str, Run], required: Mapping[str, float], note: str = "") -> Table:
    rows = []
    for name, run in runs.items():
        times = ratio(runs[_DEEP].steps_per_s, run.steps_per_s, required[name]) if name in required else ("", "")
        cpu, server_cpu = (f"{1e6 * seconds / run.steps:.2f}" for seconds in (run.cpu_s, run.server_cpu_s))
        rows.append([name, f"{run.steps_per_s:,.0f}", f"{run.items_per_s:,.0f}", cpu, server_cpu, *times])
    columns = [
        "",
        "steps/s",
        "items/s",
        "actor CPU, us/step",
        "server CPU, us/step",
        "16,384 in flight is x times",
        "required",
    ]
    return Table(title, columns, rows, note)


def _snappy_mb_s(steps: Trajectory, effort: Effort) -> float:
    """Return how many MB of frames a second cramjam's snappy compresses, in chunks of ten frames."""
    chunks = steps.observation.reshape(-1, 10, *steps.observation.shape[2:])
    rates = []
    for _ in range(effort.rounds):
        start, num_bytes = time.perf_counter(), 0
        while time.perf_counter() - start < effort.seconds / 4:
            for chunk in chunks:
                cramjam.snappy.compress_raw(chunk)
            num_bytes += chunks.nbytes
        rates.append(num_bytes / (time.perf_counter() - start) / 1e6)
        progress(f"snappy alone: {rates[-1]:,.0f} MB/s")
    return float(np.median(rates))
