"""Rows of one form: lists of copied leaves, or arrays once they are finalized.

Adding a row is done in two parts, so that several columns can add a row together: `checked` may refuse it and changes
nothing, `append` cannot fail. The same holds for several rows: `fitting` and `put`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from reverb_writer.errors import StructureError
from reverb_writer.leaves import as_array, mismatch
from reverb_writer.nests import check_same_leaves, common_length, flattener, named_leaves, packer, structure_of

Array = npt.NDArray[Any]
Index = slice | Array

_NOT_FITTING = (AttributeError, LookupError, TypeError, ValueError)  # raised by `RowForm.read`
_LOWEST, _HIGHEST = -(2**63), 2**63 - 1  # of int64
_ARRAYS = (np.ndarray, np.generic)
_PYTHON_TYPES: dict[np.dtype[Any], type[Any]] = {
    np.dtype(bool): bool,
    np.dtype(np.int64): int,
    np.dtype(np.float64): float,
}
_ADVICE = "Turn it into an array, or keep it in `infos`."


class RowForm:
    """The structure, dtypes and shapes of rows. It never changes, so columns share it.

    Attributes:
        paths: name of each leaf; ("",) for rows without a nest.
        dtypes, shapes: of each leaf; `object` for strings.
        is_number: whether rows are real numbers.
        pack: puts leaves, one for each path, into the nest.
        read: returns the leaves of a row, copied, if they have exactly these dtypes and shapes; else it raises one of
            `_NOT_FITTING`.
    """

    def __init__(
        self, example: Any, paths: tuple[str, ...], dtypes: list[np.dtype[Any]], shapes: list[tuple[int, ...]]
    ) -> None:
        """Take a nest of this structure; its leaves have no meaning."""
        self._example = structure_of(example)
        self.paths, self.dtypes, self.shapes = paths, dtypes, shapes
        self._is_single = paths == ("",)
        self.is_number = self._is_single and shapes == [()] and dtypes[0].kind in "biuf"
        self.pack = packer(self._example)
        self.read = self._reader()

    def __reduce__(self) -> Any:
        return RowForm, (self._example, self.paths, self.dtypes, self.shapes)

    def joined(self, other: RowForm, what: str) -> RowForm:
        """Return the form of rows of both: dtypes widen to those of `np.stack`."""
        check_same_leaves(what, other.paths, self.paths, "the first row")
        for path, dtype, shape, got, got_shape in zip(
            self.paths, self.dtypes, self.shapes, other.dtypes, other.shapes, strict=True
        ):
            _check_leaf(got, got_shape, dtype, shape, what + _at(path))
        dtypes = list(map(np.result_type, self.dtypes, other.dtypes))
        return self if dtypes == self.dtypes else RowForm(self._example, self.paths, dtypes, self.shapes)

    def stack(self, columns: Sequence[Sequence[Any]]) -> list[Array]:
        """Return columns of rows as arrays [m, ...] of these dtypes; arrays of these dtypes are returned unchanged."""
        return list(map(_stacked, columns, self.dtypes, self.shapes))

    def items(self, columns: Sequence[Sequence[Any]]) -> list[Any]:
        """Return columns of m rows as a list of rows."""
        return list(columns[0]) if self._is_single else [self.pack(row) for row in zip(*columns, strict=True)]

    def _reader(self) -> Callable[[Any], list[Any]]:
        readers = list(map(_leaf_reader, self.dtypes, self.shapes))
        if self._is_single:
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


Row = tuple[RowForm, list[Any]]
"""The form that all rows have once this row is added, and its leaves."""

Block = tuple[RowForm, list[Any]]
"""Rows of one form, and of each leaf an array [m, ...], or a list of m rows."""


class Rows:
    """Rows that are added, read and overwritten by number.

    Attributes:
        form: common form of all rows; None before the first row.
        columns: the rows of each leaf, a list or, if finalized, an array [T, ...].
        finalized: whether they are arrays.
    """

    __slots__ = ("columns", "finalized", "form")

    def __init__(self, *, untyped: bool = False, finalized: bool = False) -> None:
        """Begin without rows; `untyped` rows are any objects, stored unchanged."""
        self.form: RowForm | None = ANY_OBJECTS if untyped else None
        self.columns: list[Any] = [[]] if untyped else []
        self.finalized = finalized

    def __len__(self) -> int:
        return len(self.columns[0]) if self.columns else 0

    def checked(self, item: Any, what: str) -> Row:
        """Return a row as the argument of `append`, or raise StructureError, which calls it `what`."""
        form = self.form
        if form is not None:
            try:
                return form, form.read(item)
            except _NOT_FITTING:
                pass
        paths, leaves = _leaves(item, what)
        form = RowForm(item, paths, [leaf.dtype for leaf in leaves], [leaf.shape for leaf in leaves])
        form, columns = self.fitting((form, [leaf[None] for leaf in leaves]), what)
        return form, [listed(column)[0] for column in columns]

    def block(self, data: Any) -> Block:
        """Return rows as a block, copied: a list of rows, or a nest of arrays [m, ...]."""
        if self.form is ANY_OBJECTS:
            return ANY_OBJECTS, [list(data)]
        if isinstance(data, list):
            rows = Rows()
            for index, item in enumerate(data):
                rows.append(rows.checked(item, f"item {index}"))
            assert rows.form is not None  # noqa: S101  # there is a row
            return rows.form, rows.columns
        paths, leaves = _leaves(data, "data")
        common_length(leaves, "data")
        return RowForm(data, paths, [leaf.dtype for leaf in leaves], [leaf.shape[1:] for leaf in leaves]), leaves

    def fitting(self, block: Block, what: str) -> Block:
        """Return a block in the form that all rows have once it is added, or raise StructureError."""
        form, columns = block
        if self.form is None or self.form is form:
            return block
        joined = self.form.joined(form, what)
        _check_exact(columns, form, joined)
        _check_exact(self.columns, self.form, joined)
        return joined, joined.stack(columns)

    def append(self, row: Row) -> None:
        """Add a row that is `checked`."""
        form, leaves = row
        if form is not self.form or self.finalized:
            self.put((form, [[leaf] for leaf in leaves]))
            return
        for column, leaf in zip(self.columns, leaves, strict=True):
            column.append(leaf)

    def put(self, block: Block) -> None:
        """Add the rows of a block that is `fitting`."""
        form, columns = block
        self._take(form)
        if self.finalized:
            added = form.stack(columns)
            self.columns = [np.concatenate(pair) for pair in zip(self.columns, added, strict=True)]
            return
        for column, rows in zip(self.columns, columns, strict=True):
            column.extend(rows if type(rows) is list else listed(rows))

    def replace(self, index: Index, block: Block) -> None:
        """Overwrite rows with those of a block that is `fitting`."""
        form, columns = block
        self._take(form)
        numbers = range(len(self))[index] if isinstance(index, slice) else index.tolist()
        for column, rows in zip(self.columns, form.stack(columns), strict=True):
            if self.finalized:
                column[index] = rows
            else:
                for number, row in zip(numbers, listed(rows), strict=True):
                    column[number] = row

    def _take(self, form: RowForm) -> None:
        """Give all rows another form."""
        if form is not self.form:
            columns = form.stack(self.columns or [[] for _ in form.paths])
            self.form, self.columns = form, columns if self.finalized else list(map(listed, columns))

    def delete(self, number: int) -> None:
        """Remove a row."""
        if self.finalized:
            self.columns = [np.delete(column, number, axis=0) for column in self.columns]
        else:
            for column in self.columns:
                del column[number]

    def finalize(self) -> None:
        """Make arrays of lists."""
        if not self.finalized:
            self.columns = [] if self.form is None else self.form.stack(self.columns)
            self.finalized = True

    def part(self, index: Index, *, finalized: bool) -> Rows:
        """Return some of the rows. Those of lists never change, so both have the same objects."""
        part = Rows()
        part.form, part.columns, part.finalized = self.form, self._read(index), finalized
        if self.finalized and not finalized:
            part.columns = list(map(listed, part.columns))
        return part

    def block_from(self, start: int) -> Block:
        """Return the rows from number `start` on as a block. There is one row at least, or there was."""
        assert self.form is not None  # noqa: S101  # see above
        return self.form, self._read(slice(start, None))

    def row(self, number: int) -> Any:
        """Return a row, copied."""
        assert self.form is not None  # noqa: S101  # there is a row
        leaves = [column[number] for column in self.columns]
        if self.form is not ANY_OBJECTS:
            leaves = [leaf.copy() if isinstance(leaf, np.ndarray) else leaf for leaf in leaves]
        return self.form.pack(leaves)

    def arrays(self, index: Index = slice(None)) -> list[Array]:
        """Return the leaves of some of the rows, [n, ...], copied; no leaves before the first row."""
        return [] if self.form is None else self.form.stack(self._read(index))

    def _read(self, index: Index) -> list[Any]:
        if isinstance(index, slice):
            return [column[index].copy() for column in self.columns]
        if self.finalized:
            return [column[index] for column in self.columns]
        return [[column[number] for number in index.tolist()] for column in self.columns]

    def equal(self, other: Rows) -> bool:
        """Return whether the rows are equal; NaN equals NaN, and dtypes may differ."""
        if not len(self) or len(self) != len(other):
            return len(self) == len(other)
        assert self.form is not None and other.form is not None  # noqa: S101, PT018  # there are rows
        return self.form.paths == other.form.paths and all(
            np.array_equal(a, b, equal_nan=a.dtype.kind in "fc" and b.dtype.kind in "fc")
            for a, b in zip(self.arrays(), other.arrays(), strict=True)
        )


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
    if dtype.kind != "O":
        return np.array(column, dtype).reshape(len(column), *shape)
    array = np.empty((len(column), *shape), object)
    for index, row in enumerate(column):
        array[index] = row
    return array


def _check_exact(columns: Sequence[Any], form: RowForm, wider: RowForm) -> None:
    """Raise StructureError if an integer would be rounded to a float of a wider form."""
    for column, old, new, path in zip(columns, form.dtypes, wider.dtypes, wider.paths, strict=True):
        if old.kind not in "iu" or new.kind not in "fc":
            continue
        leaf, limit = np.asarray(column), 2 ** (np.finfo(new).nmant + 1)
        if ((leaf > limit) | (leaf < -limit)).any():
            raise StructureError(
                f"a column{_at(path)} has integers beyond {limit}, which {new} would round. Pass all of its "
                "numbers as integers, or all as floats."
            )


def _leaves(nest: Any, what: str) -> tuple[tuple[str, ...], list[Array]]:
    """Return the names and the leaves of a nest, copied."""
    paths, leaves = named_leaves(nest, what)
    if not leaves:
        raise StructureError(f"{what} must have at least one leaf, got {nest!r}.")
    arrays = [as_array(leaf, what + _at(path), _ADVICE, copy=True) for path, leaf in zip(paths, leaves, strict=True)]
    for path, array in zip(paths, arrays, strict=True):
        if array.dtype.kind not in "biufcO":
            raise StructureError(f"{what}{_at(path)}: {array.dtype} is not a dtype of numbers or strings. {_ADVICE}")
    return paths, arrays


def _check_leaf(
    dtype: np.dtype[Any], shape: tuple[int, ...], expected: np.dtype[Any], expected_shape: tuple[int, ...], where: str
) -> None:
    # Numbers of any dtype fit: columns widen.
    if shape != expected_shape or (dtype.kind == "O") != (expected.kind == "O"):
        raise mismatch(where, dtype, shape, expected, expected_shape, "as in the first row")


def _at(path: str) -> str:
    return f", leaf `{path}`" if path else ""
