"""The items of a table by row, with their numbers in arrays, so that many items are drawn at once. Not thread-safe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from reverb_writer.local.stored_items import Item
from reverb_writer.protocol.responses import Samples


class ItemRows:
    """Items by row, from row 0 without gaps.

    Attributes:
        items: [capacity] the items; None in rows without an item.
        keys, priorities, times_sampled: [capacity] numbers of the items.
        sample_bytes: [capacity] approximate size of a sample of each item in a response.
    """

    def __init__(self) -> None:
        """Begin without items."""
        self.items: npt.NDArray[Any] = np.empty(1024, object)
        self.keys = np.zeros(1024, np.uint64)
        self.priorities = np.zeros(1024)
        self.times_sampled = np.zeros(1024, np.int32)
        self.sample_bytes = np.zeros(1024, np.int64)

    def place(self, rows: slice, items: Sequence[Item]) -> None:
        """Put items that were never sampled into the next rows."""
        size = len(self.items)
        if rows.stop > size:
            for name, array in vars(self).items():
                longer = np.zeros(max(2 * size, rows.stop), array.dtype)
                longer[:size] = array
                setattr(self, name, longer)
        self.items[rows] = np.fromiter(items, object, len(items))  # an assignment would examine each item for arrays
        self.keys[rows] = [item.key for item in items]
        self.sample_bytes[rows] = [item.shared.sample_bytes for item in items]
        self.times_sampled[rows] = 0

    def remove(self, rows: Sequence[int], moves: Mapping[int, int]) -> list[Item]:
        """Remove and return the items of some rows; afterwards, move others: `moves` has the new row of each."""
        removed, sources, targets = (np.array([*some], np.intp) for some in (rows, moves, moves.values()))
        items: list[Item] = self.items[removed].tolist()
        self.items[removed] = None
        for array in vars(self).values():
            array[targets] = array[sources]
        self.items[sources] = None
        return items

    def draw(self, rows: npt.NDArray[np.intp], probabilities: npt.ArrayLike, table_size: int) -> Samples:
        """Return samples of rows, and count each sample."""
        order = rows.argsort(kind="stable")
        ordered = rows[order]
        earlier = np.arange(len(rows)) - ordered.searchsorted(ordered)  # number of earlier draws of the same row
        times = self.times_sampled[rows] + 1
        times[order] += earlier.astype(np.int32)
        self.times_sampled[rows] = times  # if a row occurs several times, its last count remains
        sizes = np.full(len(rows), table_size)
        return Samples(self.items[rows], self.keys[rows], self.priorities[rows], probabilities, sizes, times)
