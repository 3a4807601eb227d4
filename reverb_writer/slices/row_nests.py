"""Check and copy rows of nests of arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import tree

from reverb_writer.errors import StructureError
from reverb_writer.nests import named_leaves


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
