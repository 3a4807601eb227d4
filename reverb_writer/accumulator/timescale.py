"""One timescale of an accumulator: its columns, how many of their rows are filled, and which values they accept.

All leaves of a row are checked before one is written.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tree

from reverb_writer.arguments import integer
from reverb_writer.errors import OutOfRangeError, StructureError
from reverb_writer.leaves import Fit, convert, mismatch
from reverb_writer.nests import check_same_leaves, flattener, map_present, named_leaves, packer, structure_of
from reverb_writer.steps import leaf_spec

Array = npt.NDArray[Any]

_NO_NUMBERS = "OSUTMm"  # kinds of dtypes: objects, strings, times
_HELD = 65_504  # every floating dtype of NumPy holds smaller numbers
_ARRAYS = (np.ndarray, np.generic)
_FLAT = (*_ARRAYS, bool, int, float)
_LIKE = "as in the example"
_ADVICE = "Round it yourself, choose another dtype in the example, or pass lossy_casts=True."

_dtype_and_shape = operator.attrgetter("dtype", "shape")


class Timescale:
    """Columns [N, ...], or [...] for a single item, that are filled row by row."""

    def __init__(self, name: str, example: Any, capacity: Any = ..., *, lossy: bool) -> None:
        """Allocate the columns.

        Args:
            name: for messages.
            example: nest of arrays, numbers or specs: a row, or all rows if `capacity` is `...`.
            capacity: rows, >= 1; None for a single item; `...` to read it off the shapes of `example`.
            lossy: whether a cast may change a value.
        """
        self.name = name
        self.count = 0
        self._policy = Fit.LOSSY if lossy else Fit.LOSSLESS
        self._where = f"timescale '{name}'"
        self._paths, leaves = named_leaves(example, self._where)
        self._names = [f"{self._where}, leaf `{path}`" if path else self._where for path in self._paths]
        self._pack = packer(structure_of(example))
        self._flatten = flattener(example)
        specs = list(map(_spec, leaves, self._names))
        shapes = [shape for dtype, shape in specs if dtype is not None]
        if not shapes:
            raise StructureError(f"{self._where} has no array leaves.")
        rows: tuple[int, ...] = ()
        if capacity is ...:
            self.single, self.capacity = _guess(self._where, shapes)
        else:
            self.single = capacity is None
            self.capacity = 1 if self.single else integer(f"capacities['{name}']", capacity, minimum=1)
            rows = () if self.single else (self.capacity,)
        self.columns = [None if dtype is None else np.zeros(rows + shape, dtype) for dtype, shape in specs]
        first = 0 if self.single else 1
        # Dtype and shape of each leaf of a row; None where the example has None.
        self._expected = [(None, ()) if leaf is None else (leaf.dtype, leaf.shape[first:]) for leaf in self.columns]

    def add(self, data: Any) -> None:
        """Write the next row, or raise and change nothing."""
        count = self.count
        if count >= self.capacity:
            raise OutOfRangeError(
                f"Timescale '{self.name}' has {self.capacity} slots, but you tried to add at index {count}."
            )
        try:
            leaves = self._flatten(data)
        except (TypeError, LookupError):
            leaves = ()
        if len(leaves) != len(self._paths):  # the containers may be of other types
            paths, leaves = named_leaves(data, self._where)
            check_same_leaves(self._where, paths, self._paths, "the example")
        try:
            exact = list(map(_dtype_and_shape, leaves)) == self._expected
        except AttributeError:  # Python numbers
            exact = False
        if not exact:
            leaves = list(map(self._convert, leaves, self._expected, self._names))
        at = ... if self.single else count
        for column, value in zip(self.columns, leaves, strict=True):
            if column is not None:
                column[at] = value
        self.count = count + 1

    def pack(self, none: Any = None) -> Any:
        """Return the nest of columns, with `none` where the example has None."""
        return self._pack([none if column is None else column for column in self.columns])

    def without_time(self) -> Any:
        """Return a nest of booleans: whether learners get the leaf without a dimension of rows."""
        bare = self.single and any(column.shape[:1] != (1,) for column in self.columns if column is not None)
        return self._pack([() if column is None else bare for column in self.columns])

    def replace_columns(self) -> None:
        """Allocate new columns: the caller of `build` owns the old ones."""
        self.columns = map_present(np.empty_like, self.columns)

    def zero_missing_rows(self) -> None:
        """Set rows that were not added to zero."""
        if self.count < self.capacity:
            for column in self.columns:
                if column is not None:
                    column[... if self.single else slice(self.count, None)] = 0

    def _convert(self, value: Any, expected: tuple[Any, tuple[int, ...]], name: str) -> Any:
        """Return a value that NumPy can assign to a row of a leaf's column, or raise."""
        dtype, shape = expected
        if value is None and dtype is None:
            return None
        if dtype is not None:  # most leaves need no conversion
            if isinstance(value, _ARRAYS) and value.dtype == dtype and value.shape == shape:
                return value
            if type(value) is float and dtype.kind == "f" and abs(value) < _HELD:
                return value
        is_nest = not isinstance(value, _FLAT) and tree.is_nested(value)
        if value is None or dtype is None or is_nest:
            wanted = "None" if dtype is None else f"an array of {dtype} {shape}"
            raise StructureError(f"{name}: {type(value).__name__}, expected {wanted} {_LIKE}.")
        array = np.asarray(value)
        # Also integers, which `same_kind` would wrap, and 2.0, which it would refuse for an integer.
        found = convert(array, dtype, name, self._policy, _ADVICE)
        if found is not None and found.shape == shape:
            return found
        if found is not None:
            with contextlib.suppress(ValueError):  # the shape does not fit
                row = np.empty(shape, dtype)
                np.copyto(row, found)
                return row
        raise mismatch(name, array.dtype, array.shape, dtype, shape, _LIKE)


def _guess(where: str, shapes: Sequence[tuple[int, ...]]) -> tuple[bool, int]:
    """Return whether leaves of these shapes are a single item, and how many rows they have."""
    if any(not shape for shape in shapes) or all(shape[0] == 1 for shape in shapes):
        return True, 1
    leading = [shape[0] for shape in shapes]
    if len(set(leading)) > 1:
        raise StructureError(
            f"{where}: all leaves of a buffered timescale must share the same leading dimension, got {leading}. For a "
            "single item make one leaf 0-d or all of shape (1, ...), or pass `capacities`."
        )
    return False, leading[0]


def _spec(leaf: Any, where: str) -> tuple[np.dtype[Any] | None, tuple[int, ...]]:
    if leaf is None:
        return None, ()
    dtype, shape = leaf_spec(leaf, where)
    if dtype.kind in _NO_NUMBERS or dtype.names:
        raise StructureError(f"{where}: {dtype} is not a number. Encode it as one, or write it with an observer.")
    return dtype, shape
