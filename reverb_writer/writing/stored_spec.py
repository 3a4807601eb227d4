"""The spec of an observer's steps, stored on every server process that it writes to."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from reverb_writer.client.client import Client
from reverb_writer.client.on_shards import store_spec_on_all
from reverb_writer.client.server_calls import Server
from reverb_writer.deadline import Deadline
from reverb_writer.table_info import ServerInfo


class StoredSpec:
    """A nest of `ArraySpec`, and the server process that was last found to have it. Thread-safe."""

    def __init__(self, client: Client, tables: Sequence[str]) -> None:
        """Begin without a spec; it will be that of these tables."""
        self._client, self._tables = client, tables
        self._known: tuple[Any, int] | None = None  # the spec, and the `state_id` of the process that has it

    def store(self, spec: Any, shard: Server, deadline: Deadline, *, on_all: bool) -> None:
        """Store the spec on a shard; with `on_all`, on all others that answer, too, if it had none.

        Raises:
            StructureError: another actor has stored another spec.
            ServerUnavailableError, ReplayTimeoutError: the shard does not have it in time.
        """
        info = shard.request_info(deadline.left_s())
        missing = shard.missing_specs(info, self._tables, spec, deadline)
        having: Collection[Server] = ()
        if missing and on_all:
            having = store_spec_on_all(self._client.in_state("up", "draining"), self._tables, spec, deadline)
        if shard not in having:
            shard.keep_specs(info, missing, spec, deadline)
        self._known = spec, info.state_id

    def restore(self, shard: Server, info: ServerInfo, timeout_s: float) -> None:
        """Store the spec again if the server process is another one: it may have no checkpoint that has it."""
        if self._known is None:
            return
        spec, state_id = self._known
        if info.state_id != state_id:
            deadline = Deadline(timeout_s)
            shard.keep_specs(info, shard.missing_specs(info, self._tables, spec, deadline), spec, deadline)
            self._known = spec, info.state_id
