"""Where the samples of a table come from, and where new priorities of its items go."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import NamedTuple, Protocol

from reverb_writer.background import logged
from reverb_writer.client.server_calls import Server
from reverb_writer.deadline import Deadline
from reverb_writer.errors import ReplayTimeoutError, ReverbWriterError, ServerUnavailableError
from reverb_writer.reading.feed import Feed, ServerFeed
from reverb_writer.reading.read_options import ReadOptions
from reverb_writer.tables.table_info import check_tables_exist


class Unset(NamedTuple):
    """New priorities that were not set.

    Attributes:
        refused: for each request that failed, its keys and the error.
        num_gone: keys that were sent nowhere, because no server that may have their items can be reached.
    """

    refused: list[tuple[AbstractSet[int], ReverbWriterError]]
    num_gone: int = 0


class TableSource(Protocol):
    """A table that a reader reads, on one server or on several."""

    @property
    def address(self) -> str:
        """The server's address, as given."""

    @property
    def timeout_s(self) -> float:
        """Default time-out of a call, in seconds."""

    def open(self, timeout_s: float) -> Feed:
        """Find the table, and return a feed of its samples.

        Raises:
            StructureError: the table does not exist.
            ServerUnavailableError, ReplayTimeoutError: no answer within `timeout_s` seconds.
        """

    def set_priorities(self, updates: Mapping[int, float]) -> Unset:
        """Set priorities by key, and wait for it."""


class ServerTable:
    """A table on one server; see `TableSource`."""

    def __init__(self, server: Server, table: str, batch_size: int, options: ReadOptions, timeout_s: float) -> None:
        """Prepare to read batches of `batch_size` samples."""
        self.timeout_s = timeout_s
        self._server, self._table, self._options = server, table, options
        self._max_samples = batch_size * options.max_in_flight_batches

    @property
    def address(self) -> str:
        """The server's address, as given."""
        return self._server.address

    def open(self, timeout_s: float) -> ServerFeed:
        """Find the table, and return a feed of its samples."""
        with logged(lambda: f"table `{self._table}`: waiting for the server at {self.address}"):
            try:
                info = self._server.channel.server_info(timeout_s)
            except (ReplayTimeoutError, ServerUnavailableError) as error:
                raise error from None  # without gRPC's error: the message names the cause
        check_tables_exist([self._table], info, self.address)
        return ServerFeed(self._server, info, info.tables[self._table], self._max_samples, self._options)

    def set_priorities(self, updates: Mapping[int, float]) -> Unset:
        """Set priorities by key, and wait for it."""
        return set_priorities(self._server, self._table, updates, self.timeout_s)


def set_priorities(server: Server, table: str, updates: Mapping[int, float], timeout_s: float) -> Unset:
    """Set priorities of one server's items."""
    try:
        server.mutate_priorities(table, updates, deadline=Deadline(timeout_s))
    except ReverbWriterError as error:
        return Unset([(updates.keys(), error)])
    return Unset([])
