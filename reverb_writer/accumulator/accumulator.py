"""Collect data of several rates into one item: rows of a rollout, and values that exist once for all rows.

    example                                    capacity of the timescale       an `add` gives
    -----------------------------------------  ------------------------------  -----------------------------
    some leaf is 0-d, or every leaf [1, ...]   1: a single item                the leaves as they are
    every leaf [N, ...]                        N: buffered                     row number `counts[name]`
    `capacities={name: N}`, leaves [...]       N: buffered, stored [N, ...]    row number `counts[name]`
    `capacities={name: None}`                  1: a single item                the leaves as they are

Loads no gRPC until `insert` is called.

Source: Echo 0.1.1, `TrajectoryAccumulator`; docs/how-to/several-data-rates.md lists the differences.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tree

from reverb_writer.accumulator.timescale import Timescale
from reverb_writer.errors import IncompleteError, SpecError, UnknownKeyError


class NotADictError(SpecError, TypeError):
    """The example is not a dict of timescales."""


class TrajectoryAccumulator:
    """Collect rows of several timescales, then return or insert them as one item.

    Has the interface of Echo's class of the same name. Used from one thread at a time.

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
            example: a nest for each timescale; only dtypes and shapes of its leaves are used, so specs work too. None
                is not a leaf, and stays None.
            capacities: rows of each timescale, >= 1, or None for a single item: then `example` is what one `add` gives.
                Without it, the shapes tell the capacities (see above).
            lossy_casts: whether a value may be changed by NumPy's cast to the example's dtype, as 1.9 to the integer 1.
                Rounding to the nearest float is no change, overflow to infinity is.

        Raises:
            NotADictError: `example` is not a dict; a `TypeError`.
            StructureError: a timescale has no leaf, leaves of different lengths, or a leaf that is not a number.
            SpecError: `capacities` does not name exactly the timescales, or a capacity is < 1.
        """
        if not isinstance(example, Mapping):
            raise NotADictError(
                f"`example` must be a dict with the names of timescales for keys, got {type(example).__name__}."
            )
        if capacities is not None and capacities.keys() != example.keys():
            raise SpecError(f"`capacities` must name the timescales {[*example]}, got {[*capacities]}.")
        self._timescales = {
            name: Timescale(name, nest, ... if capacities is None else capacities[name], lossy=lossy_casts)
            for name, nest in example.items()
        }

    def __repr__(self) -> str:
        rows = (f"{name} {scale.count} of {scale.capacity}" for name, scale in self._timescales.items())
        return f"<TrajectoryAccumulator: {', '.join(rows)}>"

    @property
    def capacities(self) -> dict[str, int]:
        """Number of rows of each timescale when it is full."""
        return {name: timescale.capacity for name, timescale in self._timescales.items()}

    @property
    def counts(self) -> dict[str, int]:
        """Number of rows added since the last `build`, `insert` or `reset`, for each timescale."""
        return {name: timescale.count for name, timescale in self._timescales.items()}

    @property
    def is_full(self) -> bool:
        """Whether every timescale is full."""
        return all(timescale.count == timescale.capacity for timescale in self._timescales.values())

    def add(self, name: str, data: Any) -> None:
        """Write the next row of a timescale.

        Args:
            name: the timescale.
            data: nest like the example's, without the dimension of rows, or with one of size 1. Copied; cast and
                broadcast to the dtypes and shapes of the example.

        Raises:
            UnknownKeyError: no timescale has this name; a `KeyError`.
            OutOfRangeError: the timescale is full; an `IndexError`.
            StructureError: `data` has other leaves, a shape that does not fit, or values that the dtype cannot hold;
                names the leaf. Nothing changed.
        """
        timescale = self._timescales.get(name)
        if timescale is None:
            raise UnknownKeyError(f"Unknown timescale '{name}'. Known: {[*self._timescales]}.")
        timescale.add(data)

    def build(self, *, partial: bool = False, copy: bool = True) -> dict[str, Any]:
        """Return the rows that were added, and start with no rows.

        Args:
            partial: whether rows may be missing; they are zero then. `counts`, read before, tells how many rows exist.
            copy: whether the caller owns the arrays. If not, the next `add` writes into them.

        Returns:
            The nest of the example: leaves [N, ...] of buffered timescales, as in the example of single items.

        Raises:
            IncompleteError: rows are missing; names the timescales and how many. Nothing changed.
        """
        self._check(partial=partial)
        built = {name: timescale.pack() for name, timescale in self._timescales.items()}
        for timescale in self._timescales.values():
            timescale.count = 0
            if copy:
                timescale.replace_columns()
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
        """Write the rows that were added as one item; once the server has it, start with no rows.

        Columns are the leaves, in the order of dm-tree: N rows for a buffered timescale, a single value without time
        for a single item, one row if its leaves are [1, ...]. Learners get the same nest, by the table's signature
        or, without one, by the spec that is stored for the table; None in the example becomes an empty tuple.

        Args:
            client: an `rw.Client`; an address or a `reverb.Client` costs a connection with each call, unless
                something else in the process has one to that address.
            table: its name, or several.
            priority: in each of them, finite and >= 0.
            partial: as for `build`.
            timeout_s: in seconds; None for the client's.

        Raises:
            IncompleteError: rows are missing. Nothing changed.
            ReplayTimeoutError: the item was not confirmed in time. The rows are kept; if `insert` is called again, the
                item may be written twice.
            StructureError, SpecError, ServerUnavailableError: as for `Client.insert`. Nothing changed.
        """
        # They import gRPC and protobuf, which `add` and `build` do not need.
        from reverb_writer.client.client import as_client  # noqa: PLC0415
        from reverb_writer.protocol.signatures import ArraySpec  # noqa: PLC0415

        self._check(partial=partial)
        data = {name: timescale.pack(none=()) for name, timescale in self._timescales.items()}
        squeeze = {name: timescale.without_time() for name, timescale in self._timescales.items()}
        spec = tree.map_structure(
            lambda column, bare: ArraySpec(column.shape[0 if bare else 1 :], column.dtype), data, squeeze
        )
        tables = (table,) if isinstance(table, str) else table
        client, owned = as_client(client, timeout_s)
        try:
            client.insert(data, dict.fromkeys(tables, priority), timeout_s, squeeze=squeeze, spec=spec)
        finally:
            if owned:
                client.close()
        self.reset()

    def reset(self) -> None:
        """Remove the rows that were added."""
        for timescale in self._timescales.values():
            timescale.count = 0

    def _check(self, *, partial: bool) -> None:
        """Raise if rows are missing, unless `partial`: then set them to zero."""
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
        for timescale in self._timescales.values():
            timescale.zero_missing_rows()
