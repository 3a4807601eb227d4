"""The data of a server: its tables, their chunks, and one lock for both.

Source: Reverb 0.14 (behaviour of `reverb_service_impl.cc`, measured side by side).
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from reverb_writer.local.chunk_store import ChunkStore
from reverb_writer.local.refusals import Refusal, Status
from reverb_writer.local.table import Table
from reverb_writer.tables import SAVES, TableConfig
from reverb_writer.tables.saves import NO_SAVE, saves_table
from reverb_writer.tables.table_messages import encode_signature


class Store:
    """Tables and chunks. Thread-safe.

    Attributes:
        lock: guards the tables and the chunks.
        chunks: the chunks of all tables.
        tables: the tables by name, with the reserved table of `tables.saves`.
        max_item_bytes: bound on an item of an insert stream, uncompressed, in bytes; None for no bound.
        signatures: the encoded signature of each table by name; None for a table without one.
        state_id: random, 128 bits; clients recognize by it that the server was restarted.
        streams: the open streams, guarded by `lock`.
        is_closed: whether the server was closed; then it takes no more streams and calls.
    """

    def __init__(
        self,
        configs: Sequence[TableConfig],
        max_bytes: int,
        max_item_bytes: int | None = None,
        restored: tuple[str, int] = NO_SAVE,
    ) -> None:
        """Make empty tables; `restored` is the save that will fill them.

        Raises:
            SpecError, StructureError: a table's signature is invalid.
        """
        self.lock = threading.RLock()
        self.chunks, self.max_item_bytes = ChunkStore(max_bytes), max_item_bytes
        rng = np.random.default_rng()
        every = [*configs, saves_table(restored)]
        self.tables = {config.name: Table(config, self.chunks, rng) for config in every}
        self.signatures = {config.name: encode_signature(config.signature) for config in every}
        self.state_id = secrets.randbits(128)
        self.streams: dict[Any, None] = {}
        self.is_closed = False

    def table(self, name: str) -> Table:
        """Return a table.

        Raises:
            Refusal: no table has this name.
        """
        if name not in self.tables:
            there = ", ".join(f"`{known}`" for known in self.tables if known != SAVES)
            raise Refusal(Status.NOT_FOUND, f"Priority table {name} was not found; there are {there}.")
        return self.tables[name]
