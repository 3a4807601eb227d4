"""Find the first and last rows of trajectories from markers: integers only.

A storage is a ring of T time steps per environment: [T, B, ...] for B environments, [N] for one. One rule finds the
ends from any kind of marker:

    row t is the last of its trajectory if row t is marked as an end, row t + 1 is marked as a start, or the ids differ

Rows that a mask marks as padding belong to no trajectory. After the last row of an environment comes its first row, as
in a full ring.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from reverb_writer.arguments import integer
from reverb_writer.errors import IncompleteError, SpecError, StructureError
from reverb_writer.slices.markers import Flags, Integers, Markers, read_markers
from reverb_writer.steps import boundary_steps
from reverb_writer.transitions.step_flags import follow_ends

_MAX_BYTES = 32 << 20
_ENTRY_BYTES, _INT_BYTES = 200, 40


@dataclass(frozen=True)
class Trajectories:
    """The rows of each trajectory in a storage. Immutable; safe to share between threads.

    Attributes:
        starts: [n] first time step of each trajectory.
        lengths: [n] rows of each trajectory, >= 1; after the last time step, it continues at time step 0.
        env_ids: [n] environment of each trajectory.
        storage_shape: (N,), or (T, ...) of a storage of several environments.
    """

    starts: Integers
    lengths: Integers
    env_ids: Integers
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
        return cls(stops - found, found, np.zeros_like(found), (int(stops[-1]),))

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


def find_trajectories(markers: Markers, *, is_full: bool = False, cursor: int | None = None) -> Trajectories:
    """Return the trajectories of a storage. One kind of marker is enough.

    Args:
        markers: markers of all written rows, in the order of the storage.
        is_full: whether the storage is a full ring: then a trajectory may continue from the last row to the first row.
        cursor: the row that was written last, if the ring is full: no trajectory continues across it. None if unknown.

    Returns:
        All trajectories, environment by environment, in the order of their ends.
        The edges of a ring that is not full are boundaries. In a full ring, an environment without any boundary has
        one trajectory that begins at row 0. Rows of padding belong to no trajectory.

    Raises:
        SpecError: the cursor is out of range, or the ring is not full.
        StructureError: the markers have no boundaries.
        IncompleteError: the storage has no rows, or all rows are padding.

    Source: TorchRL `SliceSampler`. In addition, starts count as markers, and several kinds of markers count together: a
    start marks the end before it, and an end separates trajectories that have the same id.

    >>> ends = np.isin(np.arange(10), [2, 7])
    >>> found = find_trajectories(Markers(done=ends), is_full=True, cursor=4)
    >>> found.starts.tolist(), found.stops.tolist(), found.lengths.tolist()
    ([8, 3, 5], [2, 4, 7], [5, 2, 3])
    """
    given = _boundaries(markers)
    if not given:
        raise StructureError(
            "the steps do not show the ends of trajectories: expected `traj_ids`, `done`, `terminated`, `truncated` or "
            "`is_init`. Pass `Markers` if the steps have them under other names."
        )
    if given[0].ndim == 0 or not given[0].size:
        raise IncompleteError(f"the storage has no rows yet, got markers {given[0].shape}.")
    is_end = np.logical_or.reduce(given)
    num_steps, *envs_shape = is_end.shape
    if cursor is not None:
        cursor = integer("cursor", cursor, minimum=0, maximum=num_steps - 1)
        if not is_full:
            raise SpecError(f"`cursor` needs a ring that is full, got {cursor}. Omit it, or pass `is_full=True`.")
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
    lengths, shape = (stops - starts) % num_steps + 1, (num_steps, *envs_shape)
    if markers.mask is None:
        return Trajectories(starts, lengths, env_ids, shape)
    is_real = markers.mask.reshape(num_steps, -1)[starts, env_ids]
    if not is_real.any():
        raise IncompleteError(f"all {is_end.size} rows are padding, expected steps of a trajectory.")
    return Trajectories(starts[is_real], lengths[is_real], env_ids[is_real], shape)


def positions(lengths: Integers) -> Integers:
    """Return the position of each row in its part, for parts of these lengths: [3, 2] gives [0, 1, 2, 0, 1]."""
    return np.arange(lengths.sum(), dtype=np.int64) - np.repeat(np.cumsum(lengths) - lengths, lengths)


def first_rows(markers: Markers, num_rows: int) -> Flags:
    """Return [N] the rows that flat markers show as the first of a trajectory; row 0 is not always marked."""
    starts = np.zeros(num_rows, bool)
    if given := _boundaries(markers):
        starts[1:] = np.logical_or.reduce(given)[:-1]
    return starts


def _boundaries(markers: Markers) -> list[Flags]:
    """Return the last rows of trajectories that each kind of marker shows."""
    given = [] if markers.ends is None else [markers.ends]
    if markers.is_init is not None:
        given.append(np.roll(markers.is_init, -1, axis=0))
    if markers.traj_ids is not None:
        given.append(markers.traj_ids != np.roll(markers.traj_ids, -1, axis=0))
    if markers.mask is not None:
        given.append(markers.mask != np.roll(markers.mask, -1, axis=0))
    return given


class KnownTrajectories:
    """First rows and lengths of the trajectories of items, with a memory limit. Not thread-safe."""

    def __init__(self) -> None:
        """Start without items."""
        self._parts_of: dict[Hashable, tuple[int, ...]] = {}  # alternating first rows and lengths
        self._num_bytes = 0

    def find(
        self, items: Sequence[Hashable], lengths: Integers, read: Callable[[Integers], Any]
    ) -> tuple[Trajectories, Integers]:
        """Return the trajectories of items [n] that lie end to end, and the number of each trajectory's item.

        `items` has their keys. `read` gets numbers of rows, and returns the leaves of these rows for `read_markers`.
        """
        found: list[Any] = [self._parts_of.get(item) for item in items]
        first_rows = np.cumsum(lengths) - lengths
        missing = [number for number, of_item in enumerate(found) if of_item is None]
        if missing:
            of_missing = lengths[missing]
            nest = read(np.repeat(first_rows[missing], of_missing) + positions(of_missing))
            for number, of_item in zip(missing, _divide(nest, of_missing), strict=True):
                found[number] = of_item
                num_bytes = _ENTRY_BYTES + _INT_BYTES * len(of_item)
                if self._num_bytes + num_bytes > _MAX_BYTES:
                    self._parts_of.clear()
                    self._num_bytes = 0
                self._num_bytes += num_bytes
                self._parts_of[items[number]] = of_item
        counts = [len(of_item) // 2 for of_item in found]
        flat = np.fromiter(itertools.chain.from_iterable(found), np.int64, 2 * sum(counts))
        starts = flat[::2] + first_rows.repeat(counts)
        trajectories = Trajectories(starts, flat[1::2], np.zeros_like(starts), (int(lengths.sum()),))
        return trajectories, np.arange(len(counts)).repeat(counts)


def _divide(nest: Any, lengths: Integers) -> list[tuple[int, ...]]:
    """Return first row and length of the trajectories of each item; the items, of these lengths, lie end to end."""
    ends = np.cumsum(lengths)
    first_rows = ends - lengths
    stored = read_markers(nest, starts=first_rows)
    is_init = np.zeros(ends[-1], bool) if stored.is_init is None else stored.is_init.copy()
    is_init[first_rows] = True
    mask = stored.mask
    is_boundary = boundary_steps(nest)
    if mask is None and is_boundary is not None and stored.is_init is not None:  # padded, but without a mask
        mask = ~follow_ends(np, is_boundary.reshape(is_init.shape), is_init)
    trajectories = find_trajectories(dataclasses.replace(stored, is_init=is_init, mask=mask))
    cuts = np.searchsorted(trajectories.starts, ends)
    starts = trajectories.starts - first_rows.repeat(np.diff(cuts, prepend=0))
    parts = np.stack([starts, trajectories.lengths], axis=1).reshape(-1).tolist()
    return [tuple(parts[2 * first : 2 * stop]) for first, stop in itertools.pairwise([0, *cuts.tolist()])]
