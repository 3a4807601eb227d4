"""`InfiniteLookbackBuffer`: one column of an episode with its look-back; it can be read beyond both ends."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from reverb_writer.arguments import integer
from reverb_writer.episodes.indexing import Indices, is_single, position, span
from reverb_writer.episodes.rows import RowForm, Rows, block_of, listed
from reverb_writer.episodes.spaces import SpaceLeaves, check, filled
from reverb_writer.errors import ClosedError, FormatError, OutOfRangeError, ReverbWriterError, SpecError, StructureError

Array = npt.NDArray[Any]

_ALL = slice(None)
_NUMBERS = (int, float, complex, np.number)

BROKEN_STATE = (ReverbWriterError, AttributeError, LookupError, TypeError, ValueError)
"""Errors of a value that is not a state."""


class InfiniteLookbackBuffer:
    """Rows that are appended one by one; the first `lookback` rows are earlier history.

    Rows are nests without time. Their leaves are copied into lists, which `finalize()` converts to arrays. Getters
    return lists of rows before `finalize()`, and arrays [T, ...] or nests of arrays after it. The caller owns results.
    Not thread-safe.

    Source: RLlib 2.35 `InfiniteLookbackBuffer`; docs/how-to/from-rllib.md lists the differences.

    Attributes:
        lookback: number of look-back rows, >= 0.
        is_untyped: whether rows are any objects, stored unchanged.

    >>> buffer = InfiniteLookbackBuffer([10, 11, 12, 13, 14], lookback=2)
    >>> len(buffer), buffer.finalize().get(slice(-7, 5), fill=0)
    (3, array([ 0,  0, 10, 11, 12, 13, 14,  0,  0]))
    """

    __slots__ = ("_space", "_space_leaves", "is_untyped", "lookback", "rows")

    def __init__(self, data: Any = None, lookback: int = 0, space: Any = None, *, untyped: bool = False) -> None:
        """Start with the first rows.

        Args:
            data: a list of rows, or a nest of arrays [T, ...], which finalizes the buffer; copied.
            lookback: number of look-back rows.
            space: Gymnasium space of a row; only one-hot vectors need it.
            untyped: whether rows are any objects, stored unchanged; such a buffer always returns lists.

        Raises:
            StructureError: rows differ in structure or shape.
        """
        self.is_untyped = untyped
        self.rows = Rows(untyped=untyped, finalized=data is not None and not isinstance(data, list) and not untyped)
        if self.finalized or data:
            self.rows.put(self.rows.block(data))
        self.lookback = min(integer("lookback", lookback, minimum=0), len(self.rows))
        self.space = space

    @classmethod
    def from_arrays(cls, nest: Any, name: str = "data") -> InfiniteLookbackBuffer:
        """Make a finalized buffer without look-back of arrays.

        Args:
            nest: leaves [T, ...], copied; a list is a nest of leaves, not a list of rows.
            name: name of the nest in errors.

        Raises:
            StructureError: leaves differ in T, or are not numbers or strings.
        """
        buffer = cls()
        buffer.rows.finalize()
        buffer.rows.put(block_of(nest, name))
        return buffer

    @property
    def finalized(self) -> bool:
        """Whether getters return arrays."""
        return self.rows.finalized

    @property
    def space(self) -> Any:
        """The Gymnasium space of a row, or None."""
        return self._space

    @space.setter
    def space(self, space: Any) -> None:
        self._space = space
        self._space_leaves = None if space is None else SpaceLeaves(space)

    @property
    def data(self) -> Any:
        """A copy of all rows, including the look-back: a list or, if finalized, arrays."""
        return self._read(_ALL)

    def to_arrays(self) -> Any:
        """Return the rows without the look-back as a nest with leaves [T, ...], finalized or not."""
        return self._read(slice(self.lookback, None), as_list=False)

    def __len__(self) -> int:
        """Return the number of rows, without the look-back."""
        return max(len(self.rows) - self.lookback, 0)

    def len_incl_lookback(self) -> int:
        """Return the number of rows, including the look-back."""
        return len(self.rows)

    def append(self, item: Any) -> None:
        """Add `item`, a row. If the buffer is finalized, all rows are copied.

        Raises:
            StructureError: its structure or a shape differs from the first row. Nothing changed.
        """
        self.rows.put(self.rows.checked(item, "item"))

    def extend(self, items: Any) -> None:
        """Add rows: `items` is a list of rows, or a nest of arrays [T, ...].

        Raises:
            StructureError: the structure or a shape of a row differs from the first row. Nothing changed.
        """
        if not isinstance(items, list) or items:
            self.rows.put(self.rows.fitting(self.rows.block(items), "items"))

    def concat(self, other: InfiniteLookbackBuffer) -> None:
        """Add the rows of the buffer `other`, without its look-back."""
        if other.rows.form is not None:
            self.rows.put(self.rows.fitting(other.rows.block_from(other.lookback), "added rows"))

    def part(self, index: slice | Array, lookback: int, *, finalized: bool | None = None) -> InfiniteLookbackBuffer:
        """Return a buffer of some rows: `index` is a slice of all rows, or integers [n], which count from ts 0.

        The first `lookback` rows are the new look-back; rows before the first one are left out of it. If `finalized` is
        None, the part is finalized like this buffer.
        """
        if not isinstance(index, slice):
            index = index + self.lookback
            lookback -= np.count_nonzero(index < 0)
            index = index[index >= 0]
        part = InfiniteLookbackBuffer(space=self.space, untyped=self.is_untyped)
        part.rows = self.rows.part(index, finalized=self.finalized if finalized is None else finalized)
        part.lookback = min(lookback, len(part.rows))
        return part

    def pop(self, index: int = -1) -> None:
        """Remove a row, and return None; `index` is as in a list of all rows, including the look-back.

        Raises:
            OutOfRangeError: `index` is out of range.
        """
        at = position(index, len(self.rows), 0)
        if not 0 <= at < len(self.rows):
            raise OutOfRangeError(f"cannot pop row {index} of {len(self.rows)}.")
        self.rows.delete(at)

    def finalize(self) -> InfiniteLookbackBuffer:
        """Make getters return arrays; return the buffer. Idempotent."""
        if not self.is_untyped:
            self.rows.finalize()
        return self

    def get(
        self,
        indices: Indices = None,
        *,
        neg_index_as_lookback: bool = False,
        fill: Any = None,
        one_hot_discrete: bool = False,
    ) -> Any:
        """Return a row, or several.

        Args:
            indices: an int for one row; a slice or a list for several; None for all rows without the look-back. Ints
                >= 0 count from ts 0, negative ints from the end, including the look-back.
            neg_index_as_lookback: whether negative ints count from ts 0 to the left, into the look-back.
            fill: value of all positions outside the data: a number for every element, or a row. It is cast to the
                dtype of the space; without a space, the dtype of the result widens if necessary.
            one_hot_discrete: whether to return Discrete and MultiDiscrete parts as one-hot vectors, float32.

        Returns:
            A row for an int; otherwise a list of rows or, if finalized, leaves [T, ...]. Owned by the caller.

        Raises:
            OutOfRangeError: an int, alone or in a list, is outside the data, and `fill` is None.
            SpecError: `indices` or `fill` is invalid, or one-hot vectors lack a space.
        """
        if one_hot_discrete and self._space_leaves is None:
            raise SpecError("one-hot vectors need a space. Give one when constructing.")
        single = is_single(indices)
        if single and not one_hot_discrete:
            row = position(indices, len(self.rows), self.lookback, neg_index_as_lookback)
            if 0 <= row < len(self.rows):
                return self.rows.row(row)
        index, where, num, is_inside = self._located(indices, neg_index_as_lookback, fill)
        needed = None if is_inside else fill
        rows = self._read(index, single or None, one_hot=one_hot_discrete, fill=needed, where=where, num=num)
        return rows[0] if single else rows

    def set(self, new_data: Any, *, at_indices: Indices = None, neg_index_as_lookback: bool = False) -> None:
        """Overwrite a row, or several.

        Args:
            new_data: a row if `at_indices` is an int; otherwise a list of rows, or a nest of arrays [T, ...]. Copied.
            at_indices: as in `get`; None for all rows without the look-back.
            neg_index_as_lookback: as in `get`.

        Raises:
            OutOfRangeError: a row does not exist, or `new_data` has another number of rows.
            StructureError: the structure or a shape of a new row differs, or the buffer is finalized and a row is not
                in its space.
            Nothing changed in any of these cases.
        """
        index, _, num, _ = self._located(at_indices, neg_index_as_lookback)
        if is_single(at_indices):
            new_data = [new_data]
        block = None if isinstance(new_data, list) and not new_data else self.rows.block(new_data)
        num_new = 0 if block is None else len(block[1])
        if num_new != num:
            raise OutOfRangeError(f"cannot set {num} rows to {num_new} new ones. Pass a row for each index.")
        if block is not None and num:
            form, rows = self.rows.fitting(block, "new_data")
            if self.finalized and self.space is not None:
                for row in form.items(rows):
                    check(self.space, row, "new_data")
            self.rows.replace(index, (form, rows))

    def get_state(self) -> dict[str, Any]:
        """Return a copy of the rows, with the look-back and the space, as `Episode.get_state` does."""
        data = None if self.rows.form is None else self.data
        return {
            "data": copy.deepcopy(data) if self.is_untyped else data,
            "lookback": self.lookback,
            "finalized": self.finalized,
            "space": self.space,
            "untyped": self.is_untyped,
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> InfiniteLookbackBuffer:
        """Make a buffer from `state`, a result of `get_state`; raises FormatError for another value."""
        try:
            data, untyped, finalized = state["data"], state["untyped"], state["finalized"]
            buffer = cls(space=state["space"], untyped=untyped)
            if finalized and data is not None:
                buffer.rows.put(block_of(data, "data"))  # arrays, also if rows are lists
            elif data:
                buffer.extend(copy.deepcopy(data) if untyped else data)
            buffer.lookback = min(integer("lookback", state["lookback"], minimum=0), len(buffer.rows))
            return buffer.finalize() if finalized else buffer
        except BROKEN_STATE as error:
            raise FormatError(f"this is not a state of a buffer: {type(error).__name__}: {error}") from error

    def __getitem__(self, indices: Any) -> Any:
        return self.get(indices)

    def __setitem__(self, indices: Any, new_data: Any) -> None:
        self.set(new_data, at_indices=indices)

    def __add__(self, other: Any) -> InfiniteLookbackBuffer:
        """Add a number to every number, or append a list or a buffer without its look-back; return a new buffer.

        Raises:
            ClosedError: the buffer is finalized.
        """
        if self.finalized:
            raise ClosedError(f"cannot add to a finalized {type(self).__name__}.")
        if isinstance(other, _NUMBERS):
            data = [item + other if isinstance(item, _NUMBERS) else item for item in self.data]
            return InfiniteLookbackBuffer(data, self.lookback, self.space, untyped=self.is_untyped)
        result = self.part(_ALL, self.lookback)
        if isinstance(other, InfiniteLookbackBuffer):
            result.concat(other)
        elif isinstance(other, list):
            result.extend(other)
        else:
            return NotImplemented
        return result

    def __eq__(self, other: object) -> bool:
        """Return whether rows, look-back, space and `finalized` are equal."""
        if not isinstance(other, InfiniteLookbackBuffer):
            return NotImplemented
        return (
            (self.lookback, self.finalized) == (other.lookback, other.finalized)
            and self.space == other.space
            and self.rows.equal(other.rows)
        )

    __hash__ = None  # type: ignore[assignment]  # it is mutable

    def __repr__(self) -> str:
        data = self._read(_ALL, as_list=True)
        return f"{type(self).__name__}({data[: self.lookback]} <- lookback({self.lookback}) | {data[self.lookback :]})"

    def _located(
        self, indices: Any, neg_index_as_lookback: bool, fill: Any = None
    ) -> tuple[slice | Array, slice | Array, int, bool]:
        """Return the rows to read, their places in the result, its number of rows, and whether it has no fill values.

        Without a fill value, it has none.
        """
        size, lookback = len(self.rows), self.lookback
        if indices is None or isinstance(indices, slice):
            before, index, num, after = span(indices or _ALL, size, lookback, neg_index_as_lookback, fill is not None)
            return index, slice(before, before + num), before + num + after, not (before or after)
        chosen = [indices] if is_single(indices) else indices
        at = [position(index, size, lookback, neg_index_as_lookback) for index in chosen]
        beyond = [str(index) for index, row in zip(chosen, at, strict=True) if not 0 <= row < size]
        if beyond and fill is None:
            there = f"{len(self)} rows and {lookback} of look-back"
            raise OutOfRangeError(f"no row at {', '.join(beyond)}: there are {there}. Pass `fill`, or a slice.")
        inside = np.array([0 <= row < size for row in at], bool)
        return np.array([row for row in at if 0 <= row < size], np.intp), inside, len(at), not beyond

    def _read(
        self,
        index: slice | Array,
        as_list: bool | None = None,
        *,
        one_hot: bool = False,
        fill: Any = None,
        where: slice | Array = _ALL,
        num: int = 0,
    ) -> Any:
        """Return the rows of `index`, as a list or arrays; with `fill`, `num` rows, the rows of `index` at `where`."""
        as_list = not self.finalized if as_list is None else as_list
        form, leaves, parts = self.rows.form, self.rows.arrays(index), self._space_leaves
        if form is None:
            if parts is None:
                return [fill] * num if as_list else np.array([fill] * num)
            dtypes, shapes = [leaf.dtype for leaf in parts.leaves], [leaf.shape for leaf in parts.leaves]
            form = RowForm(parts.struct, parts.paths, dtypes, shapes)
            leaves = form.stack([])
        if parts is not None and len(parts.leaves) != len(leaves) and (one_hot or fill is not None):
            raise StructureError(f"rows have {len(leaves)} leaves, their space {self.space} has {len(parts.leaves)}.")
        if parts is not None and one_hot:
            leaves = [part.one_hot(leaf) for part, leaf in zip(parts.leaves, leaves, strict=True)]
        if fill is not None:
            leaves = filled(leaves, fill, where, num, parts, one_hot)
        return form.items(zip(*map(listed, leaves), strict=True)) if as_list else form.pack(leaves)
