"""The nest of a table's items: by its signature, else by the spec of the first item."""

from __future__ import annotations

import logging
from typing import Any

from reverb_writer.protocol.signatures import decode_spec, have_same_leaves, packer, spec_text

_LOG = logging.getLogger(__package__)


class TableStructure:
    """The structure of a table's items for one dataset, whichever server they come from. Not thread-safe.

    Without a signature the first item settles it. Later items of another spec are foreign. An item without a spec, as
    other writers write them, is never foreign; if it is the first one, items are tuples of columns.
    """

    def __init__(self, table: str, signature: Any) -> None:
        """Take a table's signature, None if it has none: then the first item's spec counts."""
        self.table = table
        self._spec = signature  # a nest of `ArraySpec`
        self.pack = packer(self._spec)  # the nest of some columns; a tuple of columns where it is not known
        self._first: bytes | None = None if signature is None else b""  # the spec of the first item, encoded
        self._verdicts: dict[bytes, bool] = {}  # of other specs than the first

    def admits(self, spec: bytes) -> bool:
        """Return whether an item with this encoded spec belongs to the table's others, or would be the first."""
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
        """Take the spec of an item that was read and that `admits` allows, if it is the first one."""
        if self._first is None:
            self._first, self._spec = spec, decode_spec(spec) if spec else None
            self.pack = packer(self._spec)
