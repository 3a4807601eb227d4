"""Transitions of trajectories on disk in random order, in batches of one size.

trajectories --whole--> pool [P, ...] --rows drawn without replacement--> batch [B, ...]
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import numpy as np

from reverb_writer.files.trajectory_source import TrajectorySource
from reverb_writer.files.transition_fields import TransitionBatch
from reverb_writer.nests import map_present, write_row


class ShuffledTransitions:
    """Batches of transitions, `TransitionBatch` with leaves [B, ...]; see `RolloutDataset.shuffled`.

    Each iteration is independent and starts again. The caller owns the batches.
    """

    def __init__(self, source: TrajectorySource, batch_size: int, pool_size: int, device: Any) -> None:
        """Set the arguments; an iteration reads files. `RolloutDataset.shuffled` calls this.

        Args:
            source: trajectories of one environment.
            batch_size: B, transitions in a batch, >= 1.
            pool_size: transitions in memory that a batch is drawn from, at least B.
            device: device of the tensors; None for NumPy arrays.
        """
        self._source, self._batch_size, self._device = source, batch_size, device
        self._pool_size = max(pool_size, batch_size)
        self._newest = source  # the reader of the newest iteration

    @property
    def skipped(self) -> dict[str, str]:
        """Unreadable trajectories of the newest iteration: the reason by name."""
        return self._newest.skipped

    @property
    def num_left_out(self) -> int:
        """Number of actions of the newest iteration whose next observation no row holds, so they are no transitions."""
        return self._newest.num_left_out

    def __repr__(self) -> str:
        return f"<ShuffledTransitions in batches of {self._batch_size}>"

    def __iter__(self) -> Iterator[TransitionBatch]:
        """Start again from the beginning."""
        batches = self._batches()
        if self._device is None:
            return batches
        from reverb_writer.reading.views.torch import TensorConverter  # noqa: PLC0415  # brings PyTorch

        return map(TensorConverter(self._device), batches)

    def as_torch(self, device: Any = None) -> Any:
        """Return a `torch.utils.data.IterableDataset` of the batches, as `RolloutDataset.as_torch` does."""
        from reverb_writer.reading.views.torch import TensorConverter, TorchDataset  # noqa: PLC0415  # brings PyTorch

        return TorchDataset(self._open_share, TensorConverter(self._device if device is None else device))

    def _open_share(self, index: int, num_shards: int) -> contextlib.AbstractContextManager[Any]:
        """Return a copy that reads one share of the trajectories, as arrays."""
        source = copy.copy(self._source)
        source.shard(index, num_shards)
        return contextlib.nullcontext(ShuffledTransitions(source, self._batch_size, self._pool_size, None))

    def _batches(self) -> Iterator[TransitionBatch]:
        self._newest = source = copy.copy(self._source)
        source.start()
        goes_on = True
        while goes_on:
            pool, is_last = _Pool(), False
            while len(pool) or not is_last:
                while not is_last and len(pool) < self._pool_size:
                    found = source.take_of_loop()
                    is_last = found is None
                    if found is not None:
                        pool.add(found)
                if len(pool):
                    yield pool.draw(self._batch_size, source.rng)
            goes_on = source.next_loop()


class _Pool:
    """Transitions in memory, without an order."""

    def __init__(self) -> None:
        self._rows: Any = None  # leaves [capacity, ...]
        self._capacity = self._size = 0

    def __len__(self) -> int:
        return self._size

    def add(self, transitions: TransitionBatch) -> None:
        """Copy transitions [T, ...] into the pool."""
        end = self._size + len(transitions.done)
        if end > self._capacity:
            self._capacity = max(end, 2 * self._capacity)
            grown = map_present(lambda leaf: np.empty((self._capacity, *leaf.shape[1:]), leaf.dtype), transitions)
            if self._size:
                write_row(grown, slice(0, self._size), self._taken(slice(0, self._size)))
            self._rows = grown
        write_row(self._rows, slice(self._size, end), transitions)
        self._size = end

    def draw(self, count: int, rng: np.random.Generator) -> TransitionBatch:
        """Remove `count` random transitions, or all, and return them in random order."""
        drawn = rng.choice(self._size, min(count, self._size), replace=False)
        batch: TransitionBatch = self._taken(drawn)
        left = self._size - len(drawn)
        holes = drawn[drawn < left]
        is_free = np.ones(len(drawn), bool)
        is_free[drawn[drawn >= left] - left] = False
        write_row(self._rows, holes, self._taken(left + is_free.nonzero()[0]))
        self._size = left
        return batch

    def _taken(self, at: Any) -> Any:
        return map_present(lambda leaf: leaf[at], self._rows)
