"""Find the first and last rows of trajectories from the kinds of rows: integers only.

A storage is a ring of T time steps per environment: [T, B, ...] for B environments, [N] for one.

    row t is the last of its trajectory if it is LAST, or row t + 1 is FIRST, or only one of both rows is PADDING

Rows of padding belong to no trajectory. After the last row of an environment comes its first row, as in a full ring.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from reverb_writer import rows as of_rows
from reverb_writer.arguments import integer
from reverb_writer.errors import IncompleteError, SpecError, StructureError
from reverb_writer.slices.axes import Flags, Integers, Kinds

_MAX_BYTES = 32 << 20
_ENTRY_BYTES, _INT_BYTES = 200, 40


@dataclass(frozen=True)
class Trajectories:
    """The rows of each trajectory in a storage. Immutable; safe to share between threads.

    Attributes:
        starts: [n] first time step of each trajectory.
        lengths: [n] rows of each trajectory, >= 1; after the last time step, it continues at time step 0.
        env_ids: [n] environment of each trajectory.
        begins_episode: [n] whether the trajectory is known to begin with the first row of an episode.
        storage_shape: (N,), or (T, ...) of a storage of several environments.
    """

    starts: Integers
    lengths: Integers
    env_ids: Integers
    begins_episode: Flags
    storage_shape: tuple[int, ...]

    @classmethod
    def from_lengths(cls, lengths: Sequence[int] | npt.NDArray[np.integer]) -> Trajectories:  # type: ignore[type-arg]
        """Return trajectories of these lengths that lie end to end, as in a batch of whole episodes.

        Raises:
            StructureError: the list is empty, or a length is not an integer >= 1.

        >>> Trajectories.from_lengths([3, 6, 2]).starts.tolist()
        [0, 3, 9]
        """
        found = np.asarray(lengths)
        if found.ndim != 1 or not found.size or found.dtype.kind not in "iu" or found.min() < 1:
            raise StructureError(f"`lengths` must be one or more integers >= 1, got {lengths!r}.")
        found = found.astype(np.int64)
        stops = np.cumsum(found)
        return cls(stops - found, found, np.zeros_like(found), np.ones(len(found), bool), (int(stops[-1]),))

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def stops(self) -> Integers:
        """[n] last time step of each trajectory."""
        return (self.starts + self.lengths - 1) % self.storage_shape[0]

    def rows(
        self, which: Integers | None = None, begin: Integers | None = None, lengths: Integers | None = None
    ) -> Integers:
        """Return the rows of trajectories, or of parts of trajectories, end to end.

        Args:
            which: [m] numbers of trajectories; None for all.
            begin: [m] first step of each part, counted from the trajectory's first step; None for 0.
            lengths: [m] rows of each part; None for the rest of the trajectory.

        Returns:
            Flat indices into the storage: time step times number of environments, plus environment.

        >>> Trajectories.from_lengths([3, 6]).rows(np.array([1]), np.array([2]), np.array([3])).tolist()
        [5, 6, 7]
        >>> Trajectories.from_lengths([3, 6]).rows(begin=np.array([1, 4])).tolist()
        [1, 2, 7, 8]
        """
        which = np.arange(len(self)) if which is None else which
        begin = np.zeros_like(which) if begin is None else begin
        lengths = self.lengths[which] - begin if lengths is None else lengths
        steps = (np.repeat(self.starts[which] + begin, lengths) + positions(lengths)) % self.storage_shape[0]
        num_envs = math.prod(self.storage_shape[1:])
        return steps if num_envs == 1 else steps * num_envs + np.repeat(self.env_ids[which], lengths)


def find_trajectories(kinds: Kinds, *, is_full: bool = False, cursor: int | None = None) -> Trajectories:
    """Return the trajectories of a storage.

    Args:
        kinds: uint8 [N] or [T, ...], the kinds of all written rows, in the order of the storage. Time is the first
            axis. `reverb_writer.rows.kinds_of(steps, outcome=False)` makes kinds [N] from flags or ids; add
            `is_ring=True` for a full ring.
        is_full: whether the storage is a full ring: then a trajectory may continue from the last row to the first row.
        cursor: the row that was written last, if the ring is full: no trajectory continues across it. None if unknown.

    Returns:
        All trajectories, environment by environment, in the order of their ends.
        The edges of a ring that is not full are boundaries. In a full ring, an environment without any boundary has
        one trajectory that begins at row 0. Rows of padding belong to no trajectory.

    Raises:
        SpecError: the cursor is out of range, or the ring is not full.
        StructureError: the kinds are not uint8.
        IncompleteError: the storage has no rows, or all rows are padding.

    Source: TorchRL `SliceSampler`. In addition, first rows and last rows count together: a first row marks the end
    before it, and a last row separates trajectories that have the same id.

    >>> kinds = np.where(np.isin(np.arange(10), [2, 7]), of_rows.LAST, of_rows.ACTION).astype(np.uint8)
    >>> found = find_trajectories(kinds, is_full=True, cursor=4)
    >>> found.starts.tolist(), found.stops.tolist(), found.lengths.tolist()
    ([8, 3, 5], [2, 4, 7], [5, 2, 3])
    """
    check_kinds(kinds)
    if kinds.ndim == 0 or not kinds.size:
        raise IncompleteError(f"the storage has no rows yet, got kinds {kinds.shape}.")
    num_steps, shape = len(kinds), kinds.shape
    if cursor is not None:
        cursor = integer("cursor", cursor, minimum=0, maximum=num_steps - 1)
        if not is_full:
            raise SpecError(f"`cursor` needs a ring that is full, got {cursor}. Omit it, or pass `is_full=True`.")
    first, padding = of_rows.has(kinds, of_rows.FIRST), of_rows.has(kinds, of_rows.PADDING)
    is_end = of_rows.has(kinds, of_rows.LAST) | np.roll(first, -1, axis=0) | (padding != np.roll(padding, -1, axis=0))
    by_env = is_end.reshape(num_steps, -1).T.copy()
    if not is_full:
        by_env[:, -1] = True
    elif cursor is not None:
        by_env[:, cursor] = True
    by_env[~by_env.any(axis=1), -1] = True
    env_ids, stops = (found.astype(np.int64) for found in np.nonzero(by_env))
    last_of_env = np.cumsum(by_env.sum(axis=1)) - 1
    # Each trajectory begins after the previous one of its environment; the first begins after the last.
    before = np.roll(stops, 1)
    before[np.r_[0, last_of_env[:-1] + 1]] = stops[last_of_env]
    starts = (before + 1) % num_steps
    is_real = ~padding.reshape(num_steps, -1)[starts, env_ids]
    if not is_real.any():
        raise IncompleteError(f"all {kinds.size} rows are padding, expected steps of a trajectory.")
    starts, stops, env_ids = starts[is_real], stops[is_real], env_ids[is_real]
    begins_episode = first.reshape(num_steps, -1)[starts, env_ids]
    return Trajectories(starts, (stops - starts) % num_steps + 1, env_ids, begins_episode, shape)


def check_kinds(kinds: Any) -> None:
    """Check that kinds are a NumPy array of uint8."""
    if not isinstance(kinds, np.ndarray) or kinds.dtype != np.uint8:
        raise StructureError(
            f"`kinds` must be a NumPy array of uint8, got {getattr(kinds, 'dtype', type(kinds).__name__)}. "
            "`reverb_writer.rows.kinds_of(steps, outcome=False)` makes kinds from flags or ids."
        )


def positions(lengths: Integers) -> Integers:
    """Return the position of each row in its part, for parts of these lengths: [3, 2] gives [0, 1, 2, 0, 1]."""
    return np.arange(lengths.sum(), dtype=np.int64) - np.repeat(np.cumsum(lengths) - lengths, lengths)


class KnownTrajectories:
    """First rows and lengths of the trajectories of items, with a memory limit. Not thread-safe."""

    def __init__(self) -> None:
        """Start without items."""
        self._parts_of: dict[Hashable, tuple[int, ...]] = {}  # first row, length, `begins_episode`, and so on
        self._num_bytes = 0

    def find(
        self, items: Sequence[Hashable], lengths: Integers, read: Callable[[Integers, Flags], Kinds]
    ) -> tuple[Trajectories, Integers]:
        """Return the trajectories of items [n] that lie end to end, and the number of each trajectory's item.

        `items` has their keys. `read` gets numbers of rows, and flags of the first rows of items, and returns kinds.

        Raises:
            IncompleteError: all rows are padding.
        """
        found: list[Any] = [self._parts_of.get(item) for item in items]
        first_rows = np.cumsum(lengths) - lengths
        missing = [number for number, of_item in enumerate(found) if of_item is None]
        if missing:
            of_missing = lengths[missing]
            place = positions(of_missing)
            kinds = read(np.repeat(first_rows[missing], of_missing) + place, place == 0)
            for number, of_item in zip(missing, _divide(kinds, of_missing), strict=True):
                found[number] = of_item
                num_bytes = _ENTRY_BYTES + _INT_BYTES * len(of_item)
                if self._num_bytes + num_bytes > _MAX_BYTES:
                    self._parts_of.clear()
                    self._num_bytes = 0
                self._num_bytes += num_bytes
                self._parts_of[items[number]] = of_item
        counts = [len(of_item) // 3 for of_item in found]
        flat = np.fromiter(itertools.chain.from_iterable(found), np.int64, 3 * sum(counts))
        if not counts or not sum(counts):
            raise IncompleteError(f"all rows of {len(items)} items are padding, expected steps of a trajectory.")
        starts = flat[::3] + first_rows.repeat(counts)
        shape = (int(lengths.sum()),)
        trajectories = Trajectories(starts, flat[1::3], np.zeros_like(starts), flat[2::3] != 0, shape)
        return trajectories, np.arange(len(counts)).repeat(counts)


def _divide(kinds: Kinds, lengths: Integers) -> list[tuple[int, ...]]:
    """Return the trajectories of each item, as `KnownTrajectories` has them; the items lie end to end."""
    ends = np.cumsum(lengths)
    begins = ends - lengths
    is_begin = np.zeros(len(kinds), bool)
    is_begin[begins] = True
    starts, stops = (np.flatnonzero(of(kinds, is_begin)) for of in (of_rows.first_rows, of_rows.last_rows))
    cuts = np.searchsorted(starts, ends)
    begins_episode = of_rows.has(kinds[starts], of_rows.FIRST)
    within = starts - begins.repeat(np.diff(cuts, prepend=0))
    parts = np.stack([within, stops - starts + 1, begins_episode], axis=1).reshape(-1).tolist()
    return [tuple(parts[3 * first : 3 * stop]) for first, stop in itertools.pairwise([0, *cuts.tolist()])]
