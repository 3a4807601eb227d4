"""The structure of a step: its leaves, the leaf that marks the end of an episode, and its padding step.

A step is any nest of dicts, lists, tuples and named tuples. Its leaves are arrays, numbers or strings. All steps of an
observer must have the structure, dtypes and shapes of the first step.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import keyword
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tree

from reverb_writer.errors import StructureError
from reverb_writer.leaves import NO_NUMBERS, Fit, as_array, fit, python_numbers, stored_dtype, zeros
from reverb_writer.nests import at_leaf, check_same_leaves, flattener, named_leaves, packer, structure_of
from reverb_writer.rows.layouts import STEP_FIRST, STEP_LAST

FIRST, MID, LAST = STEP_FIRST, 1, STEP_LAST
"""Step types, as in dm_env and TF-Agents."""

_NUMPY = np.ndarray, np.generic

_dtype_and_shape = operator.attrgetter("dtype", "shape")


class Trajectory(NamedTuple):
    """One step in TF-Agents' form: the fields of its `Trajectory`, without TensorFlow.

    `observation` and `action` are of time t; `reward` and `discount` are the results of the action. An episode of
    E environment steps has E + 1 steps. The last one, the boundary step, has `step_type` LAST and the final
    observation.

    Attributes:
        step_type: int32, FIRST 0, MID 1 or LAST 2.
        observation, action: nests of arrays.
        policy_info: nest of the policy's other results; may be empty.
        next_step_type: int32, type of the next step.
        reward, discount: float32.
    """

    step_type: Any
    observation: Any
    action: Any
    policy_info: Any
    next_step_type: Any
    reward: Any
    discount: Any


@functools.lru_cache(maxsize=256)
def named_tuple(name: str, fields: tuple[str, ...]) -> Any:
    """Return a class of named tuples, the same for the same arguments; `Trajectory` if it has these fields.

    Names that are invalid in Python are changed. A dict accepts any names, but would sort the leaves.
    """
    if fields == Trajectory._fields:
        return Trajectory
    usable = name.isidentifier() and not keyword.iskeyword(name)
    return collections.namedtuple(name if usable else "NamedTuple", fields, rename=True)  # noqa: PYI024  # made at run time


class StepStructure:
    """The structure, dtypes and shapes that every step must have. Immutable; safe to share between threads.

    Attributes:
        example: a nest of the same structure, with None for leaves.
        pack: a function that puts leaves, one per path, into the nest.
        paths: name of each leaf, such as `observation/rgb`.
        dtypes: NumPy dtype of each leaf, native byte order; `object` for strings.
        shapes: shape of each leaf, without time.
    """

    def __init__(self, example: Any, *, batch_size: int | None = None, is_spec: bool = False) -> None:
        """Take the structure from the first step; with `is_spec`, from a nest of objects with `dtype` and `shape`.

        `batch_size` is N if the leaves of steps are [N, ...]. `shapes` do not contain N; with `is_spec`, the shapes of
        `example` do not contain it either. An example that cannot be a step raises StructureError.
        """
        self.paths, leaves = named_leaves(example, "first step")
        if not leaves:
            raise StructureError(f"a step must have at least one leaf, got {example!r}.")
        self.example = structure_of(example)
        self.pack = packer(self.example)
        self.batch_size = batch_size
        read = leaf_spec if is_spec else _array_spec
        specs = [read(leaf, at_leaf("first step", path)) for path, leaf in zip(self.paths, leaves, strict=True)]
        self.dtypes = tuple(dtype for dtype, _ in specs)
        self.shapes = tuple(shape for _, shape in specs)
        batch = () if batch_size is None else (batch_size,)
        if batch and not is_spec:
            for path, shape in zip(self.paths, self.shapes, strict=True):
                if shape[:1] != batch:
                    raise StructureError(
                        f"{at_leaf('first step', path)}: shape {shape}, expected ({batch_size}, ...), one row for "
                        "each environment."
                    )
            self.shapes = tuple(shape[1:] for shape in self.shapes)
        self._expected = [(dtype, batch + shape) for dtype, shape in zip(self.dtypes, self.shapes, strict=True)]
        self._numbers = [python_numbers(dtype) if shape == () else NO_NUMBERS for dtype, shape in self._expected]
        # Strings need a check one by one, and NumPy cannot read TensorFlow's scalars of bfloat16.
        is_slow = any(of.kind == "O" or (of.name == "bfloat16" and not shape) for of, shape in self._expected)
        self._fast = None if is_slow else self._expected
        # The type of a NumPy scalar shows its dtype and shape, and is read in a third of the time.
        shaped = [bool(shape) for _, shape in self._expected]
        is_array = [has_shape or isinstance(leaf, np.ndarray) for has_shape, leaf in zip(shaped, leaves, strict=True)]
        self._types = [np.ndarray if array else of.type for array, of in zip(is_array, self.dtypes, strict=True)]
        self._arrays = [(number, of) for number, of in enumerate(self._expected) if is_array[number]]
        scalars = {of.kind for array, of in zip(is_array, self.dtypes, strict=True) if not array}
        self._has_scalars = bool(scalars) and not is_slow and scalars <= set("biufc")  # other types have units
        self._flatten = flattener(example)

    def flatten(self, step: Any, which: int | str) -> Sequence[Any]:
        """Check the leaves of a step, and return them in the order of `paths`: the step's own arrays if they fit.

        Otherwise arrays or scalars with the expected dtypes and shapes. Strings are `bytes`. `which` is the number of
        the step, or its name in messages.
        """
        leaves = self.fitting(step)
        return self.convert(step, which) if leaves is None else leaves

    def fitting(self, step: Any) -> Sequence[Any] | None:
        """Return the leaves of a step if they fit as they are, in the order of `paths`; None for `convert`."""
        try:
            leaves = self._flatten(step)
            if self._has_scalars and list(map(type, leaves)) == self._types:
                for number, expected in self._arrays:
                    leaf = leaves[number]
                    if (leaf.dtype, leaf.shape) != expected:
                        return None
                return leaves
            return leaves if list(map(_dtype_and_shape, leaves)) == self._fast else None
        except (AttributeError, TypeError, LookupError):
            return None

    def padding_step(self) -> list[Any]:
        """Return the leaves of a padding step: zeros, and in a trajectory `step_type` LAST, as in TF-Agents."""
        leaves = list(map(zeros, self.dtypes, self.shapes))
        if "next_step_type" in self.paths and "step_type" in self.paths:
            leaves[self.paths.index("step_type")][...] = LAST
        return leaves

    def convert(self, step: Any, which: int | str) -> list[Any]:
        """Convert Python numbers, strings, other libraries' tensors and byte orders, or raise StructureError."""
        where = which if isinstance(which, str) else f"step {which}"
        leaves: Sequence[Any] = ()
        with contextlib.suppress(TypeError, LookupError):
            leaves = self._flatten(step)  # several times as fast as `named_leaves`
        if len(leaves) != len(self.paths) or any(map(tree.is_nested, leaves)):
            paths, leaves = named_leaves(step, where)
            check_same_leaves(where, paths, self.paths, "the first step")
        found = []
        for leaf, path, (dtype, shape), (kinds, low, high) in zip(
            leaves, self.paths, self._expected, self._numbers, strict=True
        ):
            if type(leaf) in kinds and low <= leaf <= high:
                found.append(dtype.type(leaf))
            elif isinstance(leaf, _NUMPY) and dtype.kind != "O" and leaf.dtype == dtype and leaf.shape == shape:
                found.append(leaf)
            else:
                found.append(fit(leaf, dtype, shape, at_leaf(where, path), "as in the first step", Fit.EXACT))
        return found


def leaf_spec(leaf: Any, where: str) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Return the dtype of a stored leaf, and its shape; the leaf may be a spec, with only `dtype` and `shape`."""
    if hasattr(leaf, "dtype") and hasattr(leaf, "shape") and not hasattr(leaf, "__array__"):
        dtype, sizes = leaf.dtype, leaf.shape
        if sizes is None or None in tuple(sizes):
            raise StructureError(
                f"{where}: shape {sizes}, expected one without unknown sizes and without the time dimension."
            )
        return stored_dtype(np.dtype(getattr(dtype, "as_numpy_dtype", dtype))), tuple(sizes)
    return _array_spec(leaf, where)


def _array_spec(leaf: Any, where: str) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Return the dtype of a stored array, number or string, and its shape."""
    array = as_array(leaf, where, "Take it out of the step, or turn it into an array.")
    return stored_dtype(array.dtype), array.shape
