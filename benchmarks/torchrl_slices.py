"""TorchRL's `SliceSampler` on a `LazyMemmapStorage`: a program that prints how many slices a second it samples.

    python torchrl_slices.py STEPS.npz NUM_SLICES SLICE_LEN SECONDS

It needs torchrl and nothing of this repository, so it runs in an environment of its own.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np


def main(path: str, num_slices: int, slice_len: int, seconds: float) -> None:
    """Store the steps of the file, one array a leaf, and sample batches of slices."""
    torch, tensordict, data = (__import__(name, fromlist=["*"]) for name in ("torch", "tensordict", "torchrl.data"))
    torch.set_num_threads(1)  # on two cores, more are slower: they wait for each other
    leaves = {name: torch.from_numpy(array) for name, array in np.load(path).items()}
    num_rows = len(leaves["episode"])
    buffer = data.TensorDictReplayBuffer(
        storage=data.LazyMemmapStorage(num_rows),
        # Where trajectories begin and end is computed once: the faster of its two ways, for data that do not change.
        sampler=data.SliceSampler(num_slices=num_slices, traj_key="episode", cache_values=True, strict_length=False),
        batch_size=num_slices * slice_len,
    )
    buffer.extend(tensordict.TensorDict({**leaves, ("next", "done"): leaves["terminated"][:, None]}, [num_rows]))
    _slices_per_s(buffer, num_slices, seconds / 4)
    print(_slices_per_s(buffer, num_slices, seconds))


def _slices_per_s(buffer: Any, num_slices: int, seconds: float) -> float:
    count, start = 0, time.perf_counter()
    while (spent := time.perf_counter() - start) < seconds:
        buffer.sample()
        count += num_slices
    return count / spent


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
