"""Check that a value fits a leaf of known dtype and shape, and convert it to the leaf's dtype.

Callers accept different conversions of dtype, which is an argument:

    `Fit`        numbers of another dtype                            Python numbers              used by
    -----------  --------------------------------------------------  --------------------------  --------------------
    EXACT        only another byte order                             if the dtype holds them     steps of observers
    LOSSLESS     if values are kept, except for rounding to a float  as for other dtypes         accumulators, spaces
    LOSSY        any number                                          any number                  accumulators, spaces

Only strings fit leaves of strings, whose dtype is `object`. A value that does not fit raises StructureError, which
describes the value and the expected leaf.
"""

from __future__ import annotations

import enum
import functools
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from reverb_writer.errors import StructureError

Array = npt.NDArray[Any]
Shape = tuple[int, ...]


class Fit(enum.Enum):
    """The accepted conversions of dtype; see the module's docstring."""

    EXACT = enum.auto()
    LOSSLESS = enum.auto()
    LOSSY = enum.auto()


_EXACT, _LOSSLESS, _ = Fit  # faster than attributes of the class


def stored_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype of a stored leaf: `object` for strings, otherwise the dtype in native byte order."""
    if dtype.kind in "SUT":
        return np.dtype(object)
    return dtype if dtype.isnative else dtype.newbyteorder("=")  # identical objects compare faster


NO_NUMBERS: Final[tuple[tuple[type, ...], float, float]] = (), 0, 0


def python_numbers(dtype: np.dtype[Any]) -> tuple[tuple[type, ...], float, float]:
    """Return the types of Python numbers that a dtype surely holds, and the least and the largest such number.

    >>> python_numbers(np.dtype("int8"))
    ((<class 'int'>,), -128, 127)
    """
    if dtype.kind == "b":
        return (bool,), False, True
    if dtype.kind in "iu":
        return (int,), int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
    if dtype.kind == "f":
        return (float, int), float(np.finfo(dtype).min), float(np.finfo(dtype).max)
    return NO_NUMBERS


def zeros(dtype: np.dtype[Any], shape: Shape) -> Any:
    """Return a leaf of zeros, or of empty strings if the dtype is `object`."""
    return np.full(shape, b"", object)[()] if dtype.kind == "O" else np.zeros(shape, dtype)


def host_array(value: Any) -> Array:
    """Convert numbers of any framework to NumPy; PyTorch tensors may have a gradient and be on any device.

    NumPy has no bfloat16, so short floats of PyTorch become float32. A string becomes an array of `object`.
    """
    if isinstance(value, str | bytes):
        return _string(value)
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        if value.is_floating_point() and value.element_size() < 4:  # noqa: PLR2004  # bytes of a float32
            value = value.float()
    return np.asarray(value)


def padded_rows(leaf: Array, num_rows: int) -> Array:
    """Return a copy of a leaf [T, ...] with zeros after its rows, [num_rows, ...]; num_rows >= T."""
    padded: Array = np.asarray(zeros(leaf.dtype, (num_rows, *leaf.shape[1:])))
    padded[: len(leaf)] = leaf
    return padded


def mismatch(
    where: str, got: Any, got_shape: Any, dtype: Any, shape: Any, like: str, action: str = ""
) -> StructureError:
    """Return the error for a value that does not fit, at `where`, such as `step 3, leaf `reward``.

    `like` is the reason for the expected form, such as `as in the first step`; `action` is a sentence with a remedy.
    """
    expected = "strings" if dtype == np.dtype(object) else dtype
    return StructureError(f"{where}: {got} {got_shape}, expected {expected} {shape} {like}.{action and ' ' + action}")


def _string(value: str | bytes) -> Array:
    return np.array(value, object)  # NumPy's fixed-width strings drop NUL characters at the end


def _read(value: Any, where: str, *, copy: bool = False) -> Array:
    if isinstance(value, str | bytes):
        return _string(value)
    try:
        try:
            return np.array(value) if copy else np.asarray(value)
        except ValueError:  # of TensorFlow: a scalar of bfloat16
            return np.array(value.numpy())
    except (
        TypeError,
        RuntimeError,
        ValueError,
        AttributeError,
    ) as error:  # of PyTorch: a gradient, bfloat16 or another device
        raise StructureError(f"{where}: {error}") from error


def as_array(value: Any, where: str, action: str, *, copy: bool = False) -> Array:
    """Convert an array, number or string to an array, strings to `object`; with `copy`, the result has its own memory.

    `where` begins the error's message, `action` ends it.
    """
    array = _read(value, where, copy=copy)
    if array.dtype.kind in "SUT":
        return array.astype(object)
    if array.dtype.kind == "O" and not all(isinstance(item, str | bytes) for item in array.flat):
        raise StructureError(f"{where}: {type(value).__name__} is not an array, number or string. {action}")
    return array


def env_flags(name: str, flags: Any, num_envs: int) -> npt.NDArray[np.bool_]:
    """Return the flags of N environments, [N]."""
    array = np.asarray(flags, bool)
    if array.shape != (num_envs,):
        raise StructureError(f"`{name}` has shape {array.shape}, expected ({num_envs},): one flag per environment.")
    return array


def as_bytes(strings: Array, where: str, like: str) -> Any:
    """Convert strings as Reverb stores them: to an object array of `bytes`, or `bytes` for no dimensions."""
    result = np.empty(strings.shape, object)
    for index in np.ndindex(strings.shape):
        string = strings[index]
        if not isinstance(string, str | bytes):
            raise StructureError(f"{where}: {type(string).__name__} is not a string, expected strings {like}.")
        try:
            result[index] = string.encode() if isinstance(string, str) else bytes(string)
        except UnicodeEncodeError as error:
            raise StructureError(f"{where}: {string!r} is not Unicode: {error.reason}. Pass it as bytes.") from None
    return result[()]


def fit(value: Any, dtype: np.dtype[Any], shape: Shape, where: str, like: str, policy: Fit, advice: str = "") -> Any:
    """Return `value` as an array of this dtype, `object` for strings, or raise StructureError if it does not fit.

    `policy` is the set of accepted conversions; `advice` is a remedy for a number that the dtype cannot hold. `where`
    and `like` are for the message, as in `mismatch`.
    """
    array = _read(value, where)
    if array.shape == shape:
        found = convert(array, dtype, where, policy, advice)
        if found is None and policy is Fit.EXACT and type(value) in (bool, int, float):
            found = _number(value, dtype)
        if found is not None:
            return as_bytes(found, where, like) if policy is Fit.EXACT and dtype.kind == "O" else found
    raise mismatch(
        where, type(value).__name__ if array.dtype == object else array.dtype, array.shape, dtype, shape, like
    )


def convert(array: Array, dtype: np.dtype[Any], where: str, policy: Fit, advice: str = "") -> Array | None:
    """Return an array in this dtype, or None if the policy does not accept its dtype; arguments as for `fit`.

    With `LOSSLESS`, a number that the dtype cannot hold raises StructureError.
    """
    if array.dtype == dtype:
        return array
    relation, limit = _relation(array.dtype, dtype)
    if relation == _SAME:
        return array.astype(dtype)
    if relation == _NONE or policy is _EXACT:
        return None
    if relation == _SAFE:
        return array.astype(dtype)
    # The fastest check: if the sum of the squares is below the limit, each number is below it.
    if limit and (abs(array.item()) if array.ndim == 0 else float(abs(np.vdot(array, array)))) < limit:
        return array.astype(dtype)
    cast, kept = _cast(array, dtype)
    if policy is _LOSSLESS and not kept.all():
        number = array[~kept].flat[0].item()
        raise StructureError(f"{where}: {number!r} ({array.dtype}) does not fit into {dtype}.{advice and ' ' + advice}")
    return cast


def _number(value: float, dtype: np.dtype[Any]) -> Array | None:
    """Convert a Python number to an array if the dtype holds it: 0 may be a float32, 0.5 cannot be an int32."""
    if dtype.kind in "bO" or (dtype.kind in "iu" and type(value) is float):
        return None
    try:
        array = np.asarray(value if dtype.kind in "iu" else float(value))
    except OverflowError:
        return None
    if _relation(array.dtype, dtype)[0] == _NONE:
        return None
    cast, kept = _cast(array, dtype)
    return cast if kept.all() else None


_SAME, _SAFE, _NUMBERS, _NONE = range(4)


@functools.lru_cache(maxsize=1024)
def _relation(source: np.dtype[Any], target: np.dtype[Any]) -> tuple[int, float]:
    """Return the relation of two dtypes, and the target's largest number if both are floats, or 0.

    `_SAME` if only the byte order differs; `_SAFE` if the target holds all values; `_NUMBERS` if both have numbers and
    no imaginary part is lost; otherwise `_NONE`.
    """
    if stored_dtype(source) == target:
        return _SAME, 0
    if {source.kind, target.kind} & {*"OSUTMm"} or (source.kind == "c" != target.kind):
        return _NONE, 0
    if np.can_cast(source, target, "safe"):
        return _SAFE, 0
    return _NUMBERS, float(np.finfo(target).max) if {source.kind, target.kind} <= {*"fc"} else 0


def _cast(array: Array, dtype: np.dtype[Any]) -> tuple[Array, npt.NDArray[np.bool_]]:
    """Cast an array; return it, and flags of the numbers that are kept, except for rounding to the nearest float."""
    with np.errstate(all="ignore"):
        cast = array.astype(dtype)
        is_float = dtype.kind in "fcV"  # the kind of ml_dtypes' bfloat16 is V
        return cast, np.asarray(np.isfinite(cast) == np.isfinite(array) if is_float else cast == array)
