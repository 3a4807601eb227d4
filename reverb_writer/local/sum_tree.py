"""Weights of rows, and draws of rows in proportion to them, in O(log n) for each draw and each change.

                     total
              +--------+--------+          node i has the children 2i and 2i + 1
           left sum          right sum     row r is the leaf `capacity + r`
          +---+---+         +---+---+
        row 0   row 1     row 2   row 3

A change writes its leaf. Before the next draw, the sums above changed leaves are computed again, one level at a time. A
sum is always the sum of its two children, so rounding errors do not accumulate.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


class SumTree:
    """A binary tree of sums over the weights of rows. Not thread-safe."""

    def __init__(self) -> None:
        """Begin without weights."""
        self._capacity = 1024
        self._nodes = np.zeros(2 * self._capacity)
        self._changed: set[int] = set()

    def set(self, rows: Sequence[int], weights: npt.ArrayLike) -> None:
        """Set the weights of rows, finite and >= 0; a row of weight 0 is never drawn."""
        if max(rows, default=0) >= self._capacity:
            self._grow(max(rows) + 1)
        leaves = [self._capacity + row for row in rows]
        self._nodes[leaves] = weights
        self._changed.update(leaves)

    def get(self, rows: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """Return the weights of rows that were set."""
        weights: npt.NDArray[np.float64] = self._nodes[self._capacity + np.asarray(rows, np.int64)]
        return weights

    @property
    def total(self) -> float:
        """The sum of all weights."""
        self._update()
        return float(self._nodes[1])

    def find(self, points: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
        """Return, for each point, the row whose share of the total contains it.

        Args:
            points: [n], each >= 0 and < `total`, which must be > 0.

        Returns:
            [n] rows of a weight > 0, even if the points are rounded.
        """
        self._update()
        nodes = self._nodes
        at = np.ones(len(points), np.int64)
        rest = points.copy()
        while at[0] < self._capacity:
            at *= 2
            left = nodes[at]
            goes_right = (rest >= left) & (nodes[at + 1] > 0)
            rest -= np.where(goes_right, left, 0.0)
            at += goes_right
        return at - self._capacity

    def _update(self) -> None:
        if not self._changed:
            return
        nodes = self._nodes
        at = np.fromiter(self._changed, np.int64, len(self._changed))
        self._changed.clear()
        while at[0] > 1:
            at = at // 2 if len(at) < 2 else np.unique(at // 2)  # noqa: PLR2004  # one row has no duplicates
            nodes[at] = nodes[2 * at] + nodes[2 * at + 1]

    def _grow(self, num_rows: int) -> None:
        leaves = self._nodes[self._capacity :]
        while self._capacity < num_rows:
            self._capacity *= 2
        self._nodes = np.zeros(2 * self._capacity)
        self._nodes[self._capacity : self._capacity + len(leaves)] = leaves
        self._changed = {int(leaf) + self._capacity for leaf in np.flatnonzero(leaves)}
