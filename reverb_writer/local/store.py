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
from reverb_writer.local.table import SampleRequest, Table
from reverb_writer.protocol import messages
from reverb_writer.tables import TableConfig
from reverb_writer.tables.table_messages import encode_signature, write_balance, write_selector


class Store:
    """Tables and chunks. Thread-safe.

    Attributes:
        lock: guards the tables and the chunks.
        chunks: the chunks of all tables.
        tables: the tables by name.
        max_item_bytes: bound on an item of an insert stream, uncompressed, in bytes; None for no bound.
    """

    def __init__(self, configs: Sequence[TableConfig], max_bytes: int, max_item_bytes: int | None = None) -> None:
        """Make empty tables.

        Raises:
            SpecError, StructureError: a table's signature is invalid.
        """
        self.lock = threading.RLock()
        self.chunks, self.max_item_bytes = ChunkStore(max_bytes), max_item_bytes
        rng = np.random.default_rng()
        self.tables = {config.name: Table(config, self.chunks, rng) for config in configs}
        self._signatures = {config.name: encode_signature(config.signature) for config in configs}
        self._state_id = secrets.randbits(128)

    def table(self, name: str) -> Table:
        """Return a table.

        Raises:
            Refusal: no table has this name.
        """
        if name not in self.tables:
            there = ", ".join(f"`{known}`" for known in self.tables)
            raise Refusal(Status.NOT_FOUND, f"Priority table {name} was not found; there are {there}.")
        return self.tables[name]

    def request(self, table: str, request: SampleRequest) -> None:
        """Request samples; `request.ready` is called when samples are drawn, possibly before this returns.

        Raises:
            Refusal: no table has this name.
        """
        with self.lock:
            asked = self.table(table)
            asked.request(request)
            asked.advance()

    def withdraw(self, table: str, request: SampleRequest) -> None:
        """Withdraw a request that has no samples yet."""
        with self.lock:
            asked = self.tables[table]
            asked.withdraw(request)
            asked.advance()

    def mutate(self, request: Any) -> None:
        """Process a MutatePrioritiesRequest.

        Raises:
            Refusal: no table has this name, or no item can have one of the priorities; nothing has changed.
        """
        with self.lock:
            table = self.table(request.table)
            table.update({update.key: update.priority for update in request.updates}, request.delete_keys)
            table.advance()

    def sizes(self) -> dict[str, int]:
        """Return the number of items in each table."""
        return {name: len(table) for name, table in self.tables.items()}

    def reset(self, name: str) -> None:
        """Empty a table.

        Raises:
            Refusal: no table has this name.
        """
        with self.lock:
            table = self.table(name)
            table.reset()
            table.advance()

    def info(self) -> Any:
        """Return a ServerInfoResponse."""
        response = messages.ServerInfoResponse()
        response.tables_state_id.high = self._state_id >> 64
        response.tables_state_id.low = self._state_id & (2**64 - 1)
        with self.lock:
            for name, table in self.tables.items():
                self._describe(table, self._signatures[name], response.table_info.add())
        return response

    def _describe(self, table: Table, signature: Any, info: Any) -> None:
        config, limiter = table.config, info.rate_limiter_info
        info.name, info.max_size, info.max_times_sampled = config.name, config.max_size, config.max_times_sampled
        write_selector(config.sampler, info.sampler_options)
        write_selector(config.remover, info.remover_options)
        write_balance(config.rate_limiter.balance, limiter)
        limiter.insert_stats.completed, limiter.sample_stats.completed = table.num_inserts, table.num_samples
        if signature is not None:
            info.signature.CopyFrom(signature)
        info.current_size, info.num_episodes = len(table), table.num_episodes
        info.num_deleted_episodes, info.num_unique_samples = table.num_deleted_episodes, table.num_unique_samples
        table.measure()
        for state, seconds in table.worker_time_s.items():
            setattr(info.table_worker_time, f"{state}_ms", int(1000 * seconds))
