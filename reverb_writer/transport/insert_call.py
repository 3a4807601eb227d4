"""Items that are sent by a stream of their own, until the server has them: for what is not written step by step."""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Sequence

import numpy as np

from reverb_writer.deadline import Deadline
from reverb_writer.errors import (
    ReplayTimeoutError,
    ReverbWriterError,
    ServerUnavailableError,
    StructureError,
)
from reverb_writer.table_info import check_tables_exist
from reverb_writer.transport.channel import Channel
from reverb_writer.transport.in_flight import InFlight, InsertRequest
from reverb_writer.transport.insert_pipe import InsertPipe
from reverb_writer.transport.server_info import request_server_info
from reverb_writer.transport.server_probe import ServerProbe

_LOG = logging.getLogger(__package__)

_ALL_BYTES = 1 << 62
_RETRY_S = 0.05
_PROBE_EVERY_S = 0.05
_LOG_EVERY_S = 10.0


def insert_items(channel: Channel, requests: Sequence[InsertRequest], deadline: Deadline) -> None:
    """Send items by a stream of their own, and return when the server has all of them.

    A server inserts what comes by one stream in its order, so an item that waits keeps all behind it waiting: items
    that have nothing to do with each other do not share a stream. When the connection is lost they are sent again, with
    the same keys; after the deadline they are not.

    Raises:
        ReplayTimeoutError: not confirmed in time; says why. What the server has taken by then may still be inserted.
        ServerUnavailableError: not confirmed in time, because the server is gone.
        StructureError: it has one of the tables no more.
        ReverbWriterError: it refuses.
        ClosedError: another thread has closed the client.
    """
    _Delivery(channel, requests, deadline).run()


class _Delivery:
    """Items on their way over a stream that is theirs alone."""

    def __init__(self, channel: Channel, requests: Sequence[InsertRequest], deadline: Deadline) -> None:
        self._channel = channel
        self._deadline = deadline
        self._flight = InFlight()
        for request in requests:
            self._flight.add(request)
        self._tables = self._flight.tables()
        self._began_at = self._logged_at = self._last_response_at = time.monotonic()
        self._probe = ServerProbe(channel, deadline.left_s())

    def run(self) -> None:
        """Send until all is confirmed."""
        tables = ", ".join(f"`{table}`" for table in sorted(self._tables))
        text = f"table {tables}: {self._flight.pending} items unconfirmed after {self._deadline.timeout_s:.1f} s."
        try:
            while not self._attempt():
                time.sleep(min(_RETRY_S, self._deadline.left_s()))
                info = request_server_info(self._channel, self._deadline.left_s())
                check_tables_exist(self._tables, info, self._channel.address)
                self._last_response_at = info.at
                self._flight.requeue()
        except ReplayTimeoutError:
            raise ReplayTimeoutError(f"{text} {self._explain()}") from None
        except ServerUnavailableError as error:
            raise ServerUnavailableError(f"{text} {error}") from None

    def _attempt(self) -> bool:
        """Send what is queued and wait for the confirmations; return False if the stream has ended before."""
        events: queue.SimpleQueue[Sequence[int] | ReverbWriterError] = queue.SimpleQueue()
        self._deadline.left_s()
        pipe = InsertPipe(self._channel, lambda _, event: events.put(event))
        try:
            pipe.send(self._flight.take_message(_ALL_BYTES))
            while self._flight.pending:
                left_s = self._deadline.left_s()
                try:
                    event = events.get(timeout=min(_PROBE_EVERY_S, left_s))
                except queue.Empty:
                    self._look()
                    continue
                if isinstance(event, ReverbWriterError):
                    raise event
                self._flight.acknowledge(np.fromiter(event, np.uint64, len(event)))
        except (StructureError, ServerUnavailableError) as error:  # a table that is missing is named when tried again
            self._channel.check_usable()
            _LOG.warning("%s: insert lost (%s); trying again.", self._channel.address, pipe.reason or error)
            return False
        finally:
            pipe.close()
        return True

    def _look(self) -> None:
        """Ask why the confirmation takes so long, and log the cause every ten seconds."""
        now = time.monotonic()
        self._probe.proceed(now - self._began_at)
        if now - self._logged_at > _LOG_EVERY_S:
            self._logged_at = now
            text = "%s: waiting for %.0f s: %s"
            _LOG.warning(text, self._channel.address, now - self._began_at, self._explain())

    def _explain(self) -> str:
        return self._probe.explain_inserts(self._tables, time.monotonic() - self._last_response_at, None)
