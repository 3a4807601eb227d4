"""Items that are sent by a stream of their own, until the server has them: for what is not written step by step."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence

import numpy as np

from reverb_writer.background import Flag
from reverb_writer.deadline import Deadline
from reverb_writer.errors import (
    ClosedError,
    ReplayTimeoutError,
    ReverbWriterError,
    ServerUnavailableError,
    StructureError,
)
from reverb_writer.protocol import messages
from reverb_writer.protocol.responses import acknowledged_keys
from reverb_writer.table_info import check_tables_exist
from reverb_writer.transport.channel import Channel
from reverb_writer.transport.in_flight import InFlight, InsertRequest
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
        self._began_at = self._last_response_at = time.monotonic()
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
        ended = Flag()
        call = None
        try:
            requests = self._outgoing(self._flight.take_message(_ALL_BYTES), ended)
            call = self._channel.stream(messages.INSERT_STREAM, requests, timeout_s=self._deadline.left_s())
            for reply in call:
                keys = acknowledged_keys(reply)
                self._flight.acknowledge(np.fromiter(keys, np.uint64, len(keys)))
                if not self._flight.pending:
                    return True
        except (StructureError, ServerUnavailableError) as error:  # a table that is missing is named when tried again
            self._channel.check_usable()
            _LOG.warning(
                "%s: insert lost (%s); trying again.", self._channel.address, (call and call.end_reason) or error
            )
        except ReverbWriterError:
            self._channel.check_usable()
            raise
        finally:
            ended.set()
            if call is not None:
                call.cancel()
        return False

    def _outgoing(self, message: bytes, ended: Flag) -> Iterator[bytes]:
        """Feed gRPC, in its thread; this has nothing else to do then, so it asks why the confirmation takes so long."""
        logged_at = self._began_at
        yield message
        while not ended.wait(_PROBE_EVERY_S):
            now = time.monotonic()
            try:
                self._probe.proceed(now - self._began_at)
            except ClosedError:
                return
            if now - logged_at > _LOG_EVERY_S:
                logged_at = now
                text = "%s: waiting for %.0f s: %s"
                _LOG.warning(text, self._channel.address, now - self._began_at, self._explain())

    def _explain(self) -> str:
        return self._probe.explain_inserts(self._tables, time.monotonic() - self._last_response_at, None)
