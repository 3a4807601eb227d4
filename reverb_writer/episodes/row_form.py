"""The form of a column's rows: their structure, dtypes and shapes; and many rows of it as arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from reverb_writer.errors import StructureError
from reverb_writer.leaves import as_array, mismatch
from reverb_writer.nests import check_same_leaves, common_length, flattener, named_leaves, packer, structure_of

Array = npt.NDArray[Any]

NOT_FITTING = (AttributeError, LookupError, TypeError, ValueError)
"""What `RowForm.read` raises of an item that does not fit exactly."""

_LOWEST, _HIGHEST = -(2**63), 2**63 - 1  # of int64
_ARRAYS = (np.ndarray, np.generic)
_PYTHON_TYPES: dict[np.dtype[Any], type[Any]] = {
    np.dtype(bool): bool,
    np.dtype(np.int64): int,
    np.dtype(np.float64): float,
}


class Block(NamedTuple):
    """Rows of one form."""

    form: RowForm
    columns: list[Any]  # of each leaf: an array [m, ...], or a list of m rows


class RowForm:
    """The structure, dtypes and shapes of rows. It never changes, so columns share it.

    Attributes:
        paths: name of each leaf; ("",) for rows without a nest.
        dtypes, shapes: of each leaf; `object` for strings.
        is_single: whether rows are arrays, numbers or strings, and no nests.
        is_number: whether rows are real numbers.
        read: returns the leaves of a row, copied, if they have exactly these dtypes and shapes; else it raises one of
            `NOT_FITTING`.
    """

    def __init__(
        self, example: Any, paths: tuple[str, ...], dtypes: list[np.dtype[Any]], shapes: list[tuple[int, ...]]
    ) -> None:
        """Take a nest of this structure; its leaves have no meaning."""
        self._example = structure_of(example)
        self.paths, self.dtypes, self.shapes = paths, dtypes, shapes
        self.is_single = paths == ("",)
        self.is_number = self.is_single and shapes == [()] and dtypes[0].kind in "biuf"
        self._pack = packer(self._example)
        self.read = self._reader()

    def __reduce__(self) -> Any:
        return RowForm, (self._example, self.paths, self.dtypes, self.shapes)

    def joined(self, other: RowForm, what: str) -> RowForm:
        """Return the form of rows of both: dtypes widen to those of `np.stack`.

        Raises:
            StructureError: the structures or shapes differ.
        """
        check_same_leaves(what, other.paths, self.paths, "the first row")
        for path, dtype, shape, got, got_shape in zip(
            self.paths, self.dtypes, self.shapes, other.dtypes, other.shapes, strict=True
        ):
            _check_leaf(got, got_shape, dtype, shape, what + _at(path))
        dtypes = list(map(np.result_type, self.dtypes, other.dtypes))
        return self if dtypes == self.dtypes else RowForm(self._example, self.paths, dtypes, self.shapes)

    def check_exact(self, block: Block) -> None:
        """Check that no integer of a block is rounded if it becomes a float of this form.

        Raises:
            StructureError: one is.
        """
        for column, old, new, path in zip(block.columns, block.form.dtypes, self.dtypes, self.paths, strict=True):
            if old != new:
                _check_exact(np.asarray(column), new, path)

    def stack(self, columns: Sequence[Sequence[Any]]) -> list[Array]:
        """Return columns of rows as arrays [m, ...] of these dtypes; arrays of these dtypes are returned unchanged."""
        return list(map(_stacked, columns, self.dtypes, self.shapes))

    def pack(self, leaves: Sequence[Any]) -> Any:
        """Put leaves, one for each path, into the nest."""
        return leaves[0] if self.is_single else self._pack(leaves)

    def items(self, columns: Sequence[Sequence[Any]]) -> list[Any]:
        """Return columns of m rows as a list of rows."""
        return list(columns[0]) if self.is_single else [self._pack(row) for row in zip(*columns, strict=True)]

    def _reader(self) -> Callable[[Any], list[Any]]:
        readers = list(map(_leaf_reader, self.dtypes, self.shapes))
        if self.is_single:
            (read,) = readers
            return lambda item: [read(item)]
        flatten = flattener(self._example)
        return lambda item: [read(leaf) for read, leaf in zip(readers, flatten(item), strict=True)]


class _AnyObjects(RowForm):
    """Rows that are any objects, which are neither checked nor copied."""

    def __init__(self) -> None:
        super().__init__(None, ("",), [np.dtype(object)], [()])

    def __reduce__(self) -> Any:
        return "ANY_OBJECTS"  # there is one, also in a copy and after a pickle

    def _reader(self) -> Callable[[Any], list[Any]]:
        return lambda item: [item]


ANY_OBJECTS = _AnyObjects()


def stacked(items: Sequence[Any], what: str) -> Block:
    """Return a block of items, each a nest without time; dtypes are those of `np.stack`."""
    paths, first = _leaves(items[0], what)
    columns: list[list[Array]] = [[leaf] for leaf in first]
    for index, item in enumerate(items[1:], 1):
        others, leaves = _leaves(item, what)
        check_same_leaves(f"{what} {index}", others, paths, "the first row")
        for path, column, leaf in zip(paths, columns, leaves, strict=True):
            _check_leaf(leaf.dtype, leaf.shape, column[0].dtype, column[0].shape, f"{what} {index}{_at(path)}")
            column.append(leaf)
    dtypes = [np.result_type(*{leaf.dtype for leaf in column}) for column in columns]
    for path, column, dtype in zip(paths, columns, dtypes, strict=True):
        for leaf in column:
            _check_exact(leaf, dtype, path)
    form = RowForm(items[0], paths, dtypes, [leaf.shape for leaf in first])
    return Block(form, [np.stack(column) for column in columns])


def batched(nest: Any, what: str) -> Block:
    """Return a block of a nest with leaves [m, ...], copied."""
    paths, leaves = _leaves(nest, what, copy=True)
    common_length(leaves, what)
    return Block(RowForm(nest, paths, [leaf.dtype for leaf in leaves], [leaf.shape[1:] for leaf in leaves]), leaves)


def listed(leaf: Array) -> list[Any]:
    """Return a leaf [m, ...] as a list; numbers of bool, int64 and float64 become Python numbers."""
    return leaf.tolist() if leaf.ndim == 1 and leaf.dtype in _PYTHON_TYPES else list(leaf)


def _leaf_reader(dtype: np.dtype[Any], shape: tuple[int, ...]) -> Callable[[Any], Any]:
    """Return a function that copies a leaf, or raises TypeError."""
    python_type = _PYTHON_TYPES.get(dtype)

    def read_string(leaf: Any) -> Any:
        if shape or type(leaf) not in (str, bytes):  # the elements of an array must be checked one by one
            raise TypeError
        return leaf

    def read_array(leaf: Any) -> Any:
        if not (isinstance(leaf, np.ndarray) and leaf.dtype == dtype and leaf.shape == shape):
            raise TypeError
        return leaf.copy()

    def read_number(leaf: Any) -> Any:
        kind = type(leaf)
        if kind is python_type and (kind is not int or _LOWEST <= leaf <= _HIGHEST):
            return leaf
        if not (isinstance(leaf, _ARRAYS) and leaf.dtype == dtype and leaf.shape == ()):
            raise TypeError
        return np.asarray(leaf)[()] if python_type is None else leaf.item()

    return read_string if dtype.kind == "O" else read_array if shape else read_number


def _stacked(column: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    if isinstance(column, np.ndarray):
        return column.astype(dtype, copy=False)
    if dtype.kind == "O":
        array = np.empty((len(column), *shape), object)
        for index, row in enumerate(column):
            array[index] = row
        return array
    return np.array(column, dtype).reshape(len(column), *shape)


def _check_exact(leaf: Array, dtype: np.dtype[Any], path: str) -> None:
    if leaf.dtype.kind in "iu" and dtype.kind in "fc" and leaf.size:
        limit = 2 ** (np.finfo(dtype).nmant + 1)
        if leaf.max() > limit or leaf.min() < -limit:
            raise StructureError(
                f"a column{_at(path)} has integers beyond {limit}, which {dtype} would round. Pass all of its "
                "numbers as integers, or all as floats."
            )


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


def _check_leaf(
    dtype: np.dtype[Any], shape: tuple[int, ...], expected: np.dtype[Any], expected_shape: tuple[int, ...], where: str
) -> None:
    # Numbers of any dtype fit: columns widen.
    if shape != expected_shape or (dtype.kind == "O") != (expected.kind == "O"):
        raise mismatch(where, dtype, shape, expected, expected_shape, "as in the first row")


def _at(path: str) -> str:
    return f", leaf `{path}`" if path else ""
