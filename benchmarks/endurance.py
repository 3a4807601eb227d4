"""Memory over ten million steps, and over half an hour of a learner."""

from __future__ import annotations

import math
import time

import numpy as np

import reverb_writer as rw
from benchmarks import actors
from benchmarks.actors import Contender, Run, ours
from benchmarks.comparison import Comparison, Effort, progress
from benchmarks.processes import TABLE, Remote, Server
from benchmarks.report import Table
from benchmarks.workloads import EPISODE_LENGTH, Workload, small_steps

_TABLE_SIZE = 50_000
_LEGS = 10
_LEARNER_LEGS = 30
_STEPS_PER_S = 20_000  # of the actor: the table's items are others after a minute
_CACHE_BYTES = 64 << 20  # of each dataset: they are full after a few minutes


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


def learner_endurance(effort: Effort) -> Table:
    """Resident memory of a learner that reads windows and slices and updates priorities, while an actor writes."""
    leg_s = 60 * effort.minutes / _LEARNER_LEGS
    began_at = time.perf_counter()
    rows = []
    resident = []
    with (
        Server(_TABLE_SIZE, sampler=rw.Prioritized(0.6)) as server,
        Remote(_SteadyActor, server.address) as actor,
        Remote(_Learner, server.address) as learner,
    ):
        for _ in range(_LEARNER_LEGS):
            actor.start("write", leg_s)
            learner.start("read", leg_s)
            num_items, num_batches = actor.result(), learner.result()
            resident.append(learner.rss_bytes() / 1e6)
            cells = [f"{resident[-1]:.1f}", f"{actor.rss_bytes() / 1e6:.1f}", f"{server.rss_bytes() / 1e6:,.0f}"]
            rows.append([f"{(time.perf_counter() - began_at) / 60:.1f}", *cells, f"{num_batches:,}", f"{num_items:,}"])
            progress(" ".join(rows[-1]))
    half = _LEARNER_LEGS // 2
    return Table(
        f"Windows of L=20, S=5, and slices of 8 rows of them, B=256, from a prioritized table of {_TABLE_SIZE:,} items",
        ["minutes", "learner, MB resident", "actor, MB", "server, MB", "batches of each kind", "items written"],
        rows,
        f"Largest of the first half {max(resident[:half]):.1f} MB, of the second {max(resident[half:]):.1f} MB.",
    )


class _SteadyActor:
    """Writes as many steps in each second, whatever the learner does; for `Remote`."""

    def __init__(self, address: str) -> None:
        self._actor = actors.ours(address, Workload(small_steps(), stride_length=5))
        self.write(0.0)  # a learner that is opened finds items

    def write(self, seconds: float) -> int:
        """Write for so long, whole episodes, one at least; return how many items."""
        start = time.perf_counter()
        num_items = num_steps = 0
        while not num_steps or time.perf_counter() - start < seconds:
            num_items += self._actor.write(0.0).items
            num_steps += EPISODE_LENGTH
            time.sleep(max(0.0, start + num_steps / _STEPS_PER_S - time.perf_counter()))
        return num_items

    def close(self) -> None:
        """End."""
        self._actor.close()


class _Learner:
    """Reads windows and slices in turn, and sets priorities of both; for `Remote`."""

    def __init__(self, address: str) -> None:
        self._rng = np.random.default_rng(0)
        self._windows = rw.ReplayDataset(address, TABLE, 256, max_cache_bytes=_CACHE_BYTES)
        self._slices = rw.SliceDataset(
            address, TABLE, num_slices=256, slice_len=8, with_next=True, max_cache_bytes=_CACHE_BYTES
        )

    def read(self, seconds: float) -> int:
        """Read for so long; return how many batches of each kind."""
        end = time.perf_counter() + seconds
        num_batches = 0
        while time.perf_counter() < end:
            for dataset in (self._windows, self._slices):
                batch = next(dataset)
                rw.to_transitions(batch)
                dataset.update_priorities(batch, self._rng.random(len(batch.info)))
            num_batches += 1
        return num_batches

    def close(self) -> None:
        """End."""
        self._windows.close()
        self._slices.close()
