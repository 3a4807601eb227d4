"""The cost of one row of a `TrajectoryAccumulator`, compared with the same rules on optree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import reverb_writer as rw
from benchmarks.comparison import Effort
from benchmarks.report import Table, ratio
from benchmarks.turns import in_turn

_CAPACITY = 256
_EXAMPLE = {
    "observation": np.zeros((_CAPACITY, 4), np.float32),
    "action": np.zeros(_CAPACITY, np.int64),
    "reward": np.zeros(_CAPACITY, np.float32),
    "discount": np.zeros(_CAPACITY, np.float32),
    "done": np.zeros(_CAPACITY, bool),
    "log_prob": np.zeros(_CAPACITY, np.float32),
}
_OBSERVATION = np.ones(4, np.float32)
_ROWS = {
    "of the example's dtypes": {
        "observation": _OBSERVATION,
        "action": np.int64(1),
        "reward": np.float32(1),
        "discount": np.float32(1),
        "done": np.bool_(0),
        "log_prob": np.float32(-1),
    },
    "as a Gymnasium loop has them": {
        "observation": _OBSERVATION,
        "action": np.int64(1),
        "reward": 1.0,
        "discount": 1.0,
        "done": False,
        "log_prob": np.float32(-1),
    },
    "Python's numbers and float64": {
        "observation": _OBSERVATION.astype(np.float64),
        "action": 1,
        "reward": 1.0,
        "discount": 1.0,
        "done": False,
        "log_prob": -1.0,
    },
}


class OnOptree:
    """Rows assigned by optree as NumPy assigns, without checks."""

    def __init__(self, example: dict[str, Any]) -> None:
        import optree

        self._assign = optree.tree_map_
        self._columns = {name: optree.tree_map(np.zeros_like, nest) for name, nest in example.items()}
        self._capacities = {name: len(optree.tree_leaves(nest)[0]) for name, nest in example.items()}
        self._counts = dict.fromkeys(example, 0)

    def add(self, name: str, data: Any) -> None:
        if name not in self._counts:
            raise KeyError(name)
        at = self._counts[name]
        if at >= self._capacities[name]:
            raise IndexError(name)
        rows = slice(at, at + 1)

        def assign(column: Any, row: Any) -> Any:
            column[rows] = row
            return column

        self._assign(assign, self._columns[name], data)
        self._counts[name] = at + 1

    def reset(self) -> None:
        self._counts = dict.fromkeys(self._counts, 0)


def accumulator_add(effort: Effort) -> Table:
    """One row of an accumulator, six leaves."""
    works: dict[str, Callable[[int], object]] = {}
    for kind, row in _ROWS.items():
        for name, make in (("ours", rw.TrajectoryAccumulator), ("optree", OnOptree)):
            works[f"{name}, {kind}"] = _filling(make({"step": _EXAMPLE}), row)
    turns = in_turn(works, effort)
    rows = []
    for kind in _ROWS:
        ours, theirs = f"ours, {kind}", f"optree, {kind}"
        rows.append(
            [kind, f"{turns.micros(ours):.2f}", f"{turns.micros(theirs):.2f}", *ratio(turns.times(theirs, ours), 1, 1)]
        )
    note = (
        "CPU time. Ours checks the whole row before it writes any of it, and refuses lossy casts; on optree a row that "
        "does not fit is found half written."
    )
    return Table(
        "`TrajectoryAccumulator.add`, six leaves", ["a row", "ours, us", "optree, us", "times", "asked"], rows, note
    )


def _filling(accumulator: Any, row: Any) -> Callable[[int], None]:
    def fill(num_rows: int) -> None:
        add = accumulator.add
        while num_rows > 0:
            for _ in range(min(num_rows, _CAPACITY)):
                add("step", row)
            num_rows -= _CAPACITY
            accumulator.reset()

    return fill
