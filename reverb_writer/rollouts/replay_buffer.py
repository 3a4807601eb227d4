"""A ring buffer of pairs of consecutive states."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import tree

from reverb_writer.arguments import integer
from reverb_writer.errors import IncompleteError
from reverb_writer.nests import common_length
from reverb_writer.rollouts.array_nests import Arrays, row_shapes


class ReplayBuffer:
    """A ring buffer of pairs (state, next state), without actions and rewards; new pairs replace the oldest.

    Not thread-safe.

    Attributes:
        states: leaves [size, ...].
        next_states: leaves [size, ...]; row i follows row i of `states`.
        buffer_size: maximum number of pairs.
        num_samples: number of pairs.
        step: row of the next pair.
        device: device of PyTorch tensors; None for NumPy.

    Source: instinct_rl's `ReplayBuffer`.

    >>> buffer = ReplayBuffer(obs_dim=1, buffer_size=5)
    >>> for states in (np.array([[0.0], [1.0], [2.0]]), np.array([[3.0], [4.0], [5.0]])):
    ...     buffer.insert(states, states)
    >>> buffer.states.ravel().tolist(), buffer.step, buffer.num_samples
    ([5.0, 1.0, 2.0, 3.0, 4.0], 1, 5)
    """

    def __init__(self, obs_dim: Any, buffer_size: int, device: Any = None, *, seed: int | None = None) -> None:
        """Allocate the ring.

        Args:
            obs_dim: shape of a state: an int, a shape, something with `shape` and `dtype`, or a nest of these.
            buffer_size: maximum number of pairs, >= 1.
            device: device of PyTorch tensors; None for NumPy arrays.
            seed: seed of the samples; None for a random one.

        Raises:
            SpecError: an argument is invalid, or PyTorch is not installed.
        """
        self.buffer_size = integer("buffer_size", buffer_size, minimum=1)
        self._shapes = row_shapes("obs_dim", obs_dim)
        self._arrays = Arrays(device)
        self._rng = np.random.default_rng(seed)
        self.states, self.next_states = (self._arrays.columns(self._shapes, (self.buffer_size,)) for _ in range(2))
        self.device = device
        self.step = 0
        self.num_samples = 0

    def __repr__(self) -> str:
        return f"<ReplayBuffer of {self.num_samples} pairs of states, at most {self.buffer_size}>"

    def insert(self, states: Any, next_states: Any) -> None:
        """Copy pairs, leaves [m, ...], into the ring, which keeps the last `buffer_size` pairs.

        Raises:
            StructureError: a structure, shape or number of rows differs. Nothing has changed.
        """
        num_rows = common_length(states, "`states`")
        pairs = [
            (self.states, self._arrays.conform("states", states, self._shapes, num_rows)),
            (self.next_states, self._arrays.conform("next_states", next_states, self._shapes, num_rows)),
        ]
        num_kept = min(num_rows, self.buffer_size)
        slots = self._arrays.asarray((self.step + np.arange(num_rows - num_kept, num_rows)) % self.buffer_size)
        for ring, rows in pairs:
            for column, leaf in zip(tree.flatten(ring), tree.flatten(rows), strict=True):
                column[slots] = leaf[num_rows - num_kept :]
        self.num_samples = min(self.buffer_size, self.num_samples + num_rows)
        self.step = (self.step + num_rows) % self.buffer_size

    def feed_forward_generator(self, num_mini_batch: int, mini_batch_size: int) -> Iterator[tuple[Any, Any]]:
        """Yield `num_mini_batch` pairs of states and next states, each with `mini_batch_size` rows.

        Rows are copied, and drawn uniformly with replacement.

        Raises:
            IncompleteError: the buffer is empty.
            SpecError: a number is out of range.
        """
        num_mini_batch = integer("num_mini_batch", num_mini_batch, minimum=0)
        mini_batch_size = integer("mini_batch_size", mini_batch_size, minimum=1)
        if not self.num_samples:
            raise IncompleteError("the buffer is empty. Call `insert` first.")
        draws = (self._rng.integers(self.num_samples, size=mini_batch_size) for _ in range(num_mini_batch))
        take = self._arrays.take
        return ((take(self.states, rows), take(self.next_states, rows)) for rows in map(self._arrays.asarray, draws))
