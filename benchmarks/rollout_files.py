"""Rollout files: written and read, beside `numpy.load` of the same files, and sent to a server beside an observer."""

from __future__ import annotations

import functools
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import reverb_writer as rw
from benchmarks.actors import Actor, Contender, ours
from benchmarks.comparison import Comparison, Effort, progress
from benchmarks.processes import TABLE
from benchmarks.report import Table, ratio
from benchmarks.workloads import EPISODE_LENGTH, Workload, frame_steps, small_steps

_NUM_TRAJECTORIES = 64
_NUM_ENVS = 16
_BATCH_LENGTH = 25


def read_rollouts(effort: Effort) -> Table:
    """Frames a second of CPU time to and from files, beside numpy.load of the same files."""
    rows = []
    for name, steps in (("six small leaves", small_steps()), ("84 x 84 frames", frame_steps())):
        with tempfile.TemporaryDirectory() as folder:
            workload = Workload(steps)
            _write(Path(folder), workload)
            paths = rw.files.list_trajectories(folder)
            rates = _in_turn(
                effort,
                {
                    "RolloutWriter": functools.partial(_write_elsewhere, workload),
                    "numpy.load": functools.partial(_numpy_load, paths),
                    "StoredTrajectory.load": functools.partial(_load, paths),
                    "RolloutDataset": functools.partial(_dataset, Path(folder)),
                },
            )
        for way, rate in rates.items():
            is_ours = way not in ("RolloutWriter", "numpy.load")
            beside = ratio(rate, rates["numpy.load"], 1) if is_ours else ("", "")
            rows.append([f"{name}, {way}", f"{rate:,.0f}", *beside])
    return Table(
        f"{_NUM_TRAJECTORIES} trajectories of {EPISODE_LENGTH} steps on disk",
        ["what, how", "frames/s of CPU time", "x numpy.load", "aim"],
        rows,
        "RolloutWriter writes step by step, the others read the same files, in the page cache. "
        f"RolloutDataset: {_NUM_ENVS} environments, [{_BATCH_LENGTH}, {_NUM_ENVS}, ...] with next observations.",
    )


def import_rollouts(effort: Effort) -> Table:
    """Items a second from files to a server, beside the observer that gets the same steps from memory."""
    rows = []
    for name, workload in (
        ("six small leaves, S=1", Workload(small_steps())),
        ("84 x 84 frames, S=10", Workload(frame_steps(), stride_length=10)),
    ):
        with Comparison() as comparison:
            comparison.add("live", Contender, ours, workload)
            comparison.add("from disk", Contender, from_disk, workload)
            runs = comparison.rounds(effort)
        live, disk = runs["live"], runs["from disk"]
        rows.append(
            [name, f"{live.items_per_s:,.0f}", f"{disk.items_per_s:,.0f}", f"{disk.items_per_s / live.items_per_s:.0%}"]
        )
    return Table("Importing rollouts, L=20", ["work", "live, items/s", "from disk, items/s", "of live"], rows)


def from_disk(address: str, workload: Workload) -> Actor:
    """Return an actor that sends trajectories from disk; a step of it is a trajectory."""
    folder = tempfile.TemporaryDirectory()
    _write(Path(folder.name), workload)
    observer = rw.TrajectoryObserver(address, TABLE, workload.sequence_length, workload.stride_length)

    def close() -> None:
        observer.close()
        folder.cleanup()

    return Actor(
        lambda path: rw.files.send_trajectory(rw.files.StoredTrajectory(path), observer),
        observer.flush,
        close,
        [[path] for path in rw.files.list_trajectories(folder.name)],
        workload.num_windows,
        num_envs=EPISODE_LENGTH,
    )


def _write(folder: Path, workload: Workload) -> None:
    episodes = workload.episodes()
    with rw.files.RolloutWriter(folder) as writer:
        for number in range(_NUM_TRAJECTORIES):
            for step in episodes[number % len(episodes)]:
                writer(step)


def _in_turn(effort: Effort, ways: dict[str, Callable[[], int]]) -> dict[str, float]:
    """Return the median frames a second of CPU time of each way; they take turns."""
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(effort.rounds):
        for name, read in ways.items():
            num_frames, start = 0, time.process_time()
            while time.process_time() - start < effort.seconds / 2:
                num_frames += read()
            rates[name].append(num_frames / (time.process_time() - start))
            progress(f"round {number + 1} of {effort.rounds}: {name}: {rates[name][-1]:,.0f} frames/s")
    return {name: statistics.median(of) for name, of in rates.items()}


def _write_elsewhere(workload: Workload) -> int:
    with tempfile.TemporaryDirectory() as folder:
        _write(Path(folder), workload)
    return _NUM_TRAJECTORIES * EPISODE_LENGTH


def _numpy_load(paths: list[Path]) -> int:
    num_frames = 0
    for path in paths:
        with np.load(path) as arrays:
            num_frames += len({name: arrays[name] for name in arrays.files}["reward"])
    return num_frames


def _load(paths: list[Path]) -> int:
    return sum(len(rw.files.StoredTrajectory(path).load().reward) for path in paths)


def _dataset(folder: Path) -> int:
    dataset = rw.files.RolloutDataset(folder, _NUM_ENVS)
    num_frames = 0
    while True:
        try:
            num_frames += int(dataset.get_batch(_BATCH_LENGTH).mask.sum())
        except StopIteration:
            return num_frames
