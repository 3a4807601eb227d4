"""Rows outside the data of a column: they hold a fill value, in a dtype that can hold it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tree

from reverb_writer.episodes.spaces import SpaceLeaf, SpaceLeaves
from reverb_writer.errors import SpecError

Array = npt.NDArray[Any]

_FLOAT32 = np.dtype(np.float32)
_NUMBERS = (float, int)


def filled(
    leaves: Sequence[Array], fill: Any, where: slice | Array, num: int, parts: SpaceLeaves | None, one_hot: bool
) -> list[Array]:
    """Return leaves [num, ...] with the rows of `leaves` at `where`, and the fill value elsewhere.

    The fill value is a row, or a number for all leaves. It has the dtype of its space, if there is one.
    """
    values = tree.flatten(fill) if len(leaves) > 1 and tree.is_nested(fill) else [fill] * len(leaves)
    if len(values) != len(leaves):
        raise SpecError(f"`fill` must be a number, or a row of {len(leaves)} leaves, got {fill!r}.")
    found = []
    for number, (leaf, given) in enumerate(zip(leaves, values, strict=True)):
        if parts is None:
            value, dtype = given, _holding(given, leaf.dtype, leaf.shape[1:])
        else:
            value, dtype = _cast(given, parts.leaves[number], one_hot)
        own = leaf.dtype
        rows = np.empty((num, *leaf.shape[1:]), own if dtype is own else np.result_type(dtype, own))
        rows[...] = value
        if len(leaf):
            rows[where] = leaf
        found.append(rows)
    return found


def _holding(fill: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.dtype[Any]:
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


def _cast(fill: Any, part: SpaceLeaf, one_hot: bool) -> tuple[Any, np.dtype[Any]]:
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


def _in_range(value: Array, dtype: np.dtype[Any]) -> bool:
    limits = np.iinfo(dtype)
    return bool(np.all((value >= limits.min) & (value <= limits.max)))
