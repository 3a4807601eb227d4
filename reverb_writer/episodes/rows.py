"""Rows of one form: a list of rows, each a tuple of copied leaves; after `finalize`, one array per leaf.

A row is added in two parts, so that several columns can add a row together: `checked` may refuse the row and changes
nothing, `put` cannot fail. For several rows, the two parts are `fitting` and `put`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from reverb_writer.errors import StructureError
from reverb_writer.leaves import as_array, mismatch
from reverb_writer.nests import at_leaf, check_same_leaves, common_length, flattener, named_leaves, packer, structure_of

Array = npt.NDArray[Any]
Index = slice | Array
Leaves = Sequence[Any]  # the leaves of a row

_NOT_FITTING = (AttributeError, LookupError, TypeError, ValueError)  # raised by `RowForm.read`

_ARRAYS = (np.ndarray, np.generic)
_LOWEST, _HIGHEST = -(2**63), 2**63 - 1  # limits of int64
_PYTHON_TYPES: dict[np.dtype[Any], type[Any]] = {
    np.dtype(bool): bool,
    np.dtype(np.int64): int,
    np.dtype(np.float64): float,
}
_ADVICE = "Turn it into an array, or keep it in `infos`."


class RowForm:
    """The structure, dtypes and shapes of rows. Immutable, so columns share it.

    Attributes:
        paths: name of each leaf; ("",) for rows without a nest.
        dtypes, shapes: dtype and shape of each leaf; `object` for strings.
        is_number: whether rows are real numbers.
        pack: function that puts leaves, one per path, into the nest.
        read: function that copies the leaves of a row if they have exactly these dtypes and shapes, and otherwise
            raises one of `_NOT_FITTING`.
    """

    def __init__(
        self, example: Any, paths: tuple[str, ...], dtypes: list[np.dtype[Any]], shapes: list[tuple[int, ...]]
    ) -> None:
        """Set the attributes; `example` is a nest of this structure, with any leaves."""
        self._example = structure_of(example)
        self.paths, self.dtypes, self.shapes = paths, dtypes, shapes
        self._is_single = paths == ("",)
        self.is_number = self._is_single and shapes == [()] and dtypes[0].kind in "biuf"
        self.pack = packer(self._example)
        self.read = self._reader()

    def __reduce__(self) -> Any:
        if self is ANY_OBJECTS:  # there is one, also in a copy and after a pickle
            return "ANY_OBJECTS"
        return RowForm, (self._example, self.paths, self.dtypes, self.shapes)

    def joined(self, other: RowForm, what: str) -> RowForm:
        """Return the common form of both: dtypes widen as in `np.stack`."""
        check_same_leaves(what, other.paths, self.paths, "the first row")
        for path, dtype, shape, got, got_shape in zip(
            self.paths, self.dtypes, self.shapes, other.dtypes, other.shapes, strict=True
        ):
            if got_shape != shape or (got.kind == "O") != (dtype.kind == "O"):  # numbers of any dtype fit
                raise mismatch(at_leaf(what, path), got, got_shape, dtype, shape, "as in the first row")
        dtypes = list(map(np.result_type, self.dtypes, other.dtypes))
        return self if dtypes == self.dtypes else RowForm(self._example, self.paths, dtypes, self.shapes)

    def check_exact(self, columns: Iterable[Any], wider: RowForm) -> None:
        """Raise StructureError if a wider form would round an integer of these columns to a float."""
        for column, old, new, path in zip(columns, self.dtypes, wider.dtypes, wider.paths, strict=False):
            if old.kind not in "iu" or new.kind not in "fc":
                continue
            leaf, limit = np.asarray(column), 2 ** (np.finfo(new).nmant + 1)
            if ((leaf > limit) | (leaf < -limit)).any():
                raise StructureError(
                    f"{at_leaf('a column', path)} has integers beyond {limit}, which {new} would round. Pass all of "
                    "its numbers as integers, or all as floats."
                )

    def stack(self, rows: Sequence[Leaves]) -> list[Array]:
        """Return m rows as arrays [m, ...], one per leaf."""
        columns = zip(*rows, strict=True) if rows else [()] * len(self.paths)
        return list(map(_stacked, columns, self.dtypes, self.shapes))

    def items(self, rows: Iterable[Leaves]) -> list[Any]:
        """Return rows as a list of nests."""
        return [row[0] for row in rows] if self._is_single else list(map(self.pack, rows))

    def _reader(self) -> Callable[[Any], Leaves]:
        readers = list(map(_leaf_reader, self.dtypes, self.shapes))
        if self._is_single:
            (read,) = readers
            return lambda item: [read(item)]
        flatten = flattener(self._example)
        return lambda item: [read(leaf) for read, leaf in zip(readers, flatten(item), strict=True)]


Block = tuple[RowForm, list[Leaves]]
"""Rows of one form."""


class Rows:
    """A list of rows; `form` is None before the first row."""

    __slots__ = ("_leaves", "_rows", "finalized", "form")

    def __init__(self, *, untyped: bool = False, finalized: bool = False) -> None:
        """Begin without rows; `untyped` rows may be any objects, stored unchanged."""
        self.form: RowForm | None = ANY_OBJECTS if untyped else None
        self.finalized = finalized
        self._rows: list[Leaves] = []
        self._leaves: list[Array] = []  # [T, ...], the finalized rows

    def __len__(self) -> int:
        return len(self._leaves[0]) if self._leaves else len(self._rows)

    def checked(self, item: Any, what: str) -> Block:
        """Return a row as a `fitting` block, or raise StructureError, which calls the row `what`."""
        if self.form is not None:
            try:
                return self.form, [self.form.read(item)]
            except _NOT_FITTING:
                pass
        return self.fitting(block_of(item, what, is_row=True), what)

    def block(self, data: Any) -> Block:
        """Return rows as a block, copied: a list of rows, or a nest of arrays [m, ...]."""
        if self.form is ANY_OBJECTS:
            return ANY_OBJECTS, [(item,) for item in data]
        if not isinstance(data, list):
            return block_of(data, "data")
        rows = Rows()
        for index, item in enumerate(data):
            rows.put(rows.checked(item, f"item {index}"))
        return rows.block_from(0)

    def fitting(self, block: Block, what: str) -> Block:
        """Return the block in its common form with all rows, or raise StructureError."""
        form, rows = block
        if self.form is None or self.form is form:
            return block
        joined = self.form.joined(form, what)
        form.check_exact(zip(*rows, strict=True), joined)
        self.form.check_exact(self._leaves or zip(*self._rows, strict=True), joined)
        return joined, _rows_of(joined.stack(rows))

    def put(self, block: Block) -> None:
        """Add the rows of a `fitting` block."""
        form, rows = block
        self._take(form)
        if self.finalized:
            self._leaves = [np.concatenate(pair) for pair in zip(self._leaves, form.stack(rows), strict=True)]
        else:
            self._rows += rows

    def replace(self, index: Index, block: Block) -> None:
        """Overwrite rows with the rows of a `fitting` block."""
        form, rows = block
        self._take(form)
        for leaf, added in zip(self._leaves, form.stack(rows), strict=self.finalized):
            leaf[index] = added
        if not self.finalized:
            for number, row in zip(np.arange(len(self))[index].tolist(), rows, strict=True):
                self._rows[number] = row

    def _take(self, form: RowForm) -> None:
        """Give all rows another form."""
        if form is not self.form:
            leaves = form.stack(self._rows)
            if self._leaves:
                leaves = [leaf.astype(dtype, copy=False) for leaf, dtype in zip(self._leaves, form.dtypes, strict=True)]
            self.form, self._rows, self._leaves = form, *(([], leaves) if self.finalized else (_rows_of(leaves), []))

    def delete(self, number: int) -> None:
        """Remove a row."""
        del self._rows[number : number + 1]
        self._leaves = [np.delete(leaf, number, axis=0) for leaf in self._leaves]

    def finalize(self) -> None:
        """Convert lists to arrays."""
        if not self.finalized:
            self._leaves, self._rows, self.finalized = self.arrays(), [], True

    def part(self, index: Index, *, finalized: bool) -> Rows:
        """Return some of the rows. Tuples of lists never change, so both share them."""
        part = Rows(finalized=finalized)
        part.form = self.form
        if finalized:
            part._leaves = self.arrays(index)
        else:
            part._rows = self._read(index)
        return part

    def block_from(self, start: int) -> Block:
        """Return the rows from row `start` as a block."""
        assert self.form is not None  # noqa: S101  # a row exists or existed
        return self.form, self._read(slice(start, None))

    def row(self, number: int) -> Any:
        """Return a row, copied."""
        assert self.form is not None  # noqa: S101  # a row exists
        leaves = [leaf[number] for leaf in self._leaves] if self.finalized else self._rows[number]
        if self.form is not ANY_OBJECTS:
            leaves = [leaf.copy() if isinstance(leaf, np.ndarray) else leaf for leaf in leaves]
        return self.form.pack(leaves)

    def arrays(self, index: Index = slice(None)) -> list[Array]:
        """Return the leaves of some of the rows, [n, ...], copied; no leaves before the first row."""
        if self.finalized:
            return [leaf[index].copy() for leaf in self._leaves]
        return [] if self.form is None else self.form.stack(self._read(index))

    def _read(self, index: Index) -> list[Leaves]:
        if self.finalized:
            return _rows_of(self.arrays(index))
        return self._rows[index] if isinstance(index, slice) else [self._rows[number] for number in index.tolist()]

    def equal(self, other: Rows) -> bool:
        """Return whether the rows are equal; NaN equals NaN, and dtypes may differ."""
        if self.form is None or other.form is None or self.form.paths != other.form.paths:
            return len(self) == len(other) == 0
        return all(
            np.array_equal(a, b, equal_nan=a.dtype.kind in "fc" and b.dtype.kind in "fc")
            for a, b in zip(self.arrays(), other.arrays(), strict=True)
        )


def listed(leaf: Array) -> list[Any]:
    """Return a leaf [m, ...] as a list; numbers of bool, int64 and float64 become Python numbers."""
    return leaf.tolist() if leaf.ndim == 1 and leaf.dtype in _PYTHON_TYPES else list(leaf)


def _rows_of(leaves: Sequence[Array]) -> list[Leaves]:
    return list(zip(*map(listed, leaves), strict=True))


def block_of(nest: Any, what: str, *, is_row: bool = False) -> Block:
    """Copy a nest of arrays [m, ...], or with `is_row` one row [...], to a block."""
    paths, leaves = named_leaves(nest, what)
    if not leaves:
        raise StructureError(f"{what} must have at least one leaf, got {nest!r}.")
    arrays = [as_array(leaf, at_leaf(what, path), _ADVICE, copy=True) for path, leaf in zip(paths, leaves, strict=True)]
    for path, array in zip(paths, arrays, strict=True):
        if array.dtype.kind not in "biufcO" and array.dtype.name != "bfloat16":
            raise StructureError(
                f"{at_leaf(what, path)}: {array.dtype} is not a dtype of numbers or strings. {_ADVICE}"
            )
    if is_row:
        arrays = [array[None] for array in arrays]
    common_length(arrays, what)
    form = RowForm(nest, paths, [array.dtype for array in arrays], [array.shape[1:] for array in arrays])
    return form, _rows_of(arrays)


def _leaf_reader(dtype: np.dtype[Any], shape: tuple[int, ...]) -> Callable[[Any], Any]:
    """Return a function that copies a leaf, or raises TypeError."""
    python_type = _PYTHON_TYPES.get(dtype)

    def read_string(leaf: Any) -> Any:
        if shape or type(leaf) not in (str, bytes):  # elements of an array need a check one by one
            raise TypeError
        return leaf

    def read(leaf: Any) -> Any:
        if not shape and type(leaf) is python_type and (python_type is not int or _LOWEST <= leaf <= _HIGHEST):
            return leaf
        if not (isinstance(leaf, _ARRAYS) and leaf.dtype == dtype and leaf.shape == shape):
            raise TypeError
        return leaf.copy() if shape else np.asarray(leaf)[()] if python_type is None else leaf.item()

    return read_string if dtype.kind == "O" else read


ANY_OBJECTS = RowForm(None, ("",), [np.dtype(object)], [()])
"""The form of untyped rows: any objects, neither checked nor copied."""
ANY_OBJECTS.read = lambda item: (item,)


def _stacked(column: Sequence[Any], dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    if dtype.kind != "O":
        return np.array(column, dtype).reshape(len(column), *shape)
    array = np.empty((len(column), *shape), object)
    for index, row in enumerate(column):
        array[index] = row
    return array
