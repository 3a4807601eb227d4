"""Rows outside the data of a column: the dtype of their fill value, and their places."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tree

from reverb_writer.episodes.spaces import SpaceLeaf
from reverb_writer.errors import SpecError

Array = npt.NDArray[Any]

_FLOAT32 = np.dtype(np.float32)
_NUMBERS = (float, int)


def place(leaf: Array, where: slice | Array, fill: Any, dtype: np.dtype[Any], num: int) -> Array:
    """Return an array [num, ...] with the rows of `leaf` at `where`, and the fill value elsewhere."""
    result = np.empty((num, *leaf.shape[1:]), np.result_type(dtype, leaf.dtype))
    result[...] = fill
    if len(leaf):
        result[where] = leaf
    return result


def holding(fill: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.dtype[Any]:
    """Return the dtype if it can hold the fill value, else a dtype that can hold both."""
    kind = dtype.kind
    if kind == "O" or (kind == "f" and type(fill) in _NUMBERS):
        return dtype
    value = np.asarray(fill)
    if value.dtype.kind not in "biufc" or value.shape not in ((), shape):
        raise SpecError(f"`fill` must be a number or a row like the others, {dtype} {shape}, got {fill!r}.")
    if kind == "f" and value.dtype.kind != "c":
        return dtype
    if kind in "iu" and value.dtype.kind in "biuf" and np.all(value == np.trunc(value)) and _in_range(value, dtype):
        return dtype
    return np.result_type(value.dtype, dtype)


def cast(fill: Any, part: SpaceLeaf, one_hot: bool) -> tuple[Any, np.dtype[Any]]:
    """Return the fill value in the dtype of a space's leaf, and that dtype; float32 for one-hot vectors.

    It is cast as RLlib does: 0.5 is 0 in a Discrete space; for one-hot vectors, 0 is a vector of zeros.
    """
    dtype, shape = part.dtype, part.shape
    if one_hot and part.sizes is not None:
        dtype, shape = _FLOAT32, part.one_hot_shape()
    if dtype.kind == "O" or (dtype.kind == "f" and type(fill) in _NUMBERS):
        return fill, dtype
    value = np.asarray(fill)
    if value.dtype.kind not in "biuf" or value.shape not in ((), shape):
        raise SpecError(f"`fill` must be a number, or have the shape {shape} of its space, got {fill!r}.")
    if dtype.kind in "iu" and not _in_range(value, dtype):
        raise SpecError(f"`fill` must be a number that {dtype} can hold, as its space says, got {fill!r}.")
    return value.astype(dtype), dtype


def per_leaf(fill: Any, num_leaves: int) -> Sequence[Any]:
    """Return a fill value for each leaf: the leaves of a row, or the same number for all."""
    if num_leaves == 1 or not tree.is_nested(fill):
        return [fill] * num_leaves
    values: list[Any] = tree.flatten(fill)
    if len(values) != num_leaves:
        raise SpecError(f"`fill` must be a number, or a row of {num_leaves} leaves, got {fill!r}.")
    return values


def _in_range(value: Array, dtype: np.dtype[Any]) -> bool:
    limits = np.iinfo(dtype)
    return bool(np.all((value >= limits.min) & (value <= limits.max)))
