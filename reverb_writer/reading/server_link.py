"""The connection to one server as seen by the thread that fetches from it: there, or lost since when and why."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from reverb_writer.background import Flag
from reverb_writer.errors import (
    ClosedError,
    FormatError,
    PermissionDeniedError,
    ReverbWriterError,
    ServerUnavailableError,
    UnsafeDataError,
)
from reverb_writer.tables.table_info import ServerInfo, check_tables_exist
from reverb_writer.transport.channel import Channel
from reverb_writer.transport.connection_loss import ConnectionLoss
from reverb_writer.transport.server_info import request_server_info
from reverb_writer.transport.server_probe import ServerProbe

_LOG = logging.getLogger(__package__)

PROBE_TIMEOUT_S = 2.0
"""Time-out of a question to a server that may be gone, seconds."""

RETRY_S = 0.1
"""Pause between two of them, seconds."""


class ServerLink:
    """The connection to a server that samples of one table come from. Changed by the thread that fetches."""

    def __init__(self, channel: Channel, table: str, info: ServerInfo | None) -> None:
        """Take the connection, the name of the table, and the server's tables; None if it has not answered yet."""
        self.disconnected_at: float | None = None  # `time.monotonic()` then; None while there is a connection
        self.info = info  # the tables when it was last connected to
        self.reconnects = 0
        self.server_restarts = 0  # reconnects that found the server restarted
        self._channel, self._table = channel, table
        self._outage: ConnectionLoss | None = None  # while there is no connection

    @property
    def is_silent(self) -> bool:
        """Whether the connection is lost, and the server accepts new ones without answering."""
        outage = self._outage
        return outage is not None and outage.is_silence

    def probe(self, timeout_s: float) -> ServerProbe:
        """Return a probe that asks the server, during a wait of so many seconds, what keeps samples from coming."""
        return ServerProbe(self._channel, timeout_s)

    def why_waiting(self, probe: ServerProbe | None) -> str:
        """Say what keeps samples from coming, as far as a probe found out; `probe` is None if nothing was asked."""
        outage, since = self._outage, self.disconnected_at
        if outage is not None and since is not None:
            return outage.explain(self._channel, time.monotonic() - since)
        if self.info is None:
            return f"The server at {self._channel.address} has not answered yet."
        return (probe or self.probe(0.0)).explain_samples(self._table, self.info)

    def reconnect(self, why: ReverbWriterError, closed: Flag, *, needs_table: bool = False) -> None:
        """Wait until the server answers again, and has the table if it needs it, or until `closed` is set.

        Raises:
            ClosedError, PermissionDeniedError: it would never answer this client.
        """
        self._outage = ConnectionLoss(why, str(why))
        self.disconnected_at = time.monotonic()
        if self.info is not None:
            _LOG.warning("Samples of `%s`: %s Looking for it.", self._table, why)
        while not closed.wait(RETRY_S):
            try:
                info = request_server_info(self._channel, PROBE_TIMEOUT_S)
                check_tables_exist([self._table] if needs_table else [], info, self._channel.address)
            except (ClosedError, PermissionDeniedError):
                raise
            except ReverbWriterError as error:  # whatever it is: a gateway may refuse for a while
                self._outage = ConnectionLoss(error, str(error))
                continue
            if self.info is not None:
                self.reconnects += 1
                self.server_restarts += info.state_id != self.info.state_id
            self.info = info
            self.disconnected_at = self._outage = None
            return


def fetch_until_closed(
    fetch: Callable[[], object],
    *,
    reconnect: Callable[[ReverbWriterError], object],
    report: Callable[[ReverbWriterError], object],
    closed: Flag,
    losses: tuple[type[ReverbWriterError], ...] = (ServerUnavailableError,),
) -> None:
    """Call `fetch` until it returns, or until `closed` is set.

    After one of the `losses` the next call follows `reconnect`; after a message that cannot be read, `report`.
    """
    while not closed.is_set():
        try:
            fetch()
        except losses as error:
            if not closed.is_set():
                reconnect(error)
        except (FormatError, UnsafeDataError) as error:
            report(error)
        else:
            return
