"""`InfiniteLookbackBuffer`: one column of an episode, with its look-back, which can be read beyond both ends."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from reverb_writer.arguments import integer
from reverb_writer.episodes import filling
from reverb_writer.episodes.growing_columns import Block, Columns, as_objects, batched, listed, stacked
from reverb_writer.episodes.indexing import Indices, is_single, position, span
from reverb_writer.episodes.space_structure import Parts, check
from reverb_writer.errors import (
    ClosedError,
    FormatError,
    OutOfRangeError,
    ReverbWriterError,
    SpecError,
    StructureError,
)

Array = npt.NDArray[Any]

_ALL = slice(None)


@contextlib.contextmanager
def broken_state(of: str) -> Iterator[None]:
    """Raise FormatError for whatever goes wrong because a state is none."""
    try:
        yield
    except FormatError:
        raise
    except (ReverbWriterError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise FormatError(f"this is not a state of {of}: {type(error).__name__}: {error}") from error


class InfiniteLookbackBuffer:
    """Rows that are appended one by one; the first `lookback` rows are history that is only read.

    Rows are nests without time; their leaves are stored in arrays from the start. Before `finalize()` its getters
    return lists of rows; after it, arrays [T, ...] or nests of them. Results are owned by the caller. Not thread-safe.

    Source: RLlib 2.35 `InfiniteLookbackBuffer`; docs/compatibility.md lists the differences.

    Attributes:
        lookback: number of rows that are look-back, >= 0.
        finalized: whether getters return arrays.
        is_untyped: whether rows are any objects, stored unchanged.

    >>> buffer = InfiniteLookbackBuffer([10, 11, 12, 13, 14], lookback=2)
    >>> len(buffer), buffer.finalize().get(slice(-7, 5), fill=0)
    (3, array([ 0,  0, 10, 11, 12, 13, 14,  0,  0]))
    """

    __slots__ = ("_parts", "_space", "finalized", "is_untyped", "lookback", "rows")

    def __init__(self, data: Any = None, lookback: int = 0, space: Any = None, *, untyped: bool = False) -> None:
        """Start with the first rows.

        Args:
            data: a list of rows, or a nest of arrays [T, ...], which makes the buffer finalized; copied.
            lookback: how many of them are look-back.
            space: the Gymnasium space of a row; only one-hot vectors need it.
            untyped: whether rows are any objects, stored unchanged; such a buffer always returns lists.

        Raises:
            StructureError: rows differ in structure or shape.
        """
        self.is_untyped = untyped
        self.finalized = data is not None and not isinstance(data, list) and not untyped
        self.rows = Columns(untyped=untyped)
        if self.finalized or data:
            block = self._block(data)
            self.rows.put(block)
            self.rows.size = block.num_rows
        self.lookback = min(integer("lookback", lookback, minimum=0), self.rows.size)
        self.space = space

    @property
    def space(self) -> Any:
        """The Gymnasium space of a row, or None."""
        return self._space

    @space.setter
    def space(self, space: Any) -> None:
        self._space = space
        self._parts = None if space is None else Parts(space)

    @property
    def data(self) -> Any:
        """All rows, the look-back included, as a list or, if finalized, as arrays; copied."""
        return self._collect(slice(0, self.rows.size), self.rows.size)

    def to_arrays(self) -> Any:
        """Return all rows but the look-back as a nest with leaves [T, ...], finalized or not."""
        return self._collect(slice(self.lookback, self.rows.size), len(self), as_list=False)

    def __len__(self) -> int:
        """Return the number of rows, without the look-back."""
        return max(self.rows.size - self.lookback, 0)

    def len_incl_lookback(self) -> int:
        """Return the number of rows, with the look-back."""
        return self.rows.size

    def append(self, item: Any) -> None:
        """Add `item`, a row; amortised O(1), finalized or not.

        Raises:
            StructureError: its structure or shapes differ from the first row. Nothing changed.
        """
        if not self.rows.stage(item):
            self.rows.put(self.checked(item))
        self.rows.size += 1

    def checked(self, item: Any, what: str = "item") -> Block:
        """Return `item`, a row, as the argument of `rows.put`; errors call it `what`.

        Raises:
            StructureError: its structure or shapes differ from the first row.
        """
        block = as_objects([item]) if self.is_untyped else stacked([item], what)
        return self.rows.check(block, what)

    def extend(self, items: Any) -> None:
        """Add rows: `items` is a list of them, or a nest of arrays [T, ...].

        Raises:
            StructureError: structure or shapes of one differ from the first row. Nothing changed.
        """
        if not isinstance(items, list) or items:
            block = self.rows.check(self._block(items), "items")
            self.rows.put(block)
            self.rows.size += block.num_rows

    def concat(self, other: InfiniteLookbackBuffer) -> None:
        """Add the rows of `other`, another buffer, without its look-back."""
        block = other.rows.block(np.arange(other.lookback, other.rows.size))
        if block is not None:
            self.rows.put(self.rows.check(block, "other"))
            self.rows.size += block.num_rows

    def part(self, index: Array, lookback: int) -> InfiniteLookbackBuffer:
        """Return a buffer of the rows whose numbers `index` holds, integers [n], counted with the look-back.

        The first `lookback` of these rows are the look-back of the new buffer.
        """
        part = InfiniteLookbackBuffer(space=self.space, untyped=self.is_untyped)
        part.rows = Columns(self.rows.block(index), untyped=self.is_untyped)
        part.lookback = min(lookback, len(index))
        part.finalized = self.finalized
        return part

    def pop(self, index: int = -1) -> None:
        """Remove a row and return nothing; `index` is that of a list of all rows, look-back included.

        Raises:
            OutOfRangeError: there is no such row.
        """
        at = position(index, self.rows.size, 0)
        if not 0 <= at < self.rows.size:
            raise OutOfRangeError(f"cannot pop row {index} of {self.rows.size}.")
        self.rows.delete(at)

    def finalize(self) -> InfiniteLookbackBuffer:
        """Make getters return arrays; return the buffer. Idempotent."""
        if not self.finalized and not self.is_untyped:
            self.rows.trim()
            self.finalized = True
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
            indices: an int for one row; a slice or a list for several; None for all but the look-back. Ints >= 0 count
                from ts 0; negative ones from the end, look-back included.
            neg_index_as_lookback: count negative ones from ts 0 to the left, into the look-back.
            fill: the value of all positions outside the data: a number for every element, or a row. Cast to the dtype
                of the space, if there is one; else the dtype of the result widens if it must.
            one_hot_discrete: return Discrete and MultiDiscrete parts as one-hot vectors, float32.

        Returns:
            A row for an int. For several: a list of rows, or, if finalized, leaves [T, ...]. Owned by the caller.

        Raises:
            OutOfRangeError: an int, alone or in a list, is outside the data, and there is no `fill`.
            SpecError: `indices` or `fill` is invalid, or there is no space for one-hot vectors.
        """
        if type(indices) is int and not one_hot_discrete:  # the same as below, for the common case
            at_row = indices + (self.lookback if indices >= 0 or neg_index_as_lookback else self.rows.size)
            if 0 <= at_row < self.rows.size:
                return self.rows.row(at_row, plain=not self.finalized)
        if one_hot_discrete and self._parts is None:
            raise SpecError("one-hot vectors need a space. Give one when constructing.")
        if indices is None or isinstance(indices, slice):
            return self._get_slice(indices or _ALL, neg_index_as_lookback, fill, one_hot_discrete)
        if is_single(indices):
            return self._get_row(indices, neg_index_as_lookback, fill, one_hot_discrete)
        at = self._positions(indices, neg_index_as_lookback)  # type: ignore[arg-type]  # it is a list
        if not at or (min(at) >= 0 and max(at) < self.rows.size):
            return self._collect(np.array(at, np.intp), len(at), one_hot_discrete)
        inside = np.array([0 <= row < self.rows.size for row in at])
        self._check_fill(fill, np.asarray(indices)[~inside])
        return self._filled(fill, len(at), inside, np.array(at)[inside], one_hot_discrete)

    def _get_slice(self, indices: slice, neg_index_as_lookback: bool, fill: Any, one_hot_discrete: bool) -> Any:
        columns = self.rows
        before, index, num, after = span(indices, columns.size, self.lookback, neg_index_as_lookback, fill is not None)
        if not (before or after):
            return self._collect(index, num, one_hot_discrete)
        where = slice(before, before + num)
        if columns.single_leaf is None or one_hot_discrete or self._parts is not None:
            return self._filled(fill, before + num + after, where, index, one_hot_discrete)
        # The same as `_filled`, for the common case.
        leaf = columns.single_leaf[index]
        leaf = filling.place(leaf, where, fill, filling.holding(fill, leaf.dtype, leaf.shape[1:]), before + num + after)
        return leaf if self.finalized else listed(leaf)

    def _get_row(self, index: Any, neg_index_as_lookback: bool, fill: Any, one_hot_discrete: bool) -> Any:
        at = position(index, self.rows.size, self.lookback, neg_index_as_lookback)
        if 0 <= at < self.rows.size:
            if not one_hot_discrete:
                return self.rows.row(at, plain=not self.finalized)
            return self._collect(np.array([at]), 1, one_hot_discrete=True, as_list=True)[0]
        self._check_fill(fill, [index])
        return self._filled(fill, 1, slice(0, 0), slice(0, 0), one_hot_discrete, as_list=True)[0]

    def _positions(self, indices: Sequence[int], neg_index_as_lookback: bool) -> list[int]:
        total, lookback = self.rows.size, self.lookback
        return [position(index, total, lookback, neg_index_as_lookback) for index in indices]

    def set(
        self,
        new_data: Any,
        *,
        at_indices: Indices = None,
        neg_index_as_lookback: bool = False,
    ) -> None:
        """Overwrite a row, or several.

        Args:
            new_data: a row, if `at_indices` is an int; else a list of rows, or a nest of arrays [T, ...]. Copied.
            at_indices: as in `get`; None for all but the look-back.
            neg_index_as_lookback: as in `get`.

        Raises:
            OutOfRangeError: a row does not exist, or `new_data` has another number of rows.
            StructureError: structure or shapes of a new row differ; or the buffer is finalized and a row is not in its
                space.
            Nothing changed in any of these cases.
        """
        index: slice | Array
        if at_indices is None or isinstance(at_indices, slice):
            wanted = slice(None) if at_indices is None else at_indices
            _, index, num, _ = span(wanted, self.rows.size, self.lookback, neg_index_as_lookback)
        else:
            several: Any = at_indices
            if is_single(at_indices):
                several, new_data = [at_indices], [new_data]
            at = np.array(self._positions(several, neg_index_as_lookback), np.intp)
            self._check_fill(None, np.asarray(several)[(at < 0) | (at >= self.rows.size)])
            index, num = at, len(at)
        block = None if isinstance(new_data, list) and not new_data else self._block(new_data)
        size = 0 if block is None else block.num_rows
        if size != num:
            raise OutOfRangeError(f"cannot set {num} rows to {size} new ones. Pass as many rows as there are indices.")
        if block is not None and size:
            self.rows.check(block, "new_data")
            if self.finalized and self.space is not None:
                new = Columns(block)
                for row in range(size):
                    check(self.space, new.row(row), "new_data")
            self.rows.replace(index, block)

    def get_state(self) -> dict[str, Any]:
        """Return the rows, a copy, with the look-back and the space; as `Episode.get_state`."""
        data = None if self.rows.paths is None else self.data
        return {
            "data": copy.deepcopy(data) if self.is_untyped else data,
            "lookback": self.lookback,
            "finalized": self.finalized,
            "space": self.space,
            "untyped": self.is_untyped,
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> InfiniteLookbackBuffer:
        """Make a buffer of a `state` that `get_state` returned; raises FormatError if it is something else."""
        with broken_state("a buffer"):
            data = copy.deepcopy(state["data"]) if state["untyped"] else state["data"]
            buffer = cls(data, state["lookback"], state["space"], untyped=state["untyped"])
            buffer.finalized = bool(state["finalized"])
        return buffer

    def __getitem__(self, indices: Any) -> Any:
        return self.get(indices)

    def __setitem__(self, indices: Any, new_data: Any) -> None:
        self.set(new_data, at_indices=indices)

    def __add__(self, other: Any) -> InfiniteLookbackBuffer:
        """Return a new buffer: with a number added to every number, or with a list or a buffer appended.

        The look-back of an appended buffer is left out.

        Raises:
            ClosedError: the buffer is finalized.
        """
        if self.finalized:
            raise ClosedError(f"cannot add to a finalized {type(self).__name__}.")
        result = InfiniteLookbackBuffer(self.data, self.lookback, self.space, untyped=self.is_untyped)
        if isinstance(other, InfiniteLookbackBuffer):
            result.concat(other)
        elif isinstance(other, list):
            result.extend(other)
        elif isinstance(other, int | float | complex | np.number):
            data = [item + other if isinstance(item, int | float | complex | np.number) else item for item in self.data]
            return InfiniteLookbackBuffer(data, self.lookback, self.space, untyped=self.is_untyped)
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
            and self.rows == other.rows
        )

    __hash__ = None  # type: ignore[assignment]  # it is mutable

    def __repr__(self) -> str:
        data = self._collect(slice(0, self.rows.size), self.rows.size, as_list=True)
        return f"{type(self).__name__}({data[: self.lookback]} <- lookback({self.lookback}) | {data[self.lookback :]})"

    def _block(self, data: Any) -> Block:
        if self.is_untyped:
            return as_objects(data)
        return stacked(data, "item") if isinstance(data, list) else batched(data, "data")

    def _check_fill(self, fill: Any, beyond: Sequence[Any] | Array) -> None:
        """Raise if rows are outside the data and there is no fill value."""
        if len(beyond) and fill is None:
            size = f"{len(self)} rows and {self.lookback} of look-back"
            raise OutOfRangeError(
                f"no row at {', '.join(map(str, beyond))}: there are {size}. Pass `fill`, or a slice."
            )

    def _collect(
        self, index: slice | Array, num: int, one_hot_discrete: bool = False, *, as_list: bool | None = None
    ) -> Any:
        """Return existing rows, as a list or as arrays."""
        single_leaf = self.rows.single_leaf
        if single_leaf is not None and not one_hot_discrete:  # the same as below, for the common case
            leaf = single_leaf[index].copy() if type(index) is slice else single_leaf[index]
            return leaf if (self.finalized if as_list is None else not as_list) else listed(leaf)
        if self.rows.paths is None:
            return self._filled(0, num, index, index, one_hot_discrete, as_list=as_list)
        leaves = self._one_hot(self.rows, index) if one_hot_discrete else self.rows.take(index)
        return self._packed(self.rows, leaves, as_list)

    def _filled(
        self,
        fill: Any,
        num: int,
        where: slice | Array,
        index: slice | Array,
        one_hot_discrete: bool,
        *,
        as_list: bool | None = None,
    ) -> Any:
        """Return `num` rows: at `where` the rows of `index`, elsewhere the fill value."""
        form = self.rows
        if form.paths is None:
            if self._parts is None:
                as_list = not self.finalized if as_list is None else as_list
                return [fill] * num if as_list else np.array([fill] * num)
            form = Columns(_no_rows(self._parts))
        leaves = self._one_hot(form, index) if one_hot_discrete else form.views(index)
        self._check_parts(leaves)
        filled = []
        for number, (leaf, value) in enumerate(zip(leaves, filling.per_leaf(fill, len(leaves)), strict=True)):
            if self._parts is None:
                row, dtype = value, filling.holding(value, leaf.dtype, leaf.shape[1:])
            else:
                row, dtype = filling.cast(value, self._parts.leaves[number], one_hot_discrete)
            filled.append(filling.place(leaf, where, row, dtype, num))
        return self._packed(form, filled, as_list)

    def _one_hot(self, form: Columns, index: slice | Array) -> list[Array]:
        assert self._parts is not None  # noqa: S101  # `get` has checked it
        leaves = form.views(index)
        self._check_parts(leaves)
        return [part.one_hot(leaf) for part, leaf in zip(self._parts.leaves, leaves, strict=True)]

    def _check_parts(self, leaves: Sequence[Array]) -> None:
        if self._parts is not None and len(self._parts.leaves) != len(leaves):
            num = len(self._parts.leaves)
            raise StructureError(f"rows have {len(leaves)} leaves, their space {self.space} has {num}.")

    def _packed(self, form: Columns, leaves: list[Array], as_list: bool | None) -> Any:
        return form.pack(leaves) if (self.finalized if as_list is None else not as_list) else form.items(leaves)


def _no_rows(parts: Parts) -> Block:
    """Return an empty block of rows of a space."""
    return Block(parts.struct, parts.paths, [np.empty((0, *leaf.shape), leaf.dtype) for leaf in parts.leaves])
