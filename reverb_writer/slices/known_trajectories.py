"""Where trajectories of items begin and end, by item: the markers of an item are read once, not each time."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from reverb_writer.slices.boundaries import Trajectories, find_trajectories, positions
from reverb_writer.slices.markers import Integers, Markers, read_markers

_MAX_BYTES = 32 << 20
_ENTRY_BYTES, _INT_BYTES = 200, 40


class KnownTrajectories:
    """Lengths of the trajectories of items, with a memory limit. Not thread-safe.

    >>> known = KnownTrajectories()
    >>> steps = {"done": np.array([0, 1, 0, 0, 0])}
    >>> trajectories, item_of = known.find([b"a", b"b"], np.array([3, 2]), lambda rows: {"done": steps["done"][rows]})
    >>> trajectories.lengths.tolist(), item_of.tolist()
    ([2, 1, 2], [0, 0, 1])
    """

    def __init__(self) -> None:
        """Start without items."""
        self._lengths_of: dict[bytes, tuple[int, ...]] = {}
        self._num_bytes = 0

    def find(
        self, items: Sequence[bytes] | None, lengths: Integers, read: Callable[[Integers], Any]
    ) -> tuple[Trajectories, Integers]:
        """Return the trajectories of items that lie end to end, and the number of the item of each.

        Args:
            items: what identifies each item; None to read the markers of all.
            lengths: [n] rows of each item, >= 1.
            read: gets numbers of rows, and returns the leaves of these rows that `read_markers` needs.
        """
        found: list[tuple[int, ...] | None]
        found = [None] * len(lengths) if items is None else [self._lengths_of.get(item) for item in items]
        missing = [number for number, of_item in enumerate(found) if of_item is None]
        if missing:
            of_missing = lengths[missing]
            first_rows = (np.cumsum(lengths) - lengths)[missing]
            nest = read(np.repeat(first_rows, of_missing) + positions(of_missing))
            for number, of_item in zip(missing, _divide(nest, of_missing), strict=True):
                found[number] = of_item
                if items is not None:
                    self._remember(items[number], of_item)
        of_items = [of_item for of_item in found if of_item is not None]
        counts = list(map(len, of_items))
        flat = np.fromiter(itertools.chain.from_iterable(of_items), np.int64, sum(counts))
        stops = flat.cumsum()
        trajectories = Trajectories(stops - flat, flat, np.zeros_like(flat), (int(stops[-1]),))
        return trajectories, np.arange(len(counts)).repeat(counts)

    def _remember(self, item: bytes, lengths: tuple[int, ...]) -> None:
        num_bytes = _ENTRY_BYTES + len(item) + _INT_BYTES * len(lengths)
        if self._num_bytes + num_bytes > _MAX_BYTES:
            self._lengths_of.clear()
            self._num_bytes = 0
        self._num_bytes += num_bytes
        self._lengths_of[item] = lengths


def _divide(nest: Any, lengths: Integers) -> list[tuple[int, ...]]:
    """Return the lengths of the trajectories of each item, for items of these lengths that lie end to end."""
    ends = np.cumsum(lengths)
    stored = read_markers(nest, starts=ends - lengths)
    starts = np.zeros(ends[-1], bool)
    starts[ends - lengths] = True
    is_init = starts if stored.is_init is None else starts | stored.is_init
    marked = Markers(is_init, stored.done, stored.terminated, stored.truncated, stored.traj_ids)
    trajectories = find_trajectories(marked)
    cuts = np.searchsorted(trajectories.starts, ends).tolist()
    of_all = trajectories.lengths.tolist()
    return [tuple(of_all[first:stop]) for first, stop in itertools.pairwise([0, *cuts])]
