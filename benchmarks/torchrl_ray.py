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
from benchmarks.workloads import EPISODE_LENGTH, frame_steps, small_steps

_LENGTH = 20
_FRAGMENT = 50  # steps that an actor sends at once: `rollout_fragment_length` of APEX in RLlib
_CAPACITY = 5_000  # windows
_NUM_EPISODES = 100  # that a table of whole episodes holds
_EPISODES = "episodes"
_BATCHES = (32, 64, 256)
_BATCH = 64
_AHEAD = 1_024  # samples
_REQUIRED = 5.0
_WHAT = (
    "windows, inserted step by step",
    f"windows, {_FRAGMENT} steps at once",
    f"windows, {2 * EPISODE_LENGTH} steps at once",
    f"whole episodes, {2 * EPISODE_LENGTH} steps at once",
    *(f"windows sampled, {batch_size} in a batch" for batch_size in _BATCHES),
    f"slices of whole episodes sampled, {_BATCH} in a batch",
)
_Steps = dict[str, Any]
_Speeds = dict[str, list[float]]


def torchrl_ray(rounds: int, seconds: float) -> Table:
    """Return the medians of both, by what is in a step."""
    import ray

    ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False, object_store_memory=10**9)
    rows = []
    for name, steps in (("six small leaves", small_steps()), ("84 x 84 frames of Breakout", frame_steps())):
        ours, theirs = _speeds(steps, rounds, seconds)
        for what in _WHAT:
            speeds = statistics.median(ours[what]), statistics.median(theirs[what])
            rows.append([name, what, *(f"{speed:,.0f}" for speed in speeds), *ratio(*speeds, _REQUIRED)])
    return Table(
        f"Beside TorchRL's RayReplayBuffer, windows or slices of {_LENGTH} steps a second; of whole episodes, steps",
        ["a step has", "", "ours", "TorchRL", "times", "asked for"],
        rows,
        "One program writes and reads, the replay is another process. A window begins at every step. Step by step, "
        "ours is an observer's call and theirs an `add` of the window that the step completes; at once, ours is "
        "`extend` of the steps, and theirs of their windows. Whole episodes are an item each here, and there the steps "
        f"for a `SliceSampler`. Ours fetches {_AHEAD:,} samples ahead, into buffers that are used again.",
    )


def _speeds(steps: rw.Trajectory, rounds: int, seconds: float) -> tuple[_Speeds, _Speeds]:
    """Return what both reach in each turn: ours, theirs."""
    with rwr.ReplayCluster.start(
        "beside-torchrl",
        [rw.TableConfig(TABLE, _CAPACITY), rw.TableConfig(_EPISODES, _NUM_EPISODES)],
        python=os.environ["REVERB_WRITER_SERVER_PYTHON"],
        memory_bytes=10**9,
    ) as cluster:
        contenders = _Ours(cluster.target(), steps), _Theirs(steps)
        ours: _Speeds = collections.defaultdict(list)
        theirs: _Speeds = collections.defaultdict(list)
        for _ in range(rounds):
            for speeds, turn in ((ours, contenders[0].turn), (theirs, contenders[1].turn)):
                for what, speed in zip(_WHAT, turn(seconds), strict=True):
                    speeds[what].append(speed)
        contenders[1].close()
    return ours, theirs


class _Ours:
    """Our observers and datasets."""

    def __init__(self, source: rw.shards.TargetSource, steps: rw.Trajectory) -> None:
        self._source, self._steps = source, _concatenated(steps)
        self._each = itertools.cycle(_rows(self._steps))
        self._episodes = _episodes(steps)

    def turn(self, seconds: float) -> list[float]:
        """Return the speeds, in the order of `_WHAT`."""
        source = self._source
        with rw.TrajectoryObserver(source, TABLE, _LENGTH) as observer:
            speeds = [_rate(seconds, 1, lambda: observer(next(self._each), end_of_episode=False), observer.flush)]
            for count in (_FRAGMENT, 2 * EPISODE_LENGTH):
                part = {name: leaf[:count] for name, leaf in self._steps.items()}
                speeds.append(_rate(seconds, count, functools.partial(observer.extend, part), observer.flush))
        with rw.EpisodeObserver(source, _EPISODES, EPISODE_LENGTH) as writer:
            speeds.append(_rate(seconds, 2 * EPISODE_LENGTH, functools.partial(self._write, writer), writer.flush))
        for batch_size in _BATCHES:
            options: dict[str, Any] = {"max_in_flight_batches": _AHEAD // batch_size}
            with rw.ReplayDataset(source, TABLE, batch_size, **options) as windows:
                speeds.append(_rate(seconds, batch_size, functools.partial(next, windows)))
        options = {"max_in_flight_batches": _AHEAD // _BATCH}
        with rw.SliceDataset(source, _EPISODES, _BATCH, _LENGTH, **options) as slices:
            speeds.append(_rate(seconds, _BATCH, functools.partial(next, slices)))
        return speeds

    def _write(self, writer: rw.EpisodeObserver) -> None:
        for steps, last in self._episodes:
            writer.extend(steps)
            writer(last, end_of_episode=True)


class _Theirs:
    """A `RayReplayBuffer` of windows, and one of steps, of which a `SliceSampler` cuts slices."""

    def __init__(self, steps: rw.Trajectory) -> None:
        import torch
        from tensordict import TensorDict
        from torchrl.data import LazyTensorStorage, SliceSampler
        from torchrl.data.replay_buffers import RayReplayBuffer

        leaves = _concatenated(steps)
        starts = np.arange(2 * EPISODE_LENGTH - _LENGTH + 1)[:, None] + np.arange(_LENGTH)
        windows = {name: torch.from_numpy(leaf[starts]) for name, leaf in leaves.items()}
        self._windows = TensorDict(windows, batch_size=[len(starts), _LENGTH])
        self._each = itertools.cycle(self._windows)
        flat: dict[Any, Any] = {name: torch.from_numpy(leaf.copy()) for name, leaf in leaves.items()}
        flat["episode"] = torch.arange(2).repeat_interleave(EPISODE_LENGTH)
        flat["next", "done"] = (flat["step_type"] == flat["step_type"][-1])[:, None]
        self._flat = TensorDict(flat, batch_size=[2 * EPISODE_LENGTH])
        options: dict[str, Any] = {"ray_init_config": {}, "remote_config": {"num_cpus": 1}}
        self._of_windows = RayReplayBuffer(
            storage=functools.partial(LazyTensorStorage, _CAPACITY), batch_size=_BATCH, **options
        )
        self._of_steps = RayReplayBuffer(
            storage=functools.partial(LazyTensorStorage, _NUM_EPISODES * EPISODE_LENGTH),
            sampler=functools.partial(SliceSampler, num_slices=_BATCH, traj_key="episode", strict_length=False),
            batch_size=_BATCH * _LENGTH,
            **options,
        )

    def turn(self, seconds: float) -> list[float]:
        """Return the speeds, in the order of `_WHAT`."""
        windows, steps = self._of_windows, self._of_steps
        speeds = [_rate(seconds, 1, lambda: windows.add(next(self._each)))]
        for count in (_FRAGMENT, len(self._windows)):
            part = self._windows[:count].clone()
            speeds.append(_rate(seconds, count, functools.partial(windows.extend, part)))
        speeds.append(_rate(seconds, len(self._flat), lambda: steps.extend(self._flat)))
        speeds += [_rate(seconds, size, functools.partial(windows.sample, size)) for size in _BATCHES]
        return [*speeds, _rate(seconds, _BATCH, steps.sample)]

    def close(self) -> None:
        """End the processes."""
        self._of_windows.close()
        self._of_steps.close()


def _concatenated(steps: rw.Trajectory) -> _Steps:
    """Return the leaves of all episodes, one episode after the other."""
    return {name: leaf.reshape(-1, *leaf.shape[2:]) for name, leaf in _leaves(steps).items()}


def _episodes(steps: rw.Trajectory) -> list[tuple[_Steps, _Steps]]:
    """Return of each episode all steps but the last one, and the last one."""
    leaves = _leaves(steps)
    return [
        ({name: leaf[at, :-1] for name, leaf in leaves.items()}, {name: leaf[at, -1] for name, leaf in leaves.items()})
        for at in range(len(steps.reward))
    ]


def _rows(steps: _Steps) -> list[_Steps]:
    return [{name: leaf[at] for name, leaf in steps.items()} for at in range(len(steps["reward"]))]


def _leaves(steps: rw.Trajectory) -> _Steps:
    return {name: leaf for name, leaf in steps._asdict().items() if isinstance(leaf, np.ndarray)}


def _rate(seconds: float, count: int, step: Callable[[], Any], end: Callable[[], Any] = lambda: None) -> float:
    """Return how many items a second come of calls with `count` items each, until `end` has returned.

    A quarter as long is called before, in which what is slow the first time is done.
    """
    began = time.perf_counter()
    while time.perf_counter() - began < seconds / 4:
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
