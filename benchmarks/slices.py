"""Slices a second: `SliceDataset` from a server, and TorchRL's `SliceSampler` from its own memory, in turn."""

from __future__ import annotations

import functools
import os
import statistics
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import reverb_writer as rw
from benchmarks import learners
from benchmarks.comparison import Effort, progress
from benchmarks.learners import Learner, Reader
from benchmarks.processes import TABLE, Remote, Server
from benchmarks.report import Table
from benchmarks.workloads import atari_frames

_NUM_SLICES = 64
_CASES = [(200, 16), (200, 64), (1_000, 16), (1_000, 64)]  # steps of an episode, rows of a slice
_NUM_ROWS = {"small leaves": 20_000, "84 x 84 frames": 8_000}
_SLICES_PER_ITEM = (1, 8, 32)
_PYTHON = "REVERB_WRITER_TORCHRL_PYTHON"  # an interpreter that has torchrl
_MISSING = "not installed"


def slices(effort: Effort) -> Table:
    """Slices of whole episodes, batches of 64, beside TorchRL on memory-mapped arrays of the same rows."""
    rows = []
    for kind in _NUM_ROWS:
        for episode_length in sorted({length for length, _ in _CASES}):
            steps = _steps(kind, episode_length)
            with Server() as server, tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "steps.npz"
                np.savez(path, **steps)
                _write(server.address, steps, episode_length)
                sent = functools.partial(learners.raw, batch_size=_NUM_SLICES)
                for slice_len in (slice_len for length, slice_len in _CASES if length == episode_length):
                    contenders = [functools.partial(_read, server.address, sent)]
                    contenders += [
                        functools.partial(
                            _read,
                            server.address,
                            functools.partial(_ours, slice_len=slice_len, slices_per_item=slices_per_item),
                        )
                        for slices_per_item in _SLICES_PER_ITEM
                    ]
                    contenders.append(functools.partial(_torchrl, path, slice_len))
                    found = [[contender(effort.seconds) for contender in contenders] for _ in range(effort.rounds)]
                    medians = [statistics.median(runs) for runs in zip(*found, strict=True)]
                    cells = [f"{median:,.0f}" if median else _MISSING for median in medians]
                    rows.append([kind, f"{episode_length:,}", str(slice_len), *cells])
                    progress(" ".join(rows[-1]))
    return Table(
        "Slices of whole episodes, 64 a batch, slices/s",
        [
            "",
            "steps of an episode",
            "rows of a slice",
            "episodes/s that the server can send",
            *(f"ours, slices_per_item={number}" for number in _SLICES_PER_ITEM),
            "TorchRL",
        ],
        rows,
        "Ours reads from a server in another process. TorchRL samples in its own process, from a `LazyMemmapStorage`.",
    )


def _steps(kind: str, episode_length: int) -> dict[str, Any]:
    """Return leaves [N, ...] of episodes that lie end to end."""
    num_rows = _NUM_ROWS[kind]
    rng = np.random.default_rng(0)
    return {
        "observation": atari_frames(num_rows) if "frames" in kind else rng.normal(size=(num_rows, 8)).astype("f4"),
        "action": rng.integers(4, size=num_rows),
        "reward": rng.normal(size=num_rows).astype(np.float32),
        "discount": np.ones(num_rows, np.float32),
        "episode": np.arange(num_rows) // episode_length,
        "terminated": np.arange(num_rows) % episode_length == episode_length - 1,
    }


def _write(address: str, steps: dict[str, Any], episode_length: int) -> None:
    with rw.EpisodeObserver(address, TABLE, episode_length, last_row="action") as observer:
        for row in range(len(steps["episode"])):
            observer({name: leaf[row, ...] for name, leaf in steps.items()})


def _read(address: str, connect: Any, seconds: float) -> float:
    with Remote(Reader, connect) as reader:
        return float(reader.call("read", address, seconds).items_per_s)


def _ours(address: str, slice_len: int, slices_per_item: int) -> Learner:
    dataset = rw.SliceDataset(address, TABLE, _NUM_SLICES, slice_len, slices_per_item=slices_per_item)

    def counts() -> Iterator[int]:
        for batch in dataset:
            yield len(batch.info)

    return Learner(counts(), dataset.close)


def _torchrl(path: Path, slice_len: int, seconds: float) -> float:
    """Return TorchRL's slices a second; 0 if it is not installed."""
    python = os.environ.get(_PYTHON)
    if not python:
        return 0.0
    program = Path(__file__).with_name("torchrl_slices.py")
    command = [python, str(program), str(path), str(_NUM_SLICES), str(slice_len), str(seconds)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return float(output.splitlines()[-1])  # it logs, too
