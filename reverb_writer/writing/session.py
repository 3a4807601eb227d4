"""What an observer writes to: the client, the check of its tables, and a sender for a layout of steps."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

from reverb_writer.client.client import Client, as_client
from reverb_writer.client.on_shards import answering, logged
from reverb_writer.client.same_process import largest_priority
from reverb_writer.client.server_calls import Server
from reverb_writer.client.targets import default_actor_id
from reverb_writer.protocol.specs import check_signature
from reverb_writer.steps import step_bytes
from reverb_writer.tables.table_info import check_tables_exist
from reverb_writer.transport.delivery import Delivery
from reverb_writer.writing.chunk_encoder import ChunkEncoder, chunk_grid
from reverb_writer.writing.cutter import Cutter
from reverb_writer.writing.destinations import Destinations, ItemLimit, least_items
from reverb_writer.writing.item_sizes import ItemSizes
from reverb_writer.writing.observer_stats import Books
from reverb_writer.writing.outbox import Outbox
from reverb_writer.writing.priorities import WindowPriorities
from reverb_writer.writing.ring import StepRing, ring_rows
from reverb_writer.writing.sender import Sender
from reverb_writer.writing.step_layout import StepLayout
from reverb_writer.writing.stream_options import StreamOptions
from reverb_writer.writing.window_items import check_dtypes
from reverb_writer.writing.window_kinds import WindowKinds
from reverb_writer.writing.window_targets import WindowTarget, chunk_length_for


class Session:
    """An open observer's connection to its tables.

    Attributes:
        client: the client that it uses.
        targets: the kinds of windows, as a sender takes them when it starts.
        timeout_s: time-out of a call, seconds.
    """

    def __init__(self, given: Any, targets: Sequence[WindowTarget], options: StreamOptions) -> None:
        """Find a server that answers, and the tables on it; say in the log every ten seconds that it is waited for.

        Raises:
            StructureError: a table is not there; names those that are.
            ReplayTimeoutError, ServerUnavailableError: no server answers in time.
        """
        self.targets, self._options = targets, options
        self.client, self._owns_client = as_client(given, options.timeout_s)
        self.timeout_s = self.client.timeout_s if options.timeout_s is None else options.timeout_s
        tables = list(dict.fromkeys(table for target in targets for table in target.tables))
        try:
            wait_s = self.timeout_s if options.connect_timeout_s is None else options.connect_timeout_s
            self.client.connections.check_usable()
            with logged(lambda: f"an observer waits for the server at {self.client.address}"):
                found = answering(self.client.connections.in_state("up"), wait_s)
            server, info = next(iter(found.items()))
            check_tables_exist(tables, info, server.address)
        except BaseException:
            self.close()
            raise
        self._signatures = {table: info.tables[table].signature for table in tables}

    @property
    def address(self) -> str:
        """The servers that are written to."""
        return self.client.address

    def close(self) -> None:
        """Close the client if it is the session's own. Idempotent."""
        if self._owns_client:
            self.client.close()

    def sizes(self, layout: StepLayout, num_envs: int) -> list[ItemSizes] | None:
        """Check the columns against what Reverb and the tables accept; return what checks each step. Asks no server.

        Returns:
            One for each environment; None if steps need no check.

        Raises:
            StructureError: names the leaf, what it should be, and the table if its signature says so; or a window
                would be larger than `max_item_bytes`.
        """
        check_dtypes(layout.dtypes, layout.paths)
        for table, signature in self._signatures.items():
            if signature is not None:
                check_signature(table, signature, layout.paths, layout.dtypes, layout.shapes)
        limit = self._options.max_item_bytes
        if limit is None:
            return None
        sizes = [ItemSizes(layout, self.targets, limit) for _ in range(num_envs)]
        return sizes if sizes[0].counts_steps else None

    def new_sender(
        self,
        layout: StepLayout,
        num_envs: int | None,
        books: Books,
        *,
        spans_episodes: bool,
        max_steps: int | None,
    ) -> Sender:
        """Make what writes steps of this layout; its thread counts in `books`."""
        options, structure = self._options, layout.structure
        bytes_per_step = step_bytes(layout.dtypes, layout.shapes)
        length = options.chunk_length or chunk_length_for([target.spec for target in self.targets], bytes_per_step)
        size = ring_rows(bytes_per_step, num_envs or 1, length, options.max_in_flight_bytes)
        length = min(length, max(size // (2 * (num_envs or 1)), 1))
        ring = StepRing(structure.dtypes, structure.shapes, num_envs, size, spans_episodes=spans_episodes)
        kinds = WindowKinds(self.targets, spans_episodes=spans_episodes)
        has_functions = any(callable(target.priority) for target in self.targets)
        encoder = ChunkEncoder(ring, layout, keeps_columns=has_functions)
        largest = functools.partial(_largest_priority, self.client)
        priorities = WindowPriorities(layout.pack, largest, books.counts)
        grid = chunk_grid([target.spec for target in self.targets], length)
        cutter = Cutter(ring, kinds, encoder, grid, num_envs, books, max_steps or math.inf)
        drops_oldest = options.on_block == "drop_oldest"
        sender = Sender(ring, num_envs=num_envs, max_delay_s=options.max_delay_s, until=options.until)
        max_items = options.max_in_flight_items or least_items(kinds.items_per_step * (num_envs or 1))
        max_sent = max_items / 2 if drops_oldest else math.inf

        def new_delivery(server: Server) -> Delivery:
            return Delivery(server.channel, sender.post, books.counts, max_sent_items=max_sent)

        destinations = Destinations(
            self.client,
            options.actor_id or default_actor_id(),
            options.patience_s,
            new_delivery,
            functools.partial(ItemLimit, max_items, is_fixed=options.max_in_flight_items is not None),
            options.max_in_flight_bytes,
            books.counts,
        )
        sender.open(Outbox(ring, kinds, encoder, cutter, priorities, destinations, books, drops_oldest=drops_oldest))
        return sender


def _largest_priority(client: Client, tables: Sequence[str]) -> float:
    """Return the largest priority that this process has set in some tables, on any server."""
    return max(largest_priority(shard.address, tables) for shard in client.shards)
