"""Rows of trajectories: split by their markers, padded to one length, copied by number."""

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
from reverb_writer.slices.markers import Flags, read_markers


def take_rows(nest: Any, rows: npt.NDArray[np.int64], shape: tuple[int, ...]) -> Any:
    """Copy rows, given by flat indices, out of leaves [*shape, ...].

    >>> take_rows({"reward": np.zeros(4)}, np.array([0]), (5,))
    Traceback (most recent call last):
    reverb_writer.errors.StructureError: leaf `reward`: shape (4,), expected rows (5,), as all leaves must have.
    """
    for path, leaf in zip(*named_leaves(nest, "steps"), strict=True):
        if np.shape(leaf)[: len(shape)] != shape:
            raise StructureError(
                f"leaf `{path}`: shape {np.shape(leaf)}, expected rows {shape}, as all leaves must have."
            )
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
    if not trajectories:
        raise StructureError("expected one trajectory or more, got none.")
    nests = [tree.map_structure(np.asarray, nest) for nest in trajectories]
    lengths = [common_length(nest, "trajectory") for nest in nests]
    expected, *others = (tree.map_structure(lambda leaf: (leaf.dtype, leaf.shape[1:]), nest) for nest in nests)
    for form in others:
        if form != expected:
            raise StructureError(f"trajectories must be of one structure, {expected}, got {form}.")
    longest = max(lengths)
    length = longest if length is None else integer("length", length, minimum=longest)
    mask = np.arange(length) < np.array(lengths)[:, None]

    def stack(*leaves: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return np.stack([padded_rows(leaf, length) for leaf in leaves])

    return PaddedTrajectories(tree.map_structure(stack, *nests), mask)
