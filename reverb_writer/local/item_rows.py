"""The items of a table by row, with their numbers in arrays, so that many are drawn at once. Not thread-safe."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from reverb_writer.local.stored_items import Item
from reverb_writer.protocol.responses import Samples


class ItemRows:
    """Items by row.

    Attributes:
        items: [capacity] the items; None where there is none.
        keys, priorities, times_sampled: [capacity], of the items.
        sample_bytes: [capacity], that a sample of each takes in a response, about.
    """

    def __init__(self) -> None:
        """Begin without items."""
        self.items: npt.NDArray[Any] = np.empty(1024, object)
        self.keys = np.zeros(1024, np.uint64)
        self.priorities = np.zeros(1024)
        self.times_sampled = np.zeros(1024, np.int32)
        self.sample_bytes = np.zeros(1024, np.int64)

    def place(self, row: int, item: Item, times_sampled: int) -> None:
        """Put an item into a row that has none, at most one after the last."""
        if row == len(self.items):
            for name, array in vars(self).items():
                setattr(self, name, np.concatenate([array, np.empty_like(array)]))
        self.items[row] = item
        self.keys[row], self.priorities[row], self.times_sampled[row] = item.key, item.priority, times_sampled
        self.sample_bytes[row] = item.sample_bytes

    def draw(self, rows: npt.NDArray[np.intp], probabilities: npt.ArrayLike, table_size: int) -> Samples:
        """Return samples of rows, each of which counts, and have the next ones know."""
        before = self.times_sampled[rows]
        np.add.at(self.times_sampled, rows, 1)
        times = self.times_sampled[rows]
        counted: dict[int, int] = {}
        for number in (times - before > 1).nonzero()[0].tolist():  # of a row that was drawn several times
            row = int(rows[number])
            times[number] = counted[row] = counted.get(row, int(before[number])) + 1
        sizes = np.full(len(rows), table_size)
        return Samples(self.items[rows], self.keys[rows], self.priorities[rows], probabilities, sizes, times)
