"""Copy rows of storages: slices as a flat batch, trajectories as separate nests or padded."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import tree

from reverb_writer import arguments
from reverb_writer import rows as of_rows
from reverb_writer.errors import StructureError
from reverb_writer.leaves import padded_rows
from reverb_writer.nests import common_length, named_leaves
from reverb_writer.rows.layouts import ids_of
from reverb_writer.slices.axes import Flags, Kinds
from reverb_writer.slices.batch import Batch
from reverb_writer.slices.boundaries import Trajectories, check_kinds, find_trajectories
from reverb_writer.slices.sampler import Slices


def take_rows(nest: Any, rows: npt.NDArray[np.int64], shape: tuple[int, ...]) -> Any:
    """Copy rows, given by flat indices, out of leaves [*shape, ...]."""
    for path, leaf in zip(*named_leaves(nest, "steps"), strict=True):
        if np.shape(leaf)[: len(shape)] != shape:
            raise StructureError(f"leaf `{path}`: shape {np.shape(leaf)}, expected {shape} as in all leaves.")
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
        trajectories: the trajectories; None to find them by the flags or ids among leaves [N, ...].

    Returns:
        Copies with leaves [length, ...], in the order of the trajectories. Rows are in the order of time, even if a
        trajectory continues from the last row of a ring to the first row.

    Raises:
        StructureError: a leaf has another shape than the storage, or no leaf shows the trajectories.
        IncompleteError: the storage has no rows.

    Source: TorchRL `split_trajectories`, which fails if an id is used again later; here it begins another trajectory.

    >>> flat = {"traj_ids": np.array([7, 7, 5, 7]), "reward": np.arange(4)}
    >>> [trajectory["reward"].tolist() for trajectory in split_trajectories(flat)]
    [[0, 1], [2], [3]]
    """
    if trajectories is None:
        kinds = of_rows.kinds_of(nest, outcome=False)
        if kinds.ndim != 1:
            raise StructureError(f"flags must be [N], got {kinds.shape}. Pass `trajectories` of several environments.")
        trajectories = find_trajectories(kinds)
    rows = np.split(trajectories.rows(), np.cumsum(trajectories.lengths)[:-1])
    return [take_rows(nest, part, trajectories.storage_shape) for part in rows]


def pad_trajectories(trajectories: Sequence[Any], length: int | None = None) -> PaddedTrajectories:
    """Stack trajectories of different lengths, padded with zeros at the end.

    Args:
        trajectories: nests of one structure, leaves [length, ...]; at least one.
        length: T, rows to pad to; None for the longest length.

    Returns:
        The nest, leaves [n, T, ...], and the mask. Strings are padded with empty strings.

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
            raise StructureError(f"trajectories must have equal structure: expected {expected}, got {form}.")
    longest = max(lengths)
    length = longest if length is None else arguments.integer("length", length, minimum=longest)
    mask = np.arange(length) < np.array(lengths)[:, None]

    def stack(*leaves: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return np.stack([padded_rows(leaf, length) for leaf in leaves])

    return PaddedTrajectories(tree.map_structure(stack, *nests), mask)


def gather(nest: Any, slices: Slices, kinds: Kinds | None = None) -> Batch:
    """Return slices of a storage as one batch, laid end to end.

    Args:
        nest: the storage; the shape of each leaf begins with the shape of the storage.
        slices: slices that a `SliceSampler` drew from the trajectories of this storage.
        kinds: uint8, the kinds of all rows of the storage; None if the leaves show them (`Batch.kinds`).

    Raises:
        StructureError: a leaf or the kinds have another shape than the storage.

    >>> from reverb_writer.slices import SliceSampler
    >>> slices = SliceSampler(2, 4).each(Trajectories.from_lengths([2, 3]), np.random.default_rng(0))
    >>> batch = gather({"reward": np.array([1.0, 2.0, 3.0, 4.0, 5.0])}, slices)
    >>> batch.data["reward"].tolist(), batch.slices.starts.tolist()
    ([1.0, 2.0, 3.0, 4.0, 5.0], [True, False, True, False, False])
    """
    if kinds is not None:
        check_kinds(kinds)
        kinds = kinds_of_slices(take_rows({"kinds": kinds}, slices.rows, slices.storage_shape)["kinds"], slices)
    data = take_rows(nest, slices.rows, slices.storage_shape)
    return Batch(data, None, slices=with_ids(slices, data), row_kinds=kinds)


def kinds_of_slices(kinds: Kinds, slices: Slices) -> Kinds:
    """Return the kinds [N] of the rows of slices, given the kinds of the stored rows, which padding repeats."""
    return kinds if slices.mask.all() else np.where(slices.mask, kinds, np.uint8(of_rows.PADDING))


def with_ids(slices: Slices, data: Any, num_before: int = 0) -> Slices:
    """Return slices with the ids of their trajectories: stored ids, or numbers from `num_before` on."""
    ids = ids_of(data)
    if ids is None:
        return dataclasses.replace(slices, trajectories=slices.trajectories + num_before)
    return dataclasses.replace(slices, trajectories=ids.reshape(len(slices.rows))[slices.first_rows])
