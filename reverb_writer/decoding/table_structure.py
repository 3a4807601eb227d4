"""The nest of a table's items: by its signature, else by the spec of the first item."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Any

from reverb_writer.background import Flag
from reverb_writer.errors import ReplayTimeoutError
from reverb_writer.protocol.specs import decode_spec, have_same_leaves, packer, spec_text, with_trajectories

_LOG = logging.getLogger(__package__)


class TableStructure:
    """What the items of a table look like to one dataset, whichever server they come from. Thread-safe.

    Without a signature the first item settles it. Later items of another spec are foreign. An item without a spec, as
    other writers write them, is never foreign; if it is the first one, items are tuples of columns.

    Attributes:
        table: its name.
    """

    def __init__(self, table: str, signature: Any) -> None:
        """Take a table's signature, None if it has none: then the first item's spec counts."""
        self.table, self._has_signature = table, signature is not None
        self._spec = with_trajectories(signature)  # a nest of `ArraySpec`
        self._pack = packer(self._spec)
        self._first = b""  # the spec of the first item, encoded
        self._known = Flag()
        if self._has_signature:
            self._known.set()
        self._lock = threading.Lock()
        self._verdicts: dict[bytes, bool] = {}  # of other specs than the first

    def pack(self, columns: Sequence[Any]) -> Any:
        """Return the nest of some columns; a tuple of them where it is not known."""
        return self._pack(columns)

    def spec(self, timeout_s: float) -> Any:
        """Return the nest of `ArraySpec` of the items, None if they are tuples; waits for the first item.

        Raises:
            ReplayTimeoutError: none has come in time.
        """
        if not self._known.wait(timeout_s):
            raise ReplayTimeoutError(
                f"table `{self.table}` has no signature, and no item has come within {timeout_s:.1f} s that tells its "
                "structure. Start the actors or raise `timeout_s`."
            )
        return self._spec

    def admits(self, spec: bytes) -> bool:
        """Return whether an item with this encoded spec would belong to the table's others."""
        if self._has_signature or spec == self._first or not (spec and self._first):
            return True
        with self._lock:
            return self._is_same(spec)

    def settle(self, spec: bytes) -> bool:
        """Take the spec of an item that was read, if it is the first one; return whether it belongs to the others."""
        if not self._known.is_set():
            with self._lock:
                if not self._known.is_set():
                    self._first, self._spec = spec, decode_spec(spec) if spec else None
                    self._pack = packer(self._spec)
                    self._known.set()
        return self.admits(spec)

    def _is_same(self, spec: bytes) -> bool:
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
