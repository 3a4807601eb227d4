"""A writer's way to its replay, of one server or of several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from reverb_writer.background import logged
from reverb_writer.client import same_process
from reverb_writer.replay.client import as_client
from reverb_writer.shards.calls import answering
from reverb_writer.shards.outbox import ShardedOutbox
from reverb_writer.transport.delivery import Post
from reverb_writer.writing.outbox import Outbox, ServerOutbox
from reverb_writer.writing.source import Source
from reverb_writer.writing.stream_options import DeliveryOptions


class ReplayConnection:
    """A writer's way to its replay, as `reverb_writer.writing.stream_life.Connection`.

    Attributes:
        timeout_s: the writer's time-out of a call, in seconds.
    """

    def __init__(self, replay: Any, timeout_s: float | None) -> None:
        """Take a `replay` argument; a client that is made for it is closed with the connection."""
        self._client, self._owns_client = as_client(replay, timeout_s)
        self.timeout_s = self._client.timeout_s if timeout_s is None else timeout_s

    @property
    def address(self) -> str:
        """The servers' addresses, as given, separated by commas."""
        return self._client.address

    def check_usable(self) -> None:
        """Raise ClosedError if the client is closed, or belongs to a parent process."""
        self._client.connections.check_usable()

    def signatures(self, tables: Sequence[str], who: str) -> dict[str, Any]:
        """Return the signatures of tables; wait for a server that answers, and log that `who` waits."""
        servers = self._client.connections.in_state("up")
        with logged(lambda: f"an {who} waits for the server at {self.address}"):
            info, *_ = answering(servers, self._client.timeout_s, tables).values()
        return {table: info.tables[table].signature for table in tables}

    def largest_priority(self, tables: Sequence[str]) -> float:
        """Return the largest priority that is known to be set in the tables."""
        return max(same_process.largest_priority(server.address, tables) for server in self._client.shards)

    def outbox(self, options: DeliveryOptions, source: Source, post: Post) -> Outbox:
        """Return the outbox of the server, or of several servers if there may be several."""
        servers = self._client.connections
        if servers.may_have_several:
            return ShardedOutbox(servers, options, source, post)
        (server,) = servers.shards
        return ServerOutbox(server.channel, options, source, post)

    def close(self) -> None:
        """Close the client if it was made for the connection. Idempotent; does nothing in a forked child."""
        if self._owns_client:
            self._client.close()
