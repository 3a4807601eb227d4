"""Rows of one form: lists of copied leaves, or arrays once they are finalized.

Adding a row is done in two parts, so that several columns can add a row together: `checked` may refuse it and changes
nothing, `append` cannot fail. Likewise for several rows: `fitting` and `put`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from reverb_writer.episodes.row_form import ANY_OBJECTS, NOT_FITTING, Block, RowForm, batched, listed, stacked

Array = npt.NDArray[Any]
Index = slice | Array
Row = tuple[RowForm, list[Any]]
"""A row: the form that all rows have once it is added, and its leaves."""


class Rows:
    """Rows that are appended, read and overwritten by number.

    Attributes:
        form: what all rows have in common; None before the first row.
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
        """Return a row as the argument of `append`; errors call it `what`.

        Raises:
            StructureError: its structure or shapes differ from the first row.
        """
        form = self.form
        if form is not None:
            try:
                return form, form.read(item)
            except NOT_FITTING:
                pass
        form, columns = self.fitting(stacked([item], what), what)
        return form, [listed(column)[0] for column in columns]

    def block(self, data: Any) -> Block:
        """Return rows as a block, copied: a list of them, or a nest of arrays [m, ...]."""
        if self.form is ANY_OBJECTS:
            return Block(ANY_OBJECTS, [list(data)])
        return stacked(data, "item") if isinstance(data, list) else batched(data, "data")

    def fitting(self, block: Block, what: str) -> Block:
        """Return a block in the form that all rows have once it is added; errors call it `what`.

        Raises:
            StructureError: its structure or shapes differ from the first row, or an integer would be rounded.
        """
        if self.form is None or self.form is block.form:
            return block
        form = self.form.joined(block.form, what)
        form.check_exact(block)
        form.check_exact(Block(self.form, self.columns))
        return Block(form, form.stack(block.columns))

    def append(self, row: Row) -> None:
        """Add a row that is `checked`."""
        form, leaves = row
        if form is not self.form or self.finalized:
            self.put(Block(form, [[leaf] for leaf in leaves]))
            return
        for column, leaf in zip(self.columns, leaves, strict=True):
            column.append(leaf)

    def put(self, block: Block) -> None:
        """Add the rows of a block that is `fitting`."""
        if block.form is not self.form:
            self._take(block.form)
        if self.finalized:
            added = block.form.stack(block.columns)
            self.columns = [np.concatenate(pair) for pair in zip(self.columns, added, strict=True)]
            return
        for column, rows in zip(self.columns, block.columns, strict=True):
            column.extend(rows if type(rows) is list else listed(rows))

    def replace(self, index: Index, block: Block) -> None:
        """Overwrite rows with those of a block that is `fitting`."""
        if block.form is not self.form:
            self._take(block.form)
        numbers = range(len(self))[index] if isinstance(index, slice) else index.tolist()
        for column, rows in zip(self.columns, block.form.stack(block.columns), strict=True):
            if self.finalized:
                column[index] = rows
            else:
                for number, row in zip(numbers, listed(rows), strict=True):
                    column[number] = row

    def _take(self, form: RowForm) -> None:
        """Give all rows another form."""
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
        return Block(self.form, self._read(slice(start, None)))

    def row(self, number: int) -> Any:
        """Return a row, copied."""
        leaves = [column[number] for column in self.columns]
        if self.form is not ANY_OBJECTS:
            leaves = [leaf.copy() if isinstance(leaf, np.ndarray) else leaf for leaf in leaves]
        assert self.form is not None  # noqa: S101  # there is a row
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
        if self.form is None or other.form is None or not len(self) or not len(other):
            return len(self) == len(other) == 0
        if len(self) != len(other) or self.form.paths != other.form.paths:
            return False
        return all(
            np.array_equal(a, b, equal_nan=a.dtype.kind in "fc" and b.dtype.kind in "fc")
            for a, b in zip(self.arrays(), other.arrays(), strict=True)
        )
