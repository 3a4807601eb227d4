"""What must be known of a step: its leaves, whether it ends the episode, what a padding step of its kind looks like.

A step is any nest of dicts, lists, tuples and named tuples; its leaves are arrays, numbers or strings, in the order of
dm-tree, which Reverb's own client uses too. What the first step looks like, all others must look like.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import tree

from reverb_writer.errors import StructureError

__all__ = [
    "FIRST",
    "LAST",
    "MID",
    "StepStructure",
    "Trajectory",
    "flattener",
    "named_leaves",
    "step_bytes",
    "zeros",
]

FIRST, MID, LAST = 0, 1, 2
"""Step types, as in dm_env and TF-Agents."""

Array = npt.NDArray[Any]

_dtype_and_shape = operator.attrgetter("dtype", "shape")


class Trajectory(NamedTuple):
    """One step in TF-Agents' form: the fields of its `Trajectory`, without TensorFlow.

    `observation` and `action` are those of time t, `reward` and `discount` what the action led to. An episode of E
    environment steps has E + 1 steps: the last, the boundary step, has `step_type` LAST and holds the final
    observation.
    """

    step_type: Any
    observation: Any
    action: Any
    policy_info: Any
    next_step_type: Any
    reward: Any
    discount: Any


class StepStructure:
    """The structure, dtypes and shapes that every step must have.

    Immutable; safe to share between threads.

    Attributes:
        example: a nest of the same structure, with None for leaves.
        paths: name of each leaf, such as `observation/rgb`.
        dtypes: NumPy dtype of each leaf, native byte order; `object` for strings.
        shapes: shape of each leaf, without time.
    """

    def __init__(self, example: Any, *, batch_size: int | None = None, is_spec: bool = False) -> None:
        """Learn from the first step, or from a nest of anything with `dtype` and `shape` (array specs).

        Args:
            example: a step, or its spec.
            batch_size: N if the leaves of steps are [N, ...]; `shapes` go without N.
            is_spec: whether the leaves of `example` go without N, too.

        Raises:
            StructureError: there is no leaf; a leaf is no array, number or string, or has no batch of `batch_size`; or
                `step_type` or `is_last` is no integer or boolean.
        """
        self.paths, leaves = named_leaves(example, "first step")
        if not leaves:
            raise StructureError(f"a step must have at least one leaf, got {example!r}.")
        self.example = tree.map_structure(lambda _: None, example)
        self.batch_size = batch_size
        specs = [_spec(leaf, path) for path, leaf in zip(self.paths, leaves, strict=True)]
        self.dtypes = tuple(dtype for dtype, _ in specs)
        self.shapes = tuple(shape for _, shape in specs)
        batch = () if batch_size is None else (batch_size,)
        if batch and not is_spec:
            for path, shape in zip(self.paths, self.shapes, strict=True):
                if shape[:1] != batch:
                    raise StructureError(
                        f"first step, leaf `{path}`: shape {shape}, expected ({batch_size}, ...), a row an environment."
                    )
            self.shapes = tuple(shape[1:] for shape in self.shapes)
        self._expected = [(dtype, batch + shape) for dtype, shape in zip(self.dtypes, self.shapes, strict=True)]
        # What is in an object array must be looked at, so strings never go the fast way.
        self._fast = None if np.dtype(object) in self.dtypes else self._expected
        self._flatten = flattener(example)
        self._boundary = self._find_boundary()

    def flatten(self, step: Any, index: int) -> Sequence[Any]:
        """Return the leaves of a step, checked.

        Args:
            step: the step.
            index: its number, for the message.

        Returns:
            Arrays, or what NumPy assigns as one, of the dtypes and shapes expected, in the order of `paths`. They may
            be the step's own. Strings are `bytes`.

        Raises:
            StructureError: names the first leaf that differs from the first step, what it is and what is expected.
        """
        try:
            leaves = self._flatten(step)
            if list(map(_dtype_and_shape, leaves)) == self._fast:
                return leaves
        except (AttributeError, TypeError, LookupError):
            pass
        return self._convert(step, index)

    def ends_episode(self, leaves: Sequence[Any]) -> Any:
        """Return whether these leaves are those of a boundary step: `step_type` is LAST, or `is_last` is set.

        [N] booleans if the structure is batched. False where a step has neither.
        """
        if self._boundary is None:
            return False if self.batch_size is None else np.zeros(self.batch_size, bool)
        index, last = self._boundary
        if self.batch_size is None:
            return int(leaves[index]) == last
        return np.asarray(leaves[index]) == last

    def padding_step(self) -> list[Any]:
        """Return the leaves of a padding step: zeros, but LAST -> FIRST in the step types of a trajectory.

        Source: TF-Agents `trajectory.boundary` as its observers pad (behaviour, A.1).
        """
        leaves = list(map(zeros, self.dtypes, self.shapes))
        if "next_step_type" in self.paths and "step_type" in self.paths:
            leaves[self.paths.index("step_type")][...] = LAST
        return leaves

    def pack(self, leaves: Sequence[Any]) -> Any:
        """Put leaves, one for each path, back into the nest."""
        return tree.unflatten_as(self.example, leaves)

    def _convert(self, step: Any, index: int) -> list[Any]:
        """Take the slow way: name what is wrong, or convert numbers, strings, foreign tensors and byte orders."""
        paths, leaves = named_leaves(step, f"step {index}")
        if paths != self.paths:
            missing = ", ".join(f"`{path}`" for path in self.paths if path not in paths) or "none"
            extra = ", ".join(f"`{path}`" for path in paths if path not in self.paths) or "none"
            raise StructureError(
                f"step {index}: its leaves are not those of the first step. Missing: {missing}; unexpected: {extra}."
            )
        return [
            _as_array(leaf, dtype, shape, f"step {index}, leaf `{path}`")
            for leaf, path, (dtype, shape) in zip(leaves, paths, self._expected, strict=True)
        ]

    def _find_boundary(self) -> tuple[int, int] | None:
        """Return which leaf tells a boundary step, and its value there."""
        for name, last in (("step_type", LAST), ("is_last", 1)):
            if name in self.paths:
                index = self.paths.index(name)
                dtype, shape = self.dtypes[index], self.shapes[index]
                if shape or dtype.kind not in "biu":
                    raise StructureError(
                        f"first step, leaf `{name}`: {dtype} {shape}, expected an integer or a boolean, shape (): it "
                        "tells the end of an episode. Take off a batch dimension, or rename the leaf."
                    )
                return index, last
        return None


def zeros(dtype: np.dtype[Any], shape: tuple[int, ...]) -> Any:
    """Return a leaf of zeros, or of empty strings if the dtype is `object`."""
    return np.full(shape, b"", object)[()] if dtype.kind == "O" else np.zeros(shape, dtype)


def step_bytes(dtypes: Sequence[np.dtype[Any]], shapes: Sequence[tuple[int, ...]]) -> int:
    """Return the size of a step, all leaves together; a string counts as a pointer."""
    return sum(dtype.itemsize * math.prod(shape) for dtype, shape in zip(dtypes, shapes, strict=True))


def named_leaves(step: Any, where: str) -> tuple[tuple[str, ...], list[Any]]:
    """Return the paths and the leaves of a nest.

    Raises:
        StructureError: its keys cannot be sorted.
    """
    try:
        with_paths = tree.flatten_with_path(step)
    except TypeError as error:
        raise StructureError(f"{where}: {error} Use keys of one kind.") from error
    return tuple("/".join(map(str, path)) for path, _ in with_paths), [leaf for _, leaf in with_paths]


def _spec(leaf: Any, path: str) -> tuple[np.dtype[Any], tuple[int, ...]]:
    if hasattr(leaf, "dtype") and hasattr(leaf, "shape") and not hasattr(leaf, "__array__"):
        dtype, sizes = leaf.dtype, leaf.shape
        if sizes is None or None in tuple(sizes):
            raise StructureError(
                f"spec, leaf `{path}`: shape {sizes}, expected one without unknown sizes, time left out."
            )
        return stored_dtype(np.dtype(getattr(dtype, "as_numpy_dtype", dtype))), tuple(sizes)
    array = np.asarray(leaf)
    if array.dtype == object and not all(isinstance(item, str | bytes) for item in array.flat):
        raise StructureError(
            f"first step, leaf `{path}`: {type(leaf).__name__} is no array, number or string. Take it out of the step, "
            "or turn it into an array."
        )
    return stored_dtype(array.dtype), array.shape


def stored_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype as which a leaf is stored: `object` for strings, else the same in native byte order."""
    if dtype.kind in "SUT":
        return np.dtype(object)
    return dtype if dtype.isnative else dtype.newbyteorder("=")  # the very same one is compared faster


def _as_array(leaf: Any, dtype: np.dtype[Any], shape: tuple[int, ...], where: str) -> Any:
    # NumPy's own strings lose NULs at their end.
    array = np.array(leaf, object) if isinstance(leaf, str | bytes) else np.asarray(leaf)
    if array.shape == shape:
        if stored_dtype(array.dtype) != dtype:
            number = _as_number(leaf, dtype)
            if number is not None:
                return number
        elif dtype.kind == "O":
            return _as_bytes(array, where)
        else:
            return array.astype(dtype, copy=False)
    got = type(leaf).__name__ if array.dtype == object else array.dtype
    expected = "strings" if dtype.kind == "O" else dtype
    raise StructureError(f"{where}: {got} {array.shape}, expected {expected} {shape} as in the first step.")


def _as_number(leaf: Any, dtype: np.dtype[Any]) -> Array | None:
    """Return a Python number, which has no dtype of its own, as an array: 0 is a good float32, but 0.5 is no int32."""
    if type(leaf) not in (bool, int, float) or dtype.kind in "bO":
        return None
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return np.array(leaf, dtype) if type(leaf) is not float and limits.min <= leaf <= limits.max else None
    try:
        with np.errstate(over="ignore"):
            number = np.array(float(leaf)).astype(dtype)
    except OverflowError:
        return None
    return number if np.isfinite(number) or not math.isfinite(leaf) else None


def _as_bytes(strings: Array, where: str) -> Any:
    """Return an object array of `bytes`, or the one that is in a 0-d array."""
    result = np.empty(strings.shape, object)
    for index in np.ndindex(strings.shape):
        string = strings[index]
        if not isinstance(string, str | bytes):
            raise StructureError(f"{where}: {type(string).__name__} is no string, which the first step had there.")
        try:
            result[index] = string.encode() if isinstance(string, str) else bytes(string)
        except UnicodeEncodeError as error:
            raise StructureError(f"{where}: {string!r} is not Unicode: {error.reason}. Pass it as bytes.") from None
    return result[()]


def flattener(example: Any) -> Callable[[Any], Sequence[Any]]:
    """Return a function that takes nests of exactly this structure apart, faster than a walk that must find it out.

    For any other structure it raises TypeError or LookupError, or returns too few leaves.
    """
    if not tree.is_nested(example):
        return lambda step: (step,)
    if not isinstance(example, Mapping | list | tuple):
        return tree.flatten  # type: ignore[no-any-return]  # attrs classes
    keys: Sequence[Any] = sorted(example) if isinstance(example, Mapping) else range(len(example))
    nests = {key: example[key] for key in keys if tree.is_nested(example[key])}
    leaves = [key for key in keys if key not in nests]
    if len(leaves) > 1 and not any(map(len, nests.values())):
        return _flat(type(example), leaves, nests)
    return _nested(type(example), [(key, flattener(example[key]) if key in nests else None) for key in keys])


def _flat(kind: type[Any], leaves: Sequence[Any], empty: Mapping[Any, Any]) -> Callable[[Any], Sequence[Any]]:
    """Take apart what has leaves, and empty containers such as TF-Agents' `policy_info`, and nothing else."""
    get = operator.itemgetter(*leaves)
    size = len(leaves) + len(empty)

    def flatten(step: Any) -> Sequence[Any]:
        if type(step) is not kind or len(step) != size:
            raise TypeError
        for key in empty:
            if len(step[key]):
                raise TypeError
        found: tuple[Any, ...] = get(step)
        return found

    return flatten


def _nested(
    kind: type[Any], parts: Sequence[tuple[Any, Callable[[Any], Sequence[Any]] | None]]
) -> Callable[[Any], list[Any]]:
    def flatten(step: Any) -> list[Any]:
        if type(step) is not kind or len(step) != len(parts):
            raise TypeError
        leaves: list[Any] = []
        for key, part in parts:
            if part is None:
                leaves.append(step[key])
            else:
                leaves += part(step[key])
        return leaves

    return flatten
