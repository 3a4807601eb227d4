"""Nests of NumPy arrays, or of PyTorch tensors on any device, through the array API of array-api-compat.

A shape is an int, a sequence of ints, or an object with `shape` and `dtype`, such as an array, a spec of dm_env, or a
space of Gymnasium. A nest of shapes gives a nest of arrays.
"""

from __future__ import annotations

import importlib
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tree

from reverb_writer.arrays import Array, concatenated
from reverb_writer.errors import SpecError, StructureError
from reverb_writer.lazy import needs
from reverb_writer.leaves import mismatch, zeros
from reverb_writer.nests import check_same_leaves, map_present, named_leaves, packer


class Arrays:
    """The library and the device of a storage's arrays."""

    def __init__(self, device: Any) -> None:
        """Load the library."""
        self.device = device  # PyTorch's device; None for NumPy
        self.xp: Any = np  # the library; only names of the array API that NumPy 1.26 also has
        self._at: dict[str, Any] = {}
        if device is not None:
            try:
                with needs(f"`device` {device!r}", "reverb-writer[arrays,torch]"):
                    self.xp = importlib.import_module("array_api_compat.torch")
                    self._at = {"device": importlib.import_module("torch").device(device)}
            except (RuntimeError, TypeError) as error:
                raise SpecError(f"`device` {device!r} is not known to PyTorch: {error}") from None

    def _dtype(self, dtype: np.dtype[Any]) -> Any:
        """Return the library's dtype for a dtype of NumPy."""
        found = getattr(self.xp, dtype.name, None) if self._at else dtype
        if found is None:
            raise SpecError(f"PyTorch has no arrays of {dtype}. Pass `device=None` for NumPy arrays.")
        return found

    def columns(self, shapes: Any, rows: tuple[int, ...]) -> Any:
        """Return zeros [*rows, ...] for a nest of shapes from `row_shapes`; None remains None."""
        return map_present(lambda shape: self.zeros((*rows, *shape.sizes), self._dtype(shape.dtype)), shapes)

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Return zeros, or empty strings; `dtype` is the library's."""
        return self.xp.zeros(shape, dtype=dtype, **self._at) if self._at else zeros(dtype, shape)

    def asarray(self, x: Any) -> Array:
        """Convert to an array of the library, on the device, without gradients; copied only if necessary."""
        if hasattr(x, "detach"):
            x = x.detach()
            x = x if self._at else x.cpu()
        if self._at and str(getattr(x, "dtype", "")) == "bfloat16":  # PyTorch does not convert it from NumPy
            return self.xp.asarray(np.asarray(x).view(np.int16), **self._at).view(self.xp.bfloat16)
        try:
            return self.xp.asarray(x, **self._at)
        except TypeError as error:
            raise StructureError(f"PyTorch has no such arrays; `device=None` makes NumPy ones: {error}") from None

    def to_numpy(self, x: Array) -> npt.NDArray[Any]:
        """Convert an array of the library to NumPy."""
        return np.asarray(x.cpu() if self._at else x)

    def take(self, nest: Any, rows: Array) -> Any:
        """Return copies of rows of the leaves; `rows` [N] are indices, an array of the library."""
        return tree.map_structure(lambda leaf: self.xp.take(leaf, rows, axis=0), nest)

    def where(self, condition: Array, chosen: Any, other: Any) -> Any:
        """Return leaves with the rows of `chosen` where `condition` [B] is True, and the rows of `other` elsewhere."""

        def choose(a: Array, b: Array) -> Array:
            return self.xp.where(condition.reshape((-1, *(1,) * (a.ndim - 1))), a, b)

        return tree.map_structure(choose, chosen, other)

    def concatenate(self, *nests: Any) -> Any:
        """Concatenate nests of one structure along the first axis."""
        return map_present(lambda *leaves: concatenated(self.xp, leaves, 0), *nests)

    def conform(self, name: str, given: Any, shapes: Any, num_rows: int) -> Any:
        """Return a nest, leaves [num_rows, ...], with the structure, row shapes and dtypes of `shapes`.

        Trailing axes of size 1 may be left out. `name` is the argument's name, for errors.
        """
        given = self.asarray(given) if isinstance(given, list) and not tree.is_nested(shapes) else given
        (paths, values), (expected_paths, expected) = (named_leaves(nest, f"`{name}`") for nest in (given, shapes))
        check_same_leaves(f"`{name}`", paths, expected_paths, "the storage")
        leaves = []
        for path, leaf, shape in zip(paths, values, expected, strict=True):
            where = f"`{name}/{path}`" if path else f"`{name}`"
            x, sizes, dtype = self.asarray(leaf), (num_rows, *shape.sizes), self._dtype(shape.dtype)
            fits = x.ndim and tuple(x.shape) == sizes[: x.ndim] and all(size == 1 for size in sizes[x.ndim :])
            can_cast = self.xp.can_cast(x.dtype, dtype) if self._at else np.can_cast(x.dtype, dtype, "same_kind")
            if not fits or not can_cast:
                advice = "Cast it first." if fits else ""
                raise mismatch(where, x.dtype, tuple(x.shape), dtype, sizes, "as in the storage", advice)
            leaves.append(self.xp.asarray(x, dtype=dtype).reshape(sizes))
        return packer(shapes)(leaves)


class _Shape:
    """Shape and dtype of a row of an array; not a tuple, which would be a nest."""

    def __init__(self, sizes: Sequence[Any], dtype: Any) -> None:
        self.sizes = tuple(map(operator.index, sizes))
        self.dtype = np.dtype(dtype)


def row_shapes(name: str, shapes: Any, dtype: Any = np.float32) -> Any:
    """Return a nest of row shapes and dtypes for a nest of shapes; `dtype` is the default."""
    if isinstance(shapes, Mapping):
        return {key: row_shapes(f"{name}/{key}", shape, dtype) for key, shape in shapes.items()}
    if hasattr(shapes, "shape") and hasattr(shapes, "dtype"):
        return _Shape(shapes.shape, getattr(shapes.dtype, "as_numpy_dtype", str(shapes.dtype).removeprefix("torch.")))
    if hasattr(shapes, "__index__"):
        return _Shape((shapes,), dtype)
    if not isinstance(shapes, Sequence) or isinstance(shapes, str):
        raise SpecError(
            f"`{name}` must be a shape, such as (3,), something with `shape` and `dtype`, or a nest of these, "
            f"got {shapes!r}."
        )
    if all(hasattr(size, "__index__") for size in shapes):
        return _Shape(shapes, dtype)
    parts = [row_shapes(f"{name}/{key}", shape, dtype) for key, shape in enumerate(shapes)]
    return type(shapes)(*parts) if hasattr(shapes, "_fields") else tuple(parts)


def flat_rows(nest: Any) -> Any:
    """Return leaves [T, B, ...] as [T B, ...], row t B + b; a view if possible."""
    return tree.map_structure(lambda leaf: leaf.reshape((leaf.shape[0] * leaf.shape[1], *leaf.shape[2:])), nest)


def read_states(arrays: Arrays, given: Any, num_envs: int, column: Any) -> Any:
    """Convert the hidden states of a step, leaves [layers, B, ...], to a row, leaves [B, layers, ...].

    None in place of the states of a network without memory remains None. If all states are None, return zeros like
    `column`, the states of earlier steps [T, B, layers, ...], or None if no earlier step had states.
    """
    if all(leaf is None for leaf in tree.flatten(given)):
        return map_present(lambda leaf: arrays.zeros(leaf.shape[1:], leaf.dtype), column)
    states = map_present(arrays.asarray, given)
    shapes = map_present(lambda leaf: str(tuple(leaf.shape)), states)
    if any(tuple(leaf.shape[1:2]) != (num_envs,) for leaf in tree.flatten(states) if leaf is not None):
        raise StructureError(f"`hidden_states` must be [layers, {num_envs}, ...], got {shapes}.")
    if column is not None:
        expected = map_present(lambda leaf: str((leaf.shape[2], leaf.shape[1], *leaf.shape[3:])), column)
        if shapes != expected:
            raise StructureError(f"`hidden_states` are {shapes}, expected {expected}, as in earlier steps.")
    return map_present(lambda leaf: arrays.xp.moveaxis(leaf, 0, 1), states)
