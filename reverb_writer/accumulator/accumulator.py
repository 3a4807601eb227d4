"""Collect data of several rates into one item: rows of a rollout, and single values for all rows.

    example                                    capacity of the timescale       an `add` gives
    -----------------------------------------  ------------------------------  -----------------------------
    some leaf is 0-d, or every leaf [1, ...]   1: a single item                the leaves as they are
    every leaf [N, ...]                        N: buffered                     row number `counts[name]`
    `capacities={name: N}`, leaves [...]       N: buffered, stored [N, ...]    row number `counts[name]`
    `capacities={name: None}`                  1: a single item                the leaves as they are

Only `insert` loads gRPC.

Source: Echo 0.1.1, `TrajectoryAccumulator`; docs/how-to/several-data-rates.md lists the differences.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tree

from reverb_writer.arguments import integer, table_names
from reverb_writer.errors import IncompleteError, OutOfRangeError, SpecError, StructureError, UnknownKeyError
from reverb_writer.leaves import Fit, convert, mismatch
from reverb_writer.nests import at_leaf, check_same_leaves, flattener, map_present, named_leaves, packer, structure_of
from reverb_writer.steps import leaf_spec

_NO_NUMBERS = "OSUTMm"  # kinds of dtypes: objects, strings, times
_HELD = 65_504  # all floating dtypes of NumPy hold smaller numbers
_FLAT = (np.ndarray, np.generic, bool, int, float)
_LIKE = "as in the example"
_ADVICE = "Round it yourself, choose another dtype in the example, or pass lossy_casts=True."

_dtype_and_shape = operator.attrgetter("dtype", "shape")


class NotADictError(SpecError, TypeError):
    """The example is not a dict of timescales."""


class TrajectoryAccumulator:
    """Collect rows of several timescales, then return or insert them as one item.

    It has the interface of Echo's class of the same name. Use it from one thread at a time.

    >>> import numpy as np
    >>> example = {"step": {"reward": np.zeros(3, np.float32)}, "episode": {"length": np.int32(0)}}
    >>> accumulator = TrajectoryAccumulator(example)
    >>> accumulator.capacities
    {'step': 3, 'episode': 1}
    >>> for reward in (1, 2, 3):
    ...     accumulator.add("step", {"reward": reward})
    >>> accumulator.add("episode", {"length": 3})
    >>> accumulator.build()
    {'step': {'reward': array([1., 2., 3.], dtype=float32)}, 'episode': {'length': array(3, dtype=int32)}}
    """

    def __init__(
        self,
        example: Mapping[str, Any],
        *,
        capacities: Mapping[str, int | None] | None = None,
        lossy_casts: bool = False,
    ) -> None:
        """Allocate the columns.

        Args:
            example: a nest per timescale, of arrays or specs; only dtypes and shapes of the leaves are used. None is
                not a leaf, and remains None.
            capacities: rows of each timescale, >= 1, or None for a single item; then `example` has the data of one
                `add`. Without this argument, the shapes give the capacities (see above).
            lossy_casts: whether NumPy's cast to the example's dtype may change a value, such as 1.9 to the integer 1.
                Rounding to the nearest float is no change; overflow to infinity is one.

        Raises:
            NotADictError: `example` is not a dict; a `TypeError`.
            StructureError: a timescale has no leaf, leaves of different lengths, or a leaf that is not a number.
            SpecError: `capacities` does not name exactly the timescales, or a capacity is < 1.
        """
        if not isinstance(example, Mapping):
            raise NotADictError(f"`example` must be a dict of timescales by name, got {type(example).__name__}.")
        if capacities is not None and capacities.keys() != example.keys():
            raise SpecError(f"`capacities` must name the timescales {[*example]}, got {[*capacities]}.")
        self._timescales = {
            name: _Timescale(name, nest, ... if capacities is None else capacities[name], lossy=lossy_casts)
            for name, nest in example.items()
        }

    def __repr__(self) -> str:
        rows = (f"{name} {scale.count} of {scale.capacity}" for name, scale in self._timescales.items())
        return f"<TrajectoryAccumulator: {', '.join(rows)}>"

    @property
    def capacities(self) -> dict[str, int]:
        """Number of rows of each full timescale."""
        return {name: timescale.capacity for name, timescale in self._timescales.items()}

    @property
    def counts(self) -> dict[str, int]:
        """Number of rows added to each timescale since the last `build`, `insert` or `reset`."""
        return {name: timescale.count for name, timescale in self._timescales.items()}

    @property
    def is_full(self) -> bool:
        """Whether every timescale is full."""
        return all(timescale.count == timescale.capacity for timescale in self._timescales.values())

    def add(self, name: str, data: Any) -> None:
        """Write the next row of a timescale.

        Args:
            name: the timescale.
            data: nest like the example's, without the dimension of rows, or with this dimension of size 1. Copied; cast
                and broadcast to the dtypes and shapes of the example.

        Raises:
            UnknownKeyError: no timescale has this name; a `KeyError`.
            OutOfRangeError: the timescale is full; an `IndexError`.
            StructureError: `data` has other leaves, an unsuitable shape, or values that the dtype cannot hold; names
                the leaf. Nothing changed.
        """
        timescale = self._timescales.get(name)
        if timescale is None:
            raise UnknownKeyError(f"Unknown timescale '{name}'. Known: {[*self._timescales]}.")
        timescale.add(data)

    def build(self, *, partial: bool = False) -> dict[str, Any]:
        """Return the added rows in the nest of the example, owned by the caller; start again without rows.

        Leaves of buffered timescales are [N, ...]. With `partial`, rows may be missing, and are zero; read `counts`
        before to know the number of rows.

        Raises:
            IncompleteError: rows are missing; names the timescales and numbers. Nothing changed.
        """
        self._check(partial=partial)
        built = {name: timescale.pack() for name, timescale in self._timescales.items()}
        for timescale in self._timescales.values():
            timescale.count = 0
            timescale.columns = map_present(np.empty_like, timescale.columns)  # the caller owns the old ones
        return built

    def insert(
        self,
        client: Any,
        table: str | Sequence[str],
        priority: float = 1.0,
        *,
        partial: bool = False,
        timeout_s: float | None = None,
    ) -> None:
        """Write the added rows as one item; when the server has it, start again without rows.

        Columns are the leaves, in dm-tree's order: N rows for a buffered timescale; for a single item one value without
        time, or one row if all leaves are [1, ...]. Learners get the same nest because the item carries its spec; None
        in the example becomes an empty tuple.

        Args:
            client: an `rw.Client`; for an address or a `reverb.Client`, each call makes a connection unless the process
                has one to this address.
            table: name of the table, or several names.
            priority: the item's priority in each table, finite and >= 0.
            partial: as for `build`.
            timeout_s: in seconds; None for the client's.

        Raises:
            IncompleteError: rows are missing. Nothing changed.
            ReplayTimeoutError: the item was not confirmed in time. The rows are kept; another `insert` may write the
                item twice.
            StructureError, SpecError, ServerUnavailableError: as for `Client.insert`. Nothing changed.
        """
        # It imports gRPC and protobuf, which `add` and `build` do not need.
        from reverb_writer.replay.client import as_client  # noqa: PLC0415

        self._check(partial=partial)
        data = {name: timescale.pack(none=()) for name, timescale in self._timescales.items()}
        squeeze = {name: timescale.without_time() for name, timescale in self._timescales.items()}
        priorities = dict.fromkeys(table_names(table), priority)
        client, owned = as_client(client, timeout_s)
        try:
            client.insert(data, priorities, timeout_s, squeeze=squeeze)
        finally:
            if owned:
                client.close()
        self.reset()

    def reset(self) -> None:
        """Remove the added rows."""
        for timescale in self._timescales.values():
            timescale.count = 0

    def _check(self, *, partial: bool) -> None:
        """Raise if rows are missing, unless `partial`."""
        lacking = [
            f"'{timescale.name}' has {timescale.count} of {timescale.capacity}"
            for timescale in self._timescales.values()
            if timescale.count < timescale.capacity
        ]
        if lacking and not partial:
            raise IncompleteError(
                f"timescale {', '.join(lacking)} rows. Add the others, pass partial=True for zeros in their place, or "
                "call `reset()` to forget them."
            )


class _Timescale:
    """Columns [N, ...], or [...] for a single item, filled row by row."""

    def __init__(self, name: str, example: Any, capacity: Any, *, lossy: bool) -> None:
        """Allocate the columns; `capacity` is None for a single item, `...` to take it from the example's shapes."""
        self.name = name
        self.count = 0
        self._policy = Fit.LOSSY if lossy else Fit.LOSSLESS
        self._where = f"timescale '{name}'"
        self._paths, leaves = named_leaves(example, self._where)
        self._names = [at_leaf(self._where, path) for path in self._paths]
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
        # Dtype and shape of each leaf of a row; dtype None if the example has None.
        self._expected = [(None, ()) if leaf is None else (leaf.dtype, leaf.shape[first:]) for leaf in self.columns]

    def add(self, data: Any) -> None:
        """Write the next row, or raise and change nothing: all leaves are checked before one is written."""
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
        """Return the nest of columns, with zeros in missing rows, and `none` instead of None in the example."""
        missing = ... if self.single else slice(self.count, None)
        for column in self.columns:
            if column is not None and self.count < self.capacity:
                column[missing] = 0
        return self._pack([none if column is None else column for column in self.columns])

    def without_time(self) -> Any:
        """Return a nest of booleans: whether learners get each leaf without the dimension of rows."""
        bare = self.single and any(column.shape[:1] != (1,) for column in self.columns if column is not None)
        return self._pack([() if column is None else bare for column in self.columns])

    def _convert(self, value: Any, expected: tuple[Any, tuple[int, ...]], name: str) -> Any:
        """Return a value that NumPy can assign to a row of a leaf's column, or raise."""
        dtype, shape = expected
        if value is None and dtype is None:
            return None
        if dtype is not None:  # most leaves need no conversion
            if isinstance(value, np.ndarray) and value.dtype == dtype and value.shape == shape:
                return value
            if type(value) is float and dtype.kind == "f" and abs(value) < _HELD:
                return value
        is_nest = not isinstance(value, _FLAT) and tree.is_nested(value)
        if value is None or dtype is None or is_nest:
            wanted = "None" if dtype is None else f"an array of {dtype} {shape}"
            raise StructureError(f"{name}: {type(value).__name__}, expected {wanted} {_LIKE}.")
        array = np.asarray(value)
        # `same_kind` casts would wrap integers, and refuse 2.0 for an integer.
        found = convert(array, dtype, name, self._policy, _ADVICE)
        if found is not None:
            row = np.empty(shape, dtype)
            with contextlib.suppress(ValueError):  # the shape does not fit
                row[...] = found
                return row
        raise mismatch(name, array.dtype, array.shape, dtype, shape, _LIKE)


def _guess(where: str, shapes: Sequence[tuple[int, ...]]) -> tuple[bool, int]:
    """Return whether leaves of these shapes are a single item, and their number of rows."""
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
