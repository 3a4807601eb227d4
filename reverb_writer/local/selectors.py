"""Choose the next item to sample or to remove: one class per selector of a `TableConfig`.

Items are identified by their row in the table. No class is thread-safe.

Source: Reverb 0.14 (behaviour of its selectors, measured side by side).
"""

from __future__ import annotations

import heapq
import itertools
import math
import sys
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from reverb_writer.local.sum_tree import SumTree
from reverb_writer.tables import Prioritized, Selector

Draws = tuple[npt.NDArray[np.intp], npt.NDArray[np.float64]]
"""Rows, and the probability of each."""

_MAX_WEIGHT = sys.float_info.max / 2**32  # the sum of the weights of 2**31 items is finite
_HEAP_SLACK = 64


class Chooser(ABC):
    """Chooses among rows.

    Attributes:
        is_fifo: whether it chooses the rows in the order of their insertion.
    """

    is_fifo = False

    @abstractmethod
    def insert(self, rows: Sequence[int], priorities: Sequence[float]) -> None:
        """Take new rows."""

    @abstractmethod
    def update(self, row: int, priority: float) -> None:
        """Change the priority of a row."""

    @abstractmethod
    def delete(self, rows: Sequence[int]) -> None:
        """Forget rows."""

    @abstractmethod
    def draw(self, num_draws: int) -> Draws:
        """Choose `num_draws` times among all rows, at least one."""

    def first(self, num_rows: int) -> list[int]:
        """Choose `num_rows` different rows; more than one only if `is_fifo`."""
        rows: list[int] = self.draw(num_rows)[0].tolist()
        return rows

    def refuses(self, priority: float) -> str | None:
        """Return why no item can have this priority; None if an item can have it."""
        return "must not be NaN" if math.isnan(priority) else None


class _Deterministic(Chooser):
    """Chooses the same row until a change."""

    @abstractmethod
    def first(self, num_rows: int) -> list[int]:
        """Return the row."""

    def draw(self, num_draws: int) -> Draws:
        return np.full(num_draws, self.first(1)[0]), np.ones(num_draws)


class _Ordered(_Deterministic):
    """Oldest or newest first; priorities are ignored."""

    def __init__(self, *, newest: bool) -> None:
        self._rows: OrderedDict[int, None] = OrderedDict()  # after deletions, a dict finds its first key slowly
        self.is_fifo = not newest

    def insert(self, rows: Sequence[int], priorities: Sequence[float]) -> None:  # noqa: ARG002
        self._rows.update(dict.fromkeys(rows))

    def update(self, row: int, priority: float) -> None:
        """Do nothing: priorities have no effect."""

    def delete(self, rows: Sequence[int]) -> None:
        for row in rows:
            del self._rows[row]

    def first(self, num_rows: int) -> list[int]:
        return list(itertools.islice(self._rows if self.is_fifo else reversed(self._rows), num_rows))


class _Uniform(Chooser):
    """All rows are equally likely. The last row takes the place of a removed row, so there are no gaps."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self._rows = np.zeros(1024, np.intp)  # only the first ones are valid
        self._places: dict[int, int] = {}

    def insert(self, rows: Sequence[int], priorities: Sequence[float]) -> None:  # noqa: ARG002
        start = len(self._places)
        self._places.update(zip(rows, range(start, start + len(rows)), strict=True))
        if len(self._places) > len(self._rows):
            self._rows = np.concatenate([self._rows, np.zeros(len(self._places), np.intp)])
        self._rows[start : start + len(rows)] = rows

    def update(self, row: int, priority: float) -> None:
        """Do nothing."""

    def delete(self, rows: Sequence[int]) -> None:
        for row in rows:
            place = self._places.pop(row)
            last = int(self._rows[len(self._places)])
            if last != row:
                self._rows[place] = last
                self._places[last] = place

    def draw(self, num_draws: int) -> Draws:
        size = len(self._places)
        return self._rows[self._rng.integers(size, size=num_draws)], np.full(num_draws, 1 / size)


class _Prioritized(Chooser):
    """In proportion to `priority ** exponent`; all rows are equally likely if this is 0 for all."""

    def __init__(self, exponent: float, rng: np.random.Generator) -> None:
        self._exponent, self._rng = exponent, rng
        self._weights = SumTree()
        self._all = _Uniform(rng)

    def insert(self, rows: Sequence[int], priorities: Sequence[float]) -> None:
        self._all.insert(rows, priorities)
        for row, priority in zip(rows, priorities, strict=True):
            self.update(row, priority)

    def update(self, row: int, priority: float) -> None:
        self._weights.set(row, self._weight(priority))

    def delete(self, rows: Sequence[int]) -> None:
        self._all.delete(rows)
        for row in rows:
            self._weights.set(row, 0.0)

    def draw(self, num_draws: int) -> Draws:
        total = self._weights.total
        if not total:
            return self._all.draw(num_draws)
        rows = self._weights.find(self._rng.random(num_draws) * total)
        return rows, self._weights.get(rows) / total

    def refuses(self, priority: float) -> str | None:
        return None if 0 <= priority < math.inf else "must be finite and >= 0 in a prioritized table"

    def _weight(self, priority: float) -> float:
        try:
            return min(priority**self._exponent, _MAX_WEIGHT) if priority else 0.0
        except OverflowError:
            return _MAX_WEIGHT


class _Heap(_Deterministic):
    """The highest or the lowest priority first; among equal priorities, the row that was inserted or updated first."""

    def __init__(self, *, lowest: bool) -> None:
        self._sign = 1.0 if lowest else -1.0
        self._heap: list[tuple[float, int, int]] = []  # may hold entries that are no longer valid
        self._valid: dict[int, tuple[float, int, int]] = {}
        self._count = 0

    def insert(self, rows: Sequence[int], priorities: Sequence[float]) -> None:
        for row, priority in zip(rows, priorities, strict=True):
            self.update(row, priority)

    def update(self, row: int, priority: float) -> None:
        self._count += 1
        entry = self._valid[row] = (self._sign * priority, self._count, row)
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 2 * len(self._valid) + _HEAP_SLACK:
            self._heap = list(self._valid.values())
            heapq.heapify(self._heap)

    def delete(self, rows: Sequence[int]) -> None:
        for row in rows:
            del self._valid[row]

    def first(self, num_rows: int) -> list[int]:  # noqa: ARG002  # one
        while self._valid.get(self._heap[0][2]) is not self._heap[0]:
            heapq.heappop(self._heap)
        return [self._heap[0][2]]


def make_chooser(selector: Selector, rng: np.random.Generator) -> Chooser:
    """Return the chooser of a selector."""
    if isinstance(selector, Prioritized):
        return _Prioritized(selector.exponent, rng)
    if selector == "uniform":
        return _Uniform(rng)
    if selector in ("fifo", "lifo"):
        return _Ordered(newest=selector == "lifo")
    return _Heap(lowest=selector == "min_heap")
