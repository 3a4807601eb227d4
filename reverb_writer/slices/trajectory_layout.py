"""Split, pad and concatenate trajectories, and assemble them from rows that arrive interleaved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import tree

from reverb_writer.arguments import integer
from reverb_writer.errors import StructureError
from reverb_writer.leaves import padded_rows
from reverb_writer.nests import common_length, named_leaves
from reverb_writer.slices.boundaries import Trajectories, find_trajectories
from reverb_writer.slices.markers import Flags, Markers, read_markers


def as_arrays(nest: Any) -> Any:
    """Return the nest with NumPy arrays as leaves."""
    return tree.map_structure(np.asarray, nest)


def row_specs(nest: Any) -> Any:
    """Return the dtype and shape of one row of each leaf, as a nest."""
    return tree.map_structure(lambda leaf: (leaf.dtype, leaf.shape[1:]), nest)


def check_rows(nest: Any, shape: tuple[int, ...]) -> None:
    """Check that all leaves are [*shape, ...].

    >>> check_rows({"reward": np.zeros(4)}, (5,))
    Traceback (most recent call last):
    reverb_writer.errors.StructureError: leaf `reward`: shape (4,), expected rows (5,), as all leaves must have.
    """
    for path, leaf in zip(*named_leaves(nest, "steps"), strict=True):
        if np.shape(leaf)[: len(shape)] != shape:
            raise StructureError(
                f"leaf `{path}`: shape {np.shape(leaf)}, expected rows {shape}, as all leaves must have."
            )


def take_rows(nest: Any, rows: npt.NDArray[np.int64], shape: tuple[int, ...]) -> Any:
    """Copy rows, given by flat indices, out of leaves [*shape, ...]."""
    check_rows(nest, shape)
    if len(shape) == 1:
        return tree.map_structure(lambda leaf: np.asarray(leaf).take(rows, axis=0), nest)
    indices = np.unravel_index(rows, shape)
    return tree.map_structure(lambda leaf: np.asarray(leaf)[indices], nest)


class PaddedTrajectories(NamedTuple):
    """The result of `pad_trajectories`: `data`, leaves [n, T, ...], and `mask`, bool [n, T], False on padding."""

    data: Any
    mask: Flags


def split_trajectories(nest: Any, trajectories: Trajectories | None = None) -> list[Any]:
    """Return one nest for each trajectory of a storage.

    Args:
        nest: leaves [N, ...], or [T, B, ...] of several environments.
        trajectories: their rows; None to find them by the markers among the leaves (`read_markers`).

    Returns:
        Nests of leaves [length, ...], copies, in the order of the trajectories. Rows are in the order of time, also
        where a trajectory continues from the last row of a ring to its first one.

    Raises:
        StructureError: a leaf has another shape than the storage, or the steps have no markers.
        IncompleteError: there are no rows.

    Source: TorchRL `split_trajectories`, which fails where an id is used again later; here that is another trajectory.

    >>> flat = {"traj_ids": np.array([7, 7, 5, 7]), "reward": np.arange(4)}
    >>> [trajectory["reward"].tolist() for trajectory in split_trajectories(flat)]
    [[0, 1], [2], [3]]
    """
    trajectories = find_trajectories(read_markers(nest)) if trajectories is None else trajectories
    rows = np.split(trajectories.rows(), np.cumsum(trajectories.lengths)[:-1])
    return [take_rows(nest, part, trajectories.storage_shape) for part in rows]


def pad_trajectories(trajectories: Sequence[Any], length: int | None = None) -> PaddedTrajectories:
    """Stack trajectories of different lengths, padded with zeros at the end.

    Args:
        trajectories: nests of one structure, leaves [length, ...]; at least one.
        length: T, rows to pad to; None for the longest length.

    Returns:
        The nest, leaves [n, T, ...], and the mask. Strings are padded with empty ones.

    Raises:
        SpecError: a trajectory is longer than `length`.
        StructureError: the list is empty; trajectories differ in structure, dtype or shape; or leaves differ in length.

    >>> padded = pad_trajectories([np.array([1, 2, 3]), np.array([4])])
    >>> padded.data.tolist(), padded.mask.tolist()
    ([[1, 2, 3], [4, 0, 0]], [[True, True, True], [True, False, False]])
    """
    lengths = _lengths(trajectories)
    longest = max(lengths)
    length = longest if length is None else integer("length", length, minimum=longest)
    mask = np.arange(length) < np.array(lengths)[:, None]

    def stack(*leaves: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return np.stack([padded_rows(leaf, length) for leaf in leaves])

    return PaddedTrajectories(tree.map_structure(stack, *(as_arrays(nest) for nest in trajectories)), mask)


def split_padded_trajectories(padded: Any, mask: npt.ArrayLike) -> list[Any]:
    """Return padded trajectories one by one, without padding: the inverse of `pad_trajectories`.

    Args:
        padded: leaves [n, T, ...].
        mask: [n, T], False on padding, which comes last.

    Returns:
        n nests of leaves [length, ...], copies.

    Raises:
        StructureError: a leaf or the mask has another shape, or a real row comes after padding.

    >>> [part.tolist() for part in split_padded_trajectories(np.array([[1, 2], [3, 0]]), [[1, 1], [1, 0]])]
    [[1, 2], [3]]
    """
    is_real = np.asarray(mask) != 0
    if is_real.ndim != 2 or (np.diff(is_real.astype(np.int8), axis=1) > 0).any():  # noqa: PLR2004  # [n, T]
        raise StructureError(f"`mask` must be [n, T] with padding last, got shape {is_real.shape}.")
    check_rows(padded, is_real.shape)
    lengths = is_real.sum(axis=1).tolist()
    return [
        tree.map_structure(lambda leaf, at=number, stop=length: np.asarray(leaf)[at, :stop].copy(), padded)
        for number, length in enumerate(lengths)
    ]


def concatenate_trajectories(trajectories: Sequence[Any]) -> Any:
    """Lay trajectories end to end: the inverse of `split_trajectories`.

    Args:
        trajectories: nests of one structure, leaves [length, ...]; at least one.

    Returns:
        A nest of leaves [N, ...]; `Trajectories.from_lengths` gives the rows of each.

    Raises:
        StructureError: the list is empty; trajectories differ in structure, dtype or shape; or leaves differ in length.

    >>> concatenate_trajectories([np.array([1, 2]), np.array([3])]).tolist()
    [1, 2, 3]
    """
    _lengths(trajectories)
    return tree.map_structure(lambda *leaves: np.concatenate(leaves), *(as_arrays(nest) for nest in trajectories))


class TrajectoryAssembler:
    """Assemble whole trajectories from chunks of rows in which several are interleaved.

    Rows with one id belong together, in the order in which they are added. A trajectory is complete with its first row
    that is marked as an end, for any reason; a later row with the same id begins another one. Memory holds all
    rows of the incomplete trajectories, without a limit.

    Not thread-safe: give each producer its own, or a lock.

    Source: TorchRL collectors with `trajs_per_batch`.

    >>> assembler = TrajectoryAssembler()
    >>> chunk = {"traj_ids": np.array([0, 1, 0, 1]), "done": np.array([0, 0, 1, 0]), "reward": np.arange(4)}
    >>> [trajectory["reward"].tolist() for trajectory in assembler.add(chunk)], assembler.open_ids
    ([[0, 2]], [1])
    """

    def __init__(self) -> None:
        """Start with no rows."""
        self._open: dict[int, list[Any]] = {}
        self._spec: Any = None

    def __repr__(self) -> str:
        return f"<TrajectoryAssembler: {len(self._open)} trajectories are not complete>"

    @property
    def open_ids(self) -> list[int]:
        """Ids of trajectories that are not complete, in the order in which they began."""
        return list(self._open)

    def add(self, chunk: Any, markers: Markers | None = None) -> list[Any]:
        """Add rows, and return the trajectories that they complete.

        Args:
            chunk: a nest, leaves [N, ...], of one structure in all chunks; copied.
            markers: of its rows, with `traj_ids` and any of the ends; None to use those that `read_markers` finds.

        Returns:
            Nests of leaves [length, ...], in the order in which they end.

        Raises:
            StructureError: rows have no ids or no ends, or another structure than earlier rows. Nothing changed.
        """
        chunk = as_arrays(chunk)
        markers = read_markers(chunk) if markers is None else markers
        if markers.traj_ids is None or markers.ends is None:
            raise StructureError("a chunk needs `traj_ids`, and `done`, `terminated` or `truncated`, of its rows.")
        check_rows(chunk, markers.traj_ids.shape)
        spec = row_specs(chunk)
        if markers.traj_ids.ndim != 1 or self._spec not in (None, spec):
            raise StructureError(f"rows must be [N, ...] of the structure of earlier rows, {self._spec}, got {spec}.")
        self._spec = spec
        found: list[tuple[int, Any]] = []
        ids, firsts = np.unique(markers.traj_ids, return_index=True)
        for traj_id in ids[np.argsort(firsts)].tolist():
            rows = np.flatnonzero(markers.traj_ids == traj_id)
            cuts = np.flatnonzero(markers.ends[rows]) + 1
            for part in filter(len, np.split(rows, cuts)):
                self._open.setdefault(traj_id, []).append(take_rows(chunk, part, markers.traj_ids.shape))
                if markers.ends[part[-1]]:
                    found.append((int(part[-1]), concatenate_trajectories(self._open.pop(traj_id))))
        return [trajectory for _, trajectory in sorted(found, key=lambda end: end[0])]

    def take_open(self) -> dict[int, Any]:
        """Return the trajectories that are not complete, by id, and remove them."""
        taken = {traj_id: concatenate_trajectories(parts) for traj_id, parts in self._open.items()}
        self._open.clear()
        return taken


def _lengths(trajectories: Sequence[Any]) -> list[int]:
    """Return the number of rows of each nest; all must have one structure."""
    if not trajectories:
        raise StructureError("expected one trajectory or more, got none.")
    lengths, expected = [], row_specs(as_arrays(trajectories[0]))
    for nest in map(as_arrays, trajectories):
        lengths.append(common_length(nest, "trajectory"))
        if row_specs(nest) != expected:
            raise StructureError(f"trajectories must be of one structure, {expected}, got {row_specs(nest)}.")
    return lengths
