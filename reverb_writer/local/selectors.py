"""Choose the next item to sample or to remove: one class per selector of a `TableConfig`.

Items are identified by their row in the table. The rows of a table have no gaps. No class is thread-safe.

Source: Reverb 0.14 (behaviour of its selectors, measured side by side).
"""

from __future__ import annotations

import heapq
import itertools
import math
import sys
from collections import OrderedDict
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from reverb_writer.local.sum_tree import SumTree
from reverb_writer.tables import Prioritized, Selector

Rows = OrderedDict[int, int]
"""The row of each key in a table, in the order of insertion."""

Draws = tuple[npt.NDArray[np.intp], npt.NDArray[np.float64]]
"""Rows, and the probability of each."""

_MAX_WEIGHT = sys.float_info.max / 2**32  # the sum of the weights of 2**31 items is finite
_HEAP_SLACK = 64


class Chooser:
    """Chooses among rows. A subclass has `first` or `draw`, and the other one follows."""

    def set(self, rows: Sequence[int], priorities: Sequence[float]) -> None:
        """Take the priorities of new or known rows."""

    def delete(self, rows: Sequence[int], moves: Mapping[int, int]) -> None:
        """Forget rows; afterwards, the items of other rows have the rows that `moves` gives."""

    def draw(self, num_draws: int) -> Draws:
        """Choose `num_draws` times among all rows, at least one."""
        return np.full(num_draws, self.first(1)[0]), np.ones(num_draws)

    def first(self, num_rows: int) -> list[int]:
        """Choose `num_rows` different rows; more than one only of fifo and lifo."""
        rows: list[int] = self.draw(num_rows)[0].tolist()
        return rows

    def refuses(self, priority: float) -> str | None:
        """Return why no item can have this priority; None if an item can have it."""
        return "must not be NaN" if math.isnan(priority) else None


class _Ordered(Chooser):
    """Oldest or newest first."""

    def __init__(self, rows: Rows, *, newest: bool) -> None:
        self._rows, self._newest = rows, newest

    def first(self, num_rows: int) -> list[int]:
        rows = self._rows.values()
        return list(itertools.islice(reversed(rows) if self._newest else rows, num_rows))


class _Uniform(Chooser):
    """All rows are equally likely."""

    def __init__(self, rows: Rows, rng: np.random.Generator) -> None:
        self._rows, self._rng = rows, rng

    def draw(self, num_draws: int) -> Draws:
        size = len(self._rows)
        return self._rng.integers(size, size=num_draws), np.full(num_draws, 1 / size)


class _Prioritized(_Uniform):
    """In proportion to `priority ** exponent`; all rows are equally likely if this is 0 for all."""

    def __init__(self, exponent: float, rows: Rows, rng: np.random.Generator) -> None:
        super().__init__(rows, rng)
        self._exponent = exponent
        self._weights = SumTree()

    def set(self, rows: Sequence[int], priorities: Sequence[float]) -> None:
        values = np.asarray(priorities, float)
        with np.errstate(over="ignore"):
            weights = np.minimum(values**self._exponent, _MAX_WEIGHT)
        self._weights.set(rows, np.where(values, weights, 0.0))

    def delete(self, rows: Sequence[int], moves: Mapping[int, int]) -> None:
        moved = self._weights.get([*moves])
        self._weights.set([*rows, *moves], 0.0)
        self._weights.set([*moves.values()], moved)

    def draw(self, num_draws: int) -> Draws:
        total = self._weights.total
        if not total:
            return super().draw(num_draws)
        rows = self._weights.find(self._rng.random(num_draws) * total)
        return rows, self._weights.get(rows) / total

    def refuses(self, priority: float) -> str | None:
        return None if 0 <= priority < math.inf else "must be finite and >= 0 in a prioritized table"


class _Heap(Chooser):
    """The highest or the lowest priority first; among equal priorities, the row that was inserted or updated first."""

    def __init__(self, *, lowest: bool) -> None:
        self._sign = 1.0 if lowest else -1.0
        self._heap: list[tuple[float, int, int]] = []  # may hold entries that are no longer valid
        self._valid: dict[int, tuple[float, int, int]] = {}
        self._count = 0

    def set(self, rows: Sequence[int], priorities: Sequence[float]) -> None:
        for row, priority in zip(rows, priorities, strict=True):
            self._count += 1
            self._push((self._sign * priority, self._count, row))

    def delete(self, rows: Sequence[int], moves: Mapping[int, int]) -> None:
        for row in rows:
            del self._valid[row]
        for row, new in moves.items():
            self._push((*self._valid.pop(row)[:2], new))

    def first(self, num_rows: int) -> list[int]:  # noqa: ARG002  # one
        while self._valid.get(self._heap[0][2]) is not self._heap[0]:
            heapq.heappop(self._heap)
        return [self._heap[0][2]]

    def _push(self, entry: tuple[float, int, int]) -> None:
        self._valid[entry[2]] = entry
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 2 * len(self._valid) + _HEAP_SLACK:
            self._heap = list(self._valid.values())
            heapq.heapify(self._heap)


def make_chooser(selector: Selector, rows: Rows, rng: np.random.Generator) -> Chooser:
    """Return the chooser of a selector, for a table with these rows."""
    if isinstance(selector, Prioritized):
        return _Prioritized(selector.exponent, rows, rng)
    if selector == "uniform":
        return _Uniform(rows, rng)
    if selector in ("fifo", "lifo"):
        return _Ordered(rows, newest=selector == "lifo")
    return _Heap(lowest=selector == "min_heap")
