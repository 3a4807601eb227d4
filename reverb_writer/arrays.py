"""Arrays of NumPy, PyTorch, JAX and other libraries, through the array API of array-api-compat."""

from __future__ import annotations

import importlib
from types import NoneType
from typing import Any

import numpy as np

from reverb_writer.errors import StructureError
from reverb_writer.lazy import needs

_EXTRAS = {"torch": "torch", "jax": "jax", "jaxlib": "jax"}
"""Extras of this package, by library, that install array-api-compat; `arrays` for other libraries."""

Array = Any
"""An array of NumPy or another library of array-api-compat."""


def array_namespace(*arrays: Any) -> Any:
    """Return the library of the arrays: NumPy, or the only other one."""
    own = (np.ndarray, np.generic, int, float, list, tuple, NoneType)
    if all(isinstance(array, own) for array in arrays):
        return np
    kinds = {type(array) for array in arrays if not isinstance(array, own)}
    names = ", ".join(sorted(kind.__name__ for kind in kinds))
    extras = {_EXTRAS.get(kind.__module__.partition(".")[0], "arrays") for kind in kinds}
    with needs(f"Arrays of other libraries than NumPy ({names})", f"reverb-writer[{','.join(sorted(extras))}]"):
        compat = importlib.import_module("array_api_compat")
    try:
        return compat.array_namespace(*(array for array in arrays if not isinstance(array, int | float | NoneType)))
    except TypeError:
        given = sorted({type(array).__name__ for array in arrays if not isinstance(array, int | float | NoneType)})
        raise StructureError(
            f"all arrays must be of one library that array-api-compat supports, got {', '.join(given)}. Convert them "
            "first; `dataset.as_torch()` gives batches of tensors."
        ) from None


def as_array(xp: Any, x: Any) -> Array:
    """Convert a list to an array; an array is returned unchanged."""
    return x if hasattr(x, "ndim") else xp.asarray(x)  # `torch.asarray` would drop a tensor's gradients


def array_like(xp: Any, x: Any, like: Array) -> Array:
    """Convert `x`, such as a NumPy array, to an array of the library `xp` on the device of `like`."""
    is_tensor = hasattr(like, "get_device")  # JAX moves arrays by itself
    return xp.asarray(x, device=like.device) if is_tensor else as_array(xp, x) if xp is np else xp.asarray(x)


def as_bool(xp: Any, x: Any) -> Array:
    """Return flags as booleans; numbers are True where they are not 0."""
    x = as_array(xp, x)
    return x if is_bool(xp, x) else x != 0


def is_bool(xp: Any, x: Array) -> bool:
    """Return whether an array has booleans."""
    return bool(x.dtype == (np.bool_ if xp is np else xp.bool))


def as_float(xp: Any, x: Any) -> Array:
    """Return an array with a floating dtype: the same array if possible."""
    x = as_array(xp, x)
    return x if is_float(xp, x) else x * 1.0


def is_float(xp: Any, x: Array) -> bool:
    """Return whether an array has a floating dtype."""
    return bool(xp.result_type(x.dtype, xp.float32) == x.dtype)


def concatenated(xp: Any, arrays: Any, axis: int) -> Array:
    """Concatenate arrays along an axis."""
    concat = xp.concatenate if xp is np else xp.concat  # NumPy 1.26 has no `concat`
    return concat(arrays, axis=axis)


def take_rows(xp: Any, x: Array, rows: Any) -> Array:
    """Return some rows of an array by number; `xp` is its library, unless it is a NumPy array."""
    if isinstance(x, np.ndarray):  # such as strings among JAX arrays
        return x.take(_on_host(rows), axis=0)
    return xp.take(x, array_like(xp, rows, x), axis=0)


def _on_host(numbers: Any) -> Any:
    return np.asarray(numbers.cpu() if hasattr(numbers, "cpu") else numbers)


def take_along_time(xp: Any, x: Array, numbers: Array) -> Array:
    """Return rows of x [B, T, ...] by their numbers [B, T] in each window, or rows of x [N, ...] by numbers [N]."""
    if numbers.ndim == 1:
        return take_rows(xp, x, numbers)
    windows = np.arange(x.shape[0])[:, None]
    if isinstance(x, np.ndarray):
        return x[windows, _on_host(numbers)]
    return x[array_like(xp, windows, x), array_like(xp, numbers, x)]


def copied(x: Array) -> Array:
    """Return a copy of an array; an immutable array of JAX is returned unchanged."""
    if hasattr(x, "clone"):  # a tensor, with its gradients
        return x.clone()
    return x if type(x).__module__.startswith("jax") else x.copy()


def pinned(leaf: Any) -> Any:
    """Return a tensor in pinned memory; other leaves unchanged, such as strings, which are arrays of NumPy."""
    return leaf.pin_memory() if hasattr(leaf, "pin_memory") else leaf


def with_axes(x: Array, ndim: int) -> Array:
    """Append axes of size 1 to an array until it has `ndim` axes."""
    return x.reshape((*x.shape, *(1,) * (ndim - x.ndim)))


def any_true(x: Array) -> bool:
    """Return whether any flag is set; False while JAX traces a function, because there are no numbers yet."""
    try:
        return bool(x.any())
    except TypeError:
        return False
