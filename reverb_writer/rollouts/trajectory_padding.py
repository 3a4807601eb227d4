"""Rollouts [T, B, ...] split into trajectories, which end where `dones` is set and at the last row.

    dones                 padded: one column each,
    (D is done)           zeros after the short ones

    env a  . . . D . .    a0 a4 b0 b3      mask  T T T T
    env b  . . D . . D    a1 a5 b1 b4            T T T T
                          a2 0  b2 b5            T . T T
                          a3 0  0  0             T . . .
                          0  0  0  0             . . . .
                          0  0  0  0             . . . .

Trajectories are ordered by environment, then by time. `slices` finds the trajectories.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import tree

from reverb_writer.errors import StructureError
from reverb_writer.rollouts.array_nests import Arrays, flat_rows
from reverb_writer.slices import Markers, Trajectories, find_trajectories
from reverb_writer.slices.boundaries import positions


class Padded(NamedTuple):
    """The result of `split_and_pad_trajectories`: the nest, leaves [T, n, ...], and masks [T, n], True on real rows."""

    data: Any
    masks: Any


def split_and_pad_trajectories(nest: Any, dones: Any) -> Padded:
    """Return each trajectory of a rollout in its own column, padded with zeros.

    Args:
        nest: leaves [T, B, ...], all of NumPy or all of PyTorch.
        dones: [T, B] or [T, B, 1], not 0 on the last row of an episode; not changed.

    Returns:
        The trajectories and their masks: copies with T rows, even if all trajectories are shorter.

    Raises:
        StructureError: a leaf does not have the rows of `dones`.

    Source: instinct_rl's `split_and_pad_trajectories`, which leaves padding uninitialised.

    >>> padded, masks = split_and_pad_trajectories(np.array([[1], [2], [3]]), np.array([[0], [1], [0]]))
    >>> padded.tolist(), masks.tolist()
    ([[1, 3], [2, 0], [0, 0]], [[True, True], [True, False], [False, False]])
    """
    arrays = _arrays_of(dones)
    return pad(arrays, nest, find(arrays, arrays.asarray(dones)))


def unpad_trajectories(padded: Any, masks: Any) -> Any:
    """Return the rollout of padded trajectories: the inverse of `split_and_pad_trajectories`. Differentiable.

    Args:
        padded: leaves [T, n, ...], such as a recurrent network's outputs for padded trajectories.
        masks: [T, n], True on real rows, which come first in each column.

    Returns:
        Leaves [T, B, ...].

    Raises:
        StructureError: a leaf has another shape, or the real rows do not fill environments of T rows each.

    >>> unpad_trajectories(np.array([[1, 3], [2, 0], [0, 0]]), np.array([[1, 1], [1, 0], [0, 0]]) != 0).tolist()
    [[1], [2], [3]]
    """
    arrays = _arrays_of(masks)
    is_real = arrays.to_numpy(masks) != 0
    if any(tuple(leaf.shape[:2]) != is_real.shape for leaf in tree.flatten(padded)) or is_real.sum() % len(is_real):
        shapes = tree.map_structure(lambda leaf: tuple(leaf.shape), padded)
        raise StructureError(
            f"`padded` must be [T, n, ...] and `masks` [T, n] with a multiple of T real rows, got {shapes} and "
            f"{is_real.shape} with {is_real.sum()} real rows."
        )
    num_rows, num_columns = is_real.shape
    column, row = np.nonzero(is_real.T)  # by environment, then by time
    rows = (row * num_columns + column).reshape(-1, num_rows).T.ravel()
    found = arrays.take(flat_rows(padded), arrays.asarray(rows))
    return tree.map_structure(lambda leaf: leaf.reshape((num_rows, -1, *leaf.shape[1:])), found)


def find(arrays: Arrays, dones: Any) -> Trajectories:
    """Return the trajectories of rows [T, B] that end at flags [T, B] or [T, B, 1]."""
    return find_trajectories(Markers(done=arrays.to_numpy(dones).reshape(dones.shape[:2]) != 0))


def pad(arrays: Arrays, nest: Any, trajectories: Trajectories) -> Padded:
    """Return each trajectory in its own column, padded with zeros."""
    num_rows, _ = trajectories.storage_shape
    num_columns = len(trajectories)
    lengths = trajectories.lengths
    source = arrays.asarray(trajectories.rows())
    target = arrays.asarray(positions(lengths) * num_columns + np.repeat(np.arange(num_columns), lengths))

    def padded(leaf: Any) -> Any:
        if tuple(leaf.shape[:2]) != trajectories.storage_shape:
            raise StructureError(f"shape {tuple(leaf.shape)}, expected rows {trajectories.storage_shape}, as `dones`.")
        out = arrays.zeros((num_rows * num_columns, *leaf.shape[2:]), leaf.dtype)
        out[target] = arrays.xp.take(leaf.reshape((-1, *leaf.shape[2:])), source, axis=0)
        return out.reshape((num_rows, num_columns, *leaf.shape[2:]))

    masks = arrays.asarray(np.arange(num_rows)[:, None] < lengths)
    return Padded(tree.map_structure(padded, nest), masks)


def _arrays_of(flags: Any) -> Arrays:
    return Arrays(flags.device if hasattr(flags, "detach") else None)
