"""The nest of a table's items, from its signature or from the spec of its first item."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np

from reverb_writer.errors import StructureError
from reverb_writer.protocol.signatures import check_signature, decode_spec, have_same_leaves, packer, spec_text

_LOG = logging.getLogger(__package__)


class TableStructure:
    """The structure of a table's items on all servers of a dataset. Not thread-safe.

    Items whose columns do not fit the table's signature are foreign. Without a signature, the first item decides the
    structure, and later items of another spec are foreign. Items of other writers have no spec; if such an item is the
    first, items are tuples of columns.
    """

    def __init__(self, table: str, signature: Any) -> None:
        """Take a table's signature; None to take the spec of the first item."""
        self.table, self._signature = table, signature
        self._spec = signature  # a nest of `ArraySpec`
        self.pack = packer(self._spec)  # makes a nest of columns, or a tuple if the nest is unknown
        self._first: bytes | None = None if signature is None else b""  # the encoded spec of the first item
        self._faults: dict[bytes, str] = {}  # for other specs than the first; empty for the same leaves
        self._has_warned = False

    def check_spec(self, spec: bytes) -> None:
        """Raise StructureError if the item of this encoded spec is foreign; the first item is not."""
        if spec == self._first or not (spec and self._first):
            return
        if (fault := self._faults.get(spec)) is None:
            other = decode_spec(spec)
            fault = self._faults[spec] = (
                ""
                if have_same_leaves(self._spec, other)
                else f"The first item has {spec_text(self._spec)}; the other one has {spec_text(other)}."
            )
        if fault:
            self._refuse(fault)

    def check_form(self, form: Sequence[tuple[np.dtype[Any], tuple[int, ...], bool]]) -> None:
        """Raise StructureError if an item of this `ItemCache.form` does not fit the table's signature."""
        if self._signature is None:
            return
        dtypes, shapes, are_scalar = zip(*form, strict=True)
        paths = [f"column {number}" for number in range(len(form))]
        times = [() if is_scalar else (None,) for is_scalar in are_scalar]
        try:
            check_signature(self.table, self._signature, paths, dtypes, shapes, times)
        except StructureError as error:
            self._refuse(str(error))

    def settle(self, spec: bytes) -> None:
        """Take the spec of an item that was read and that `check_spec` allows, if it is the first item."""
        if self._first is None:
            self._first, self._spec = spec, decode_spec(spec) if spec else None
            self.pack = packer(self._spec)

    def _refuse(self, fault: str) -> NoReturn:
        if not self._has_warned:
            self._has_warned = True
            _LOG.warning(
                "Table `%s`: items of another structure are left out, and counted as `foreign_items`. %s Make the "
                "actors agree, or read the items with another dataset.",
                self.table,
                fault,
            )
        raise StructureError(fault)
