"""The nest of a table's items, from its signature or from the spec of its first item."""

from __future__ import annotations

import logging
from typing import Any

from reverb_writer.protocol.signatures import decode_spec, have_same_leaves, packer, spec_text

_LOG = logging.getLogger(__package__)


class TableStructure:
    """The structure of a table's items on all servers of a dataset. Not thread-safe.

    Without a signature, the first item decides it, and later items of another spec are foreign. Items of other writers
    have no spec and are never foreign; if such an item is the first, items are tuples of columns.
    """

    def __init__(self, table: str, signature: Any) -> None:
        """Take a table's signature; None to take the spec of the first item."""
        self.table = table
        self._spec = signature  # a nest of `ArraySpec`
        self.pack = packer(self._spec)  # makes a nest of columns, or a tuple if the nest is unknown
        self._first: bytes | None = None if signature is None else b""  # the encoded spec of the first item
        self._verdicts: dict[bytes, bool] = {}  # for other specs than the first

    def admits(self, spec: bytes) -> bool:
        """Return whether an item with this encoded spec has the table's structure, or would be the first item."""
        if spec == self._first or not (spec and self._first):
            return True
        verdict = self._verdicts.get(spec)
        if verdict is None:
            verdict = have_same_leaves(self._spec, other := decode_spec(spec))
            if not verdict and not self._verdicts:
                _LOG.warning(
                    "Table `%s`: items of another structure are left out, and counted as `foreign_items`. The first "
                    "item has %s; the other one has %s. Make the actors agree, or read the items with another dataset.",
                    self.table,
                    spec_text(self._spec),
                    spec_text(other),
                )
            self._verdicts[spec] = verdict
        return verdict

    def settle(self, spec: bytes) -> None:
        """Take the spec of an item that was read and that `admits` allows, if it is the first item."""
        if self._first is None:
            self._first, self._spec = spec, decode_spec(spec) if spec else None
            self.pack = packer(self._spec)
