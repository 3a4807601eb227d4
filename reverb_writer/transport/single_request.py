"""Single requests, each delivered before its call returns, over streams that are kept for the next request."""

from __future__ import annotations

import collections
import contextlib
import queue
import weakref
from collections.abc import Callable, Iterable, Iterator

from reverb_writer.background import Inbox
from reverb_writer.tables.table_info import ServerInfo
from reverb_writer.transport.channel import Channel
from reverb_writer.transport.delivery import Delivery
from reverb_writer.transport.in_flight import InsertRequest
from reverb_writer.transport.wait import Status, Wait

_MAX_IDLE = 4


class InsertStream:
    """A stream to one server, used by one call at a time.

    Attributes:
        info: the server's tables when the stream was opened.
    """

    def __init__(self, channel: Channel, info: ServerInfo) -> None:
        """Open a stream at the first request; `info` is the server's answer of a moment ago."""
        self.info = info
        self._inbox: Inbox[Callable[[], None]] = Inbox()
        self._delivery = Delivery(channel, self._inbox.put, collections.Counter(), info=info)
        self._address = channel.address

    def is_usable(self, tables: Iterable[str]) -> bool:
        """Return whether nothing has happened since the last request, and the server had these tables."""
        is_same = self._address == self._delivery.channel.address and self._inbox.empty()
        return is_same and all(table in self.info.tables for table in tables)

    def insert(self, request: InsertRequest, timeout_s: float) -> None:
        """Send items, and return when the server has confirmed every item.

        After an error, close the stream; the server may still insert received items.
        """
        self._delivery.flight.add(request)
        Wait(request.tables, timeout_s, self._inbox.put).run(self._look)

    def _look(self, seconds: float) -> Status | None:
        """Deliver until something has happened, or `seconds` have passed; return None if everything is confirmed."""
        delivery, flight = self._delivery, self._delivery.flight
        with contextlib.suppress(queue.Empty):
            self._inbox.get(min(delivery.proceed(), seconds))()
        if not flight.pending:
            return None
        return Status(delivery.channel, flight.pending, flight.progress_at, delivery.loss, delivery.fault)

    def close(self) -> None:
        """End the stream. Idempotent."""
        self._delivery.close()


class InsertStreams:
    """Streams to one server that are between two requests. Thread-safe.

    A server inserts the items of a stream in order, so a waiting item blocks all later items of the stream: calls at
    the same time use different streams.
    """

    def __init__(self, channel: Channel) -> None:
        """Open no stream yet."""
        self._channel = channel
        self._idle: list[InsertStream] = []
        # An open stream keeps the channel alive, so it must not outlive the owner of this object.
        weakref.finalize(self, _close_all, self._idle).atexit = False

    @contextlib.contextmanager
    def one(self, tables: Iterable[str], ask: Callable[[], ServerInfo]) -> Iterator[InsertStream]:
        """Lend a stream that knows the server's tables, which `ask` returns for a new stream; keep it after a success.

        A server that was restarted since has ended its streams: a stream without news knows the tables.
        """
        self._channel.check_usable()
        stream = None
        while self._idle and stream is None:
            with contextlib.suppress(IndexError):  # another thread was first
                stream = self._idle.pop()
            if stream is not None and not stream.is_usable(tables):
                stream.close()
                stream = None
        if stream is None:
            stream = InsertStream(self._channel, ask())
        try:
            yield stream
        except BaseException:
            stream.close()
            raise
        if len(self._idle) < _MAX_IDLE:
            self._idle.append(stream)
        else:
            stream.close()

    def close(self) -> None:
        """End all streams. Idempotent."""
        _close_all(self._idle)


def _close_all(streams: list[InsertStream]) -> None:
    while streams:
        with contextlib.suppress(IndexError):
            streams.pop().close()
