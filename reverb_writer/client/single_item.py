"""One item with a chunk of its own, for what is not written step by step, on a stream of its own."""

from __future__ import annotations

import contextlib
import logging
import queue
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import grpc
import numpy as np

from reverb_writer.deadline import Deadline
from reverb_writer.errors import ClosedError, ReplayTimeoutError, ServerUnavailableError, StructureError
from reverb_writer.protocol import messages
from reverb_writer.protocol.item_encoding import KEY_BITS, encode_chunk
from reverb_writer.protocol.responses import acknowledged_keys
from reverb_writer.transport.channel import Channel, describe, refused
from reverb_writer.transport.in_flight import InFlight, InsertRequest
from reverb_writer.transport.server_info import check_tables_exist, request_server_info
from reverb_writer.transport.server_probe import ServerProbe

__all__ = ["column", "insert_items", "one_item"]

_LOG = logging.getLogger("reverb_writer")

_ALL_BYTES = 1 << 62
_PAUSE_S = 0.05
_LOOK_S = 0.05
_LOG_EVERY_S = 10.0
_LOST = {
    grpc.StatusCode.CANCELLED,  # another thread has renewed the connection
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.NOT_FOUND,  # a table, which the next look at the server finds, or does not
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.UNKNOWN,
}


def column(path: str, leaf: Any) -> Any:
    """Return a leaf as a column [T, ...], checked."""
    array = np.asarray(leaf)
    if array.ndim == 0 or array.shape[0] == 0:
        raise StructureError(
            f"leaf `{path}`: shape {array.shape}, expected [T, ...] with T >= 1. For a single value pass `value[None]`."
        )
    return array


def one_item(
    columns: Sequence[Any], is_scalar: Sequence[bool], priorities: Mapping[str, float], key: int | None = None
) -> InsertRequest:
    """Encode one item a table over one chunk, the columns of which may differ in length; scalar ones have one row.

    Args:
        columns: arrays [T_i, ...].
        is_scalar: for each column, whether readers get it without the time dimension.
        priorities: of the item in each table.
        key: of the item in the first table, the others have those that follow; None to draw it.
    """
    chunk_key, first_key, episode_id = (secrets.randbits(KEY_BITS) for _ in range(3))
    first_key = first_key if key is None else key
    chunk = encode_chunk(chunk_key, episode_id, 0, columns)
    slices = messages.FlatTrajectory(
        columns=[
            messages.FlatTrajectory.Column(
                chunk_slices=[
                    messages.FlatTrajectory.ChunkSlice(chunk_key=chunk_key, offset=0, length=len(column), index=index)
                ],
                squeeze=squeeze,
            )
            for index, (column, squeeze) in enumerate(zip(columns, is_scalar, strict=True))
        ]
    )
    rows = []
    for item_key, (table, priority) in enumerate(priorities.items(), first_key):
        item = messages.PrioritizedItem(key=item_key, table=table, priority=priority, flat_trajectory=slices)
        encoded = messages.InsertStreamRequest(items=[item]).SerializeToString()
        rows.append((item_key, np.frombuffer(encoded, np.uint8)[None]))
    return InsertRequest(frozenset(priorities), first_key, rows, {chunk_key: chunk}, len(chunk))


def insert_items(channel: Channel, requests: Sequence[InsertRequest], deadline: Deadline) -> None:
    """Send items by a stream of their own, and return when the server has all of them.

    A server inserts what comes by one stream in its order, so an item that waits keeps all behind it waiting: items
    that have nothing to do with each other do not share a stream. When the connection is lost they are sent again, with
    the same keys; after the deadline they are not.

    Args:
        channel: the connection.
        requests: the items, one at least.
        deadline: of all of it.

    Raises:
        ReplayTimeoutError: not confirmed in time; says why. What the server has taken by then may still be inserted.
        ServerUnavailableError: likewise, and the server is gone.
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
        self._began_at = self._heard_at = time.monotonic()
        self._inquiry = ServerProbe(channel, deadline.left_s())

    def run(self) -> None:
        """Send until all is confirmed."""
        tables = ", ".join(f"`{table}`" for table in sorted(self._tables))
        text = f"table {tables}: {self._flight.pending} items unconfirmed after {self._deadline.timeout_s:.1f} s."
        try:
            while not self._attempt():
                time.sleep(min(_PAUSE_S, self._deadline.left_s()))
                info = request_server_info(self._channel, self._deadline.left_s())
                check_tables_exist(self._tables, info, self._channel.address)
                self._heard_at = info.at
                self._flight.requeue()
        except ReplayTimeoutError:
            raise ReplayTimeoutError(f"{text} {self._why()}") from None
        except ServerUnavailableError as error:
            raise ServerUnavailableError(f"{text} {error}") from None

    def _attempt(self) -> bool:
        """Send what is queued and wait for the confirmations; return False if the stream has ended before.

        Raises:
            ReplayTimeoutError: the time is up.
        """
        ended: queue.SimpleQueue[None] = queue.SimpleQueue()  # an event has a lock, which an interrupt may leave taken
        call = None
        try:
            requests = self._outgoing(self._flight.take_message(_ALL_BYTES), ended)
            call = self._channel.stream(messages.INSERT_STREAM, requests, timeout_s=self._deadline.left_s())
            for reply in call:
                keys = acknowledged_keys(reply)
                self._flight.acknowledge(np.fromiter(keys, np.uint64, len(keys)))
                if not self._flight.pending:
                    return True
        except grpc.RpcError as error:
            self._channel.check_usable()
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise ReplayTimeoutError("The time is up.") from None
            if error.code() not in _LOST:
                raise refused(self._channel.address, error) from error
            _LOG.warning("%s: insert lost (%s); trying again.", self._channel.address, describe(error))
        finally:
            ended.put(None)
            if call is not None:
                call.cancel()
        return False

    def _outgoing(self, message: bytes, ended: queue.SimpleQueue[None]) -> Iterator[bytes]:
        """Feed gRPC, in its thread; this has nothing else to do then, so it asks why the confirmation takes so long."""
        logged_at = self._began_at
        yield message
        while True:
            with contextlib.suppress(queue.Empty):
                return ended.get(timeout=_LOOK_S)
            now = time.monotonic()
            try:
                self._inquiry.proceed(now - self._began_at)
            except ClosedError:
                return
            if now - logged_at > _LOG_EVERY_S:
                logged_at = now
                text = "%s: waiting for %.0f s: %s"
                _LOG.warning(text, self._channel.address, now - self._began_at, self._why())

    def _why(self) -> str:
        return self._inquiry.why_inserts_wait(self._tables, time.monotonic() - self._heard_at, None)
