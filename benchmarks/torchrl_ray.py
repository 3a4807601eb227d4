"""Beside TorchRL's `RayReplayBuffer`: windows of 20 steps inserted and sampled a second, small leaves and frames.

Each serves one program from a process of its own on the same machine, in turns. Ours is a cluster of one shard on the
same Ray. It needs torchrl, ale-py, Ray, and REVERB_WRITER_SERVER_PYTHON: `python -m benchmarks.torchrl_ray`.
"""

from __future__ import annotations

import argparse
import collections
import functools
import itertools
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import reverb_writer as rw
import reverb_writer.ray as rwr
from benchmarks.processes import TABLE
from benchmarks.report import Table, machine, ratio
from benchmarks.workloads import frame_steps, small_steps

_LENGTH = 20
_CAPACITY = 5_000
_BATCH = 64
_REQUIRED = 5.0
_Steps = dict[str, Any]


def torchrl_ray(rounds: int, seconds: float) -> Table:
    """Return the medians of both, by what is in a step."""
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=10**9)
    rows = []
    for name, steps in (("six small leaves", small_steps()), ("84 x 84 frames of Breakout", frame_steps())):
        speeds = _speeds(_concatenated(steps), rounds, seconds)
        for what in ("inserted step by step", "inserted at once", "sampled"):
            ours, theirs = (statistics.median(speeds[f"{who} {what}"]) for who in ("ours", "theirs"))
            rows.append([name, what, f"{ours:,.0f}", f"{theirs:,.0f}", *ratio(ours, theirs, _REQUIRED)])
    return Table(
        f"Beside TorchRL's RayReplayBuffer, windows of {_LENGTH} steps a second",
        ["a step has", "windows are", "ours", "TorchRL", "times", "asked for"],
        rows,
        "One program writes and reads, the replay is another process. A window begins at every step. Step by step, "
        "ours is an observer's call and theirs an `add` of the window that the step completes; at once, ours is "
        f"`extend` of many steps, and theirs of as many windows. Batches have {_BATCH} windows, ours fetched ahead, "
        "into buffers that are used again.",
    )


def _concatenated(steps: rw.Trajectory) -> _Steps:
    """Return the leaves of all episodes, one episode after the other."""
    fields = steps._asdict().items()
    return {name: leaf.reshape(-1, *leaf.shape[2:]) for name, leaf in fields if isinstance(leaf, np.ndarray)}


def _speeds(steps: _Steps, rounds: int, seconds: float) -> dict[str, list[float]]:
    import torch
    from tensordict import TensorDict
    from torchrl.data import LazyTensorStorage
    from torchrl.data.replay_buffers import RayReplayBuffer

    count = len(steps["reward"])
    theirs = RayReplayBuffer(
        storage=functools.partial(LazyTensorStorage, _CAPACITY),
        batch_size=_BATCH,
        ray_init_config={},
        remote_config={"num_cpus": 1},
    )
    starts = np.arange(count - _LENGTH + 1)[:, None] + np.arange(_LENGTH)
    windows = TensorDict(
        {name: torch.from_numpy(leaf[starts]) for name, leaf in steps.items()}, batch_size=[len(starts), _LENGTH]
    )
    each = [{name: leaf[at] for name, leaf in steps.items()} for at in range(count)]
    speeds: dict[str, list[float]] = collections.defaultdict(list)
    with rwr.ReplayCluster.start(
        "beside-torchrl",
        [rw.TableConfig(TABLE, _CAPACITY)],
        python=os.environ["REVERB_WRITER_SERVER_PYTHON"],
        memory_bytes=10**9,
        bind="127.0.0.1",
    ) as cluster:
        source = cluster.target()
        one, step = itertools.cycle(windows), itertools.cycle(each)
        for _ in range(rounds):
            speeds["theirs inserted step by step"].append(_rate(seconds, 1, lambda: theirs.add(next(one))))
            speeds["theirs inserted at once"].append(_rate(seconds, len(windows), lambda: theirs.extend(windows)))
            speeds["theirs sampled"].append(_rate(seconds, _BATCH, theirs.sample))
            with rw.TrajectoryObserver(source, TABLE, _LENGTH) as observer:
                speeds["ours inserted step by step"].append(
                    _rate(seconds, 1, lambda: observer(next(step), end_of_episode=False), observer.flush)
                )
                speeds["ours inserted at once"].append(
                    _rate(seconds, count, lambda: observer.extend(steps), observer.flush)
                )
            with rw.ReplayDataset(source, TABLE, _BATCH, reuse_buffers=True) as dataset:
                speeds["ours sampled"].append(_rate(seconds, _BATCH, lambda: next(dataset)))
    theirs.close()
    return speeds


def _rate(seconds: float, count: int, step: Callable[[], Any], end: Callable[[], Any] = lambda: None) -> float:
    """Return how many items a second come of calls with `count` items each, until `end` has returned."""
    step()
    end()
    began, done = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        step()
        done += count
    end()
    return done / (time.perf_counter() - began)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0)
    given = parser.parse_args()
    print(torchrl_ray(given.rounds, given.seconds).markdown(), machine(), sep="\n\n")
