"""Rows of one structure, in arrays that grow by doubling, so that appending a row takes constant time on average.

A row is staged: written to the first free place, where it does not count until `size` is raised. So several columns can
add a row together: stage it in all, then raise all sizes; if one refuses its part, nothing has changed.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from reverb_writer.errors import StructureError
from reverb_writer.leaves import as_array, mismatch
from reverb_writer.nests import check_same_leaves, common_length, flattener, named_leaves, packer, structure_of

_CAPACITY = 64

_PYTHON_DTYPES = frozenset(map(np.dtype, (bool, np.int64, np.float64)))

_ANY = frozenset((dict,))
"""The type of untyped rows that are not checked further."""

Array = npt.NDArray[Any]
Index = slice | Array

_dtype_and_shape = operator.attrgetter("dtype", "shape")
_NUMBERS: tuple[type[Any], ...] = (bool, int, float, *(np.dtype(code).type for code in "?bhilqBHILQefd"))


class Block(NamedTuple):
    """Checked rows of one structure."""

    example: Any  # a nest of their structure; its leaves have no meaning
    paths: tuple[str, ...]  # name of each leaf; empty for an array without a nest
    leaves: list[Array]  # [m, ...] each, owned

    @property
    def num_rows(self) -> int:
        """How many rows these are."""
        return len(self.leaves[0])


def stacked(items: Sequence[Any], what: str) -> Block:
    """Return a block of items, each a nest without time; dtypes are those of `np.stack`."""
    paths, first = _leaves(items[0], what)
    columns: list[list[Array]] = [[leaf] for leaf in first]
    for index, item in enumerate(items[1:], 1):
        others, leaves = _leaves(item, what)
        check_same_leaves(f"{what} {index}", others, paths, "the first row")
        for path, column, leaf in zip(paths, columns, leaves, strict=True):
            _check_leaf(leaf, column[0].dtype, column[0].shape, leaf.shape, f"{what} {index}{_at(path)}")
            column.append(leaf)
    return Block(items[0], paths, [np.stack(column) for column in columns])


def batched(nest: Any, what: str) -> Block:
    """Return a block of a nest with leaves [m, ...], copied."""
    paths, leaves = _leaves(nest, what, copy=True)
    common_length(leaves, what)
    return Block(nest, paths, leaves)


def listed(leaf: Array) -> list[Any]:
    """Return a leaf [m, ...] as a list; numbers of bool, int64 and float64 become Python numbers."""
    return leaf.tolist() if leaf.ndim == 1 and leaf.dtype in _PYTHON_DTYPES else list(leaf)


def as_objects(items: Sequence[Any]) -> Block:
    """Return a block of any objects, not copied."""
    leaf = np.empty(len(items), object)
    for index, item in enumerate(items):
        leaf[index] = item
    return Block(None, ("",), [leaf])


class Columns:
    """Rows with the structure and shapes of the first row.

    Dtypes widen to those of `np.stack` of all rows, so an integer beyond 2**53 is rounded where a float joins
    its column.
    """

    __slots__ = (
        "_arrays",
        "_example",
        "_expected",
        "_flatten",
        "_pack",
        "_parts",
        "_paths",
        "_types",
        "_untyped",
        "single_leaf",
        "size",
    )

    def __init__(self, block: Block | None = None, *, untyped: bool = False) -> None:
        """Start with the rows of a block, or with none; `untyped` rows are any objects, stored unchanged."""
        self.size = 0  # number of rows; raise it to add a staged row
        self._untyped = untyped
        self._arrays: list[Array] = []
        self._paths: tuple[str, ...] | None = None
        # [capacity, ...], aliased, if rows are arrays, numbers or strings and no nests; else None
        self.single_leaf: Array | None = None
        self._parts: list[tuple[Array, frozenset[type], tuple[Any, Any] | None]] = []
        if block is not None:
            self.put(block)
            self.size = block.num_rows

    @property
    def arrays(self) -> list[Array] | None:
        """The leaves, [size, ...], aliased; None before the first row."""
        return None if self._paths is None else [array[: self.size] for array in self._arrays]

    @property
    def paths(self) -> tuple[str, ...] | None:
        """The names of the leaves, empty for an array without a nest; None before the first row."""
        return self._paths

    def stage(self, item: Any) -> bool:
        """Stage a row if it has exactly the known dtypes and shapes; return whether it had."""
        single_leaf = self.single_leaf
        try:
            if single_leaf is None:
                return self._stage_nest(item)
            if type(item) in self._types or _dtype_and_shape(item) == self._expected:
                single_leaf[self.size] = item
                return True
        except IndexError:  # there is no free place
            self._reserve(self.size + 1)
            return self.stage(item)
        except (AttributeError, TypeError, OverflowError):
            pass
        return False

    def _stage_nest(self, item: Any) -> bool:
        if self._paths is None:
            return False
        try:
            leaves = self._flatten(item)
        except LookupError:
            return False
        if len(leaves) != len(self._arrays):
            return False
        size = self.size
        for (array, quick, expected), leaf in zip(self._parts, leaves, strict=True):
            if type(leaf) not in quick and _dtype_and_shape(leaf) != expected:
                return False
            array[size] = leaf
        return True

    def check(self, block: Block, what: str) -> Block:
        """Return the block, if its rows can be added."""
        if self._paths is not None:
            check_same_leaves(what, block.paths, self._paths, "the first row")
            for path, array, leaf in zip(self._paths, self._arrays, block.leaves, strict=True):
                _check_leaf(leaf, array.dtype, array.shape[1:], leaf.shape[1:], what + _at(path))
        return block

    def put(self, block: Block) -> None:
        """Stage checked rows."""
        if self._paths is None:
            self._set_structure(block)
        self._widen(block.leaves)
        self._reserve(self.size + block.num_rows)
        for array, leaf in zip(self._arrays, block.leaves, strict=True):
            array[self.size : self.size + block.num_rows] = leaf

    def replace(self, index: Index, block: Block) -> None:
        """Overwrite rows with checked ones."""
        self._widen(block.leaves)
        for array, leaf in zip(self._arrays, block.leaves, strict=True):
            array[index] = leaf

    def delete(self, index: int) -> None:
        """Remove a row, 0 <= index < size."""
        for array in self._arrays:
            array[index : self.size - 1] = array[index + 1 : self.size].copy()
        self.size -= 1

    def trim(self) -> None:
        """Release unused memory."""
        if self._paths is not None:
            self._install([array[: self.size].copy() for array in self._arrays])

    def block(self, index: Index) -> Block | None:
        """Return existing rows as a block, copied; None before the first row."""
        return None if self._paths is None else Block(self._example, self._paths, self.take(index))

    def row(self, index: int, *, plain: bool = False) -> Any:
        """Return a row, 0 <= index < size, as a nest of copied leaves; `plain` for Python numbers, as in `items`."""
        if self.single_leaf is not None:
            return _leaf(self.single_leaf, index, plain)
        return self._pack([_leaf(array, index, plain) for array in self._arrays])

    def take(self, index: Index) -> list[Array]:
        """Return the leaves of existing rows, copied, in the order of the paths."""
        if type(index) is slice:
            return [array[index].copy() for array in self._arrays]
        return [array[index] for array in self._arrays]

    def views(self, index: Index) -> list[Array]:
        """Return the leaves of existing rows, as views where NumPy can."""
        return [array[index] for array in self._arrays]

    def pack(self, leaves: Sequence[Any]) -> Any:
        """Put leaves back into the nest."""
        return leaves[0] if self.single_leaf is not None else self._pack(leaves)

    def items(self, leaves: Sequence[Array]) -> list[Any]:
        """Return leaves [m, ...] as a list of m rows; numbers of bool, int64 and float64 become Python numbers."""
        if self.single_leaf is not None:
            return listed(leaves[0])
        return [self._pack(row) for row in zip(*map(listed, leaves), strict=True)]

    def __eq__(self, other: object) -> bool:
        """Return whether the rows are equal; NaN equals NaN, and dtypes may differ."""
        if not isinstance(other, Columns):
            return NotImplemented
        if not self.size or self.size != other.size or self._paths != other._paths:
            return self.size == other.size == 0
        return all(
            np.array_equal(a[: self.size], b[: self.size], equal_nan=a.dtype.kind in "fc" and b.dtype.kind in "fc")
            for a, b in zip(self._arrays, other._arrays, strict=True)
        )

    __hash__ = None  # type: ignore[assignment]  # it is mutable

    def __reduce__(self) -> Any:
        """Pickle and copy the rows only: functions made for their structure cannot be pickled."""
        return _rebuilt, (self.block(slice(0, self.size)), self._untyped)

    def _set_structure(self, block: Block) -> None:
        self._paths = block.paths
        self._example = structure_of(block.example)
        self._flatten = flattener(self._example)
        self._pack = packer(self._example)
        self._install([np.empty((0, *leaf.shape[1:]), leaf.dtype) for leaf in block.leaves])

    def _install(self, arrays: list[Array]) -> None:
        self._arrays = arrays
        self.single_leaf = arrays[0] if self._paths == ("",) else None
        self._parts = [
            # The elements of an object array must be checked, so it never takes the fast path.
            (array, _ANY, None) if self._untyped else (array, *_quick(array.dtype, array.shape[1:]))
            for array in arrays
        ]
        _, self._types, self._expected = self._parts[0]

    def _reserve(self, num_rows: int) -> None:
        capacity = len(self._arrays[0])
        if num_rows > capacity:
            capacity = max(num_rows, 2 * capacity, _CAPACITY)
            self._install([_resized(array, capacity, self.size, array.dtype) for array in self._arrays])

    def _widen(self, leaves: Sequence[Array]) -> None:
        dtypes = [np.result_type(array.dtype, leaf.dtype) for array, leaf in zip(self._arrays, leaves, strict=True)]
        if any(array.dtype != dtype for array, dtype in zip(self._arrays, dtypes, strict=True)):
            self._install(
                [
                    _resized(array, len(array), self.size, dtype)
                    for array, dtype in zip(self._arrays, dtypes, strict=True)
                ]
            )


def _rebuilt(block: Block | None, untyped: bool) -> Columns:
    return Columns(block, untyped=untyped)


def _leaf(array: Array, index: int, plain: bool) -> Any:
    leaf = array[index]
    if array.ndim > 1:
        return leaf.copy()
    return leaf.item() if plain and array.dtype in _PYTHON_DTYPES else leaf


def _leaves(nest: Any, what: str, *, copy: bool = False) -> tuple[tuple[str, ...], list[Array]]:
    paths, leaves = named_leaves(nest, what)
    if not leaves:
        raise StructureError(f"{what} must have at least one leaf, got {nest!r}.")
    return paths, [_array(leaf, what, path, copy=copy) for path, leaf in zip(paths, leaves, strict=True)]


def _array(leaf: Any, what: str, path: str, *, copy: bool) -> Array:
    where, action = what + _at(path), "Turn it into an array, or keep it in `infos`."
    array = as_array(leaf, where, action, copy=copy)
    if array.dtype.kind not in "biufcO":
        raise StructureError(f"{where}: {array.dtype} is not a dtype of numbers or strings. {action}")
    return array


def _check_leaf(leaf: Array, dtype: np.dtype[Any], shape: tuple[int, ...], got: tuple[int, ...], where: str) -> None:
    if got != shape or (leaf.dtype.kind == "O") != (dtype.kind == "O"):  # numbers of any dtype fit: columns widen
        raise mismatch(where, leaf.dtype, got, dtype, shape, "as in the first row")


def _at(path: str) -> str:
    return f", leaf `{path}`" if path else ""


@functools.cache
def _quick(dtype: np.dtype[Any], shape: tuple[int, ...]) -> tuple[frozenset[type], tuple[Any, Any] | None]:
    """Return the types of numbers that a leaf stores unchanged, and dtype and shape of arrays that it does."""
    if dtype.kind == "O":
        return frozenset(() if shape else (str, bytes)), None
    numbers = frozenset(kind for kind in _NUMBERS if not shape and np.result_type(np.dtype(kind), dtype) == dtype)
    return numbers, (dtype, shape)


def _resized(array: Array, capacity: int, size: int, dtype: np.dtype[Any]) -> Array:
    resized = np.empty((capacity, *array.shape[1:]), dtype)
    resized[:size] = array[:size]
    return resized
