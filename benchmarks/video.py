"""Sequences of 64 images: windows of that length, and slices of whole episodes, in turn on the same rows."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import reverb_writer as rw
from benchmarks.comparison import Effort, progress
from benchmarks.learners import Learner, Reader
from benchmarks.processes import TABLE, Remote, Server
from benchmarks.report import Table
from benchmarks.workloads import atari_frames

_NUM_ROWS, _EPISODE, _LENGTH, _BATCH_SIZE = 4_000, 1_000, 64, 16


def video(effort: Effort) -> Table:
    """Batches of 16 sequences of 64 color images, 64 x 64, read as windows and as slices."""
    frames = atari_frames(_NUM_ROWS)
    images = np.stack([frames[:, top : top + 64, 10:74] for top in (0, 10, 20)], axis=-1)
    contenders: dict[str, tuple[Callable[..., Any], Callable[..., Learner]]] = {
        f"windows, stride {stride}": (functools.partial(_windows, stride=stride), _replay) for stride in (1, 16, 64)
    }
    for number in (1, 8):
        contenders[f"slices, slices_per_item={number}"] = (
            _episodes,
            functools.partial(_slices, slices_per_item=number),
        )
    with Server() as windows_1, Server() as windows_16, Server() as windows_64, Server() as episodes:
        servers = [windows_1, windows_16, windows_64, episodes, episodes]
        for number, (server, (write, _)) in enumerate(zip(servers, contenders.values(), strict=True)):
            if number < len(contenders) - 1:
                write(server.address, images)
        found = [
            [
                _read(server.address, read, effort.seconds)
                for server, (_, read) in zip(servers, contenders.values(), strict=True)
            ]
            for _ in range(effort.rounds)
        ]
    rows = []
    for name, runs in zip(contenders, zip(*found, strict=True), strict=True):
        rows.append([name, f"{statistics.median(runs) / _BATCH_SIZE:,.1f}"])
        progress(" ".join(rows[-1]))
    return Table(
        "16 sequences of 64 images of 64 x 64 x 3",
        ["", "batches/s"],
        rows,
        f"{_NUM_ROWS:,} frames of Breakout in episodes of {_EPISODE:,} steps, on a server in another process.",
    )


def _windows(address: str, images: Any, stride: int) -> None:
    with rw.SequenceObserver(address, TABLE, _LENGTH, stride) as observer:
        _write(observer, images)


def _episodes(address: str, images: Any) -> None:
    with rw.EpisodeObserver(address, TABLE, _EPISODE + 1) as observer:
        _write(observer, images)


def _write(observer: Any, images: Any) -> None:
    for number, image in enumerate(images):
        step = {"observation": image, "action": np.int64(0), "reward": np.float32(0)}
        observer(step, truncated=number % _EPISODE == _EPISODE - 1, final_observation=image)
    observer.flush()


def _read(address: str, connect: Any, seconds: float) -> float:
    with Remote(Reader, connect) as reader:
        return float(reader.call("read", address, seconds).items_per_s)


def _replay(address: str) -> Learner:
    return _learner(rw.ReplayDataset(address, TABLE, _BATCH_SIZE))


def _slices(address: str, slices_per_item: int) -> Learner:
    return _learner(rw.SliceDataset(address, TABLE, _BATCH_SIZE, _LENGTH, slices_per_item=slices_per_item))


def _learner(dataset: Any) -> Learner:
    def counts() -> Iterator[int]:
        for batch in dataset:
            yield len(batch.info)

    return Learner(counts(), dataset.close)
