"""One insert stream: every item that is written arrives once, or the caller gets an error that says why not.

    write() -> InFlight -> gRPC's thread takes messages -> server -> acknowledgements, read by the stream's thread

A writing thread never waits for the network. When too much is in flight, it waits for room before it does the work.
When the connection is lost, all items that are not acknowledged are sent again with the same keys. The server keeps an
item whose key it knows and only takes the new priority, so no item is there twice.
"""

from __future__ import annotations

import functools
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal, TypeAlias

import numpy as np

from reverb_writer.arguments import integer
from reverb_writer.background import Flag, LateThread, start_thread
from reverb_writer.errors import (
    ClosedError,
    ReplayTimeoutError,
    ReverbWriterError,
    ServerUnavailableError,
    SpecError,
    StructureError,
)
from reverb_writer.table_info import ServerInfo, check_tables_exist
from reverb_writer.transport import process_hooks
from reverb_writer.transport.channel import Channel, backoff_s
from reverb_writer.transport.in_flight import InFlight, InsertRequest, InsertStats
from reverb_writer.transport.insert_pipe import InsertPipe
from reverb_writer.transport.server_info import request_server_info
from reverb_writer.transport.server_probe import ConfirmationWait, ConnectionLoss

_LOG = logging.getLogger(__package__)
OnBlock = Literal["wait", "raise", "drop_oldest"]
_Test: TypeAlias = Callable[[], bool]
_MESSAGE_BYTES, _GATHER_S = 1 << 20, 0.025
_PROBE_TIMEOUT_S, _LOG_EVERY_S, _POLL_S = 5.0, 10.0, 0.002
_SILENCE_S = 10.0  # after which the connection is examined, if an acknowledgement is due


class InsertStream:
    """Items to one server, bounded in flight, across lost connections and restarts. Thread-safe; writers share it."""

    def __init__(
        self,
        channel: Channel,
        *,
        max_in_flight_items: int = 16_384,
        max_in_flight_bytes: int = 128 << 20,
        on_block: OnBlock = "wait",
        before_sending: Callable[[ServerInfo, float], None] = lambda _info, _timeout_s: None,
    ) -> None:
        """Prepare the stream; its thread and its connection begin when there is something to send.

        Args:
            channel: the connection; not closed by the stream.
            max_in_flight_items: unconfirmed items at which writers must wait, >= 1. One request may exceed it.
            max_in_flight_bytes: bytes of unconfirmed items and chunks at which they must wait, >= 1.
            on_block: what waiting means: "wait" up to the time-out, "raise" at once, or "drop_oldest": never wait, and
                give up the oldest items that gRPC has not taken over yet.
            before_sending: called in the stream's thread with the server's tables and a time-out before anything is
                sent over a new connection; its errors are those of the connection.
        """
        self._max_items = integer("max_in_flight_items", max_in_flight_items, minimum=1)
        self._max_bytes = integer("max_in_flight_bytes", max_in_flight_bytes, minimum=1)
        if on_block not in ("wait", "raise", "drop_oldest"):
            raise SpecError(f"`on_block` must be 'wait', 'raise' or 'drop_oldest', got {on_block!r}.")
        self.channel = channel
        self.on_block = on_block
        self._before_sending = before_sending
        self.blocked = False
        self._make_locks()
        self._progress = Flag()  # something confirmed, or no hope that it will be
        self._ended = Flag()
        self._send_now = Flag()  # someone waits for confirmation
        self._flight = InFlight()
        self._connection = 0  # even while down; the generator of an old connection sees that it is not the current one
        self._pipe: InsertPipe | None = None
        self._events: queue.SimpleQueue[Sequence[int] | ReverbWriterError | None] = queue.SimpleQueue()
        self._fault: tuple[type[Exception], str] | None = None
        self._state_id: int | None = None
        self._last_response_at = time.monotonic()
        self._loss: ConnectionLoss | None = None
        self._waits: set[ConfirmationWait] = set()
        self._blocked_s = 0.0
        self._reconnects = self._restarts = self._num_abandoned = 0
        self._dropping = self._orphaned = self._is_abandoned = False
        self._thread = LateThread(self._run, "reverb-writer_run")
        process_hooks.watch(self)

    def after_fork(self) -> None:
        """Make every call raise in a forked child, and replace locks that a thread of the parent may have held."""
        self.blocked = True
        self._make_locks()

    @property
    def is_forked(self) -> bool:
        """Whether this process is a forked child of the one that made the stream."""
        return self.channel.is_forked

    def _make_locks(self) -> None:
        # Reentrant, for `abandon` may be called by the garbage collector, in whichever thread that happens to run.
        self._lock = threading.RLock()
        self._work = threading.Condition(self._lock)  # something to send

    def check(self) -> None:
        """Raise if the stream cannot deliver any more: closed, forked, or refused by the server."""
        self.channel.check_usable()
        if self._ended.is_set():
            raise ClosedError("the insert stream is closed. Open the observer again, or make a new writer.")
        self._raise_fault()

    def _raise_fault(self) -> None:
        if self._fault is not None:
            kind, text = self._fault
            raise kind(text)  # a new one each time: an exception that is raised again keeps all its frames alive

    def wait_for_room(self, timeout_s: float, *, extend: bool = False, unless: _Test = bool) -> None:
        """Return when `blocked` is False or `unless`, which may take seconds, is True; else do as `on_block` says.

        `blocked` is True when a bound is reached, and after `close`, a fork or a refusal by the server.

        Raises:
            ReplayTimeoutError, ServerUnavailableError: no room in time (at once under "raise"), or, if `extend`,
                nothing moved for that long; names the cause.
        """
        self.check()
        timeout_s = 0.0 if self.on_block == "raise" else timeout_s
        self._wait(lambda: not self.blocked, timeout_s, extend=extend, unless=unless)

    def write(self, request: InsertRequest | None, *, hold: Iterable[int] = (), release: Iterable[int] = ()) -> None:
        """Queue a request; never waits. Call `wait_for_room` before the work that leads to it.

        Args:
            request: items; None to change holds only.
            hold: keys of chunks that the server shall keep for items still to come.
            release: keys of chunks of an earlier `hold`.
        """
        with self._lock:
            self._flight.hold(hold)
            if request is not None:
                self._flight.add(request)
            self._flight.release(release)
            if self._ended.is_set():  # by another thread, in the meantime
                self._num_abandoned += self._flight.drop_all()
            while self._update() and self.on_block == "drop_oldest" and self._flight.drop_oldest():
                if not self._dropping:
                    self._dropping = True
                    _LOG.warning("%s: in-flight window full, oldest items are dropped.", self.channel.address)
            self._work.notify_all()
        self._thread.start()

    def flush(self, timeout_s: float, *, extend: bool = False) -> None:
        """Return when everything written so far is acknowledged.

        Raises:
            ReplayTimeoutError, ServerUnavailableError: not in `timeout_s` seconds, or, if `extend`, nothing moved for
                that long; names the cause with its numbers. Nothing is lost.
        """
        self.check()
        self._wait(lambda: not (self.num_pending or self._num_abandoned), timeout_s, extend=extend)

    def check_connection(self) -> None:
        """Have the connection examined if an acknowledgement is long overdue; never waits. Call it twice a second."""
        with self._lock:
            is_open = self._pipe is not None
            if is_open:
                self._last_response_at = max(self._last_response_at, self.channel.last_response_at)
            is_silent = self._flight.has_sent and time.monotonic() - self._last_response_at > _SILENCE_S
        if is_open and is_silent:
            try:
                self.channel.examine()
            except ClosedError:
                self._end_with_channel()

    def wait_closed(self, timeout_s: float) -> bool:
        """Wait until the stream is closed, `timeout_s` seconds at most; return whether it is."""
        return self._ended.wait(timeout_s)

    @property
    def num_pending(self) -> int:
        """Items not yet acknowledged."""
        return self._flight.pending

    @property
    def stalled_s(self) -> float:
        """Seconds since the last acknowledgement if one is due, else 0."""
        return time.monotonic() - self._flight.progress_at if self._flight.pending else 0.0

    def take_unconfirmed(self) -> tuple[list[InsertRequest], int]:
        """End the stream; return what it gives up, for another one, with its number of items: the same every time."""
        with self._lock:  # reentrant
            taken = self._flight.take_all()
            self.abandon()
        return taken

    def stats(self) -> InsertStats:
        """Return the counters so far."""
        with self._lock:
            return self._flight.stats(self._blocked_s, self._reconnects, self._restarts)

    def close(self, timeout_s: float = 30.0) -> None:
        """Deliver what is pending, then end the stream. Idempotent; does nothing in a forked child.

        Raises:
            ReplayTimeoutError, ServerUnavailableError: items were left; says how many and why. The stream is closed.
            ClosedError: items were left because the client was closed before.
        """
        if self.channel.is_forked:
            return
        try:
            if not self._ended.is_set():
                self._wait(lambda: not self.num_pending, timeout_s)
        except ClosedError:
            self._orphaned |= not self._ended.is_set()
        finally:
            self.abandon()
        is_orphaned, self._orphaned = self._orphaned, False
        if is_orphaned:
            self.channel.check_usable()

    def abandon(self, num_unwritten: int = 0) -> None:
        """End at once and give up what is pending; log how much, with what writers have not handed over. Idempotent."""
        if self._is_abandoned or self.channel.is_forked:  # `_ended` will not do: an interrupted call is finished here
            return
        with self._lock:
            self._ended.set()
            self._send_now.set()
            self._update()
            self._num_abandoned += (num_dropped := self._flight.drop_all())
            self._work.notify_all()
            self._progress.set()
            self._connection += 1
            if self._pipe is not None:
                self._pipe.close()
            self._events.put(None)
            self._is_abandoned = True
        if num_dropped + num_unwritten:
            _LOG.error("%s: closed with %d items undelivered.", self.channel.address, num_dropped + num_unwritten)

    def __enter__(self) -> InsertStream:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close; while another error is under way, at once."""
        self.close() if kind is None else self.abandon()

    def _update(self) -> bool:
        """Refresh `blocked`; return whether the bounds are reached."""
        full = self._flight.pending >= self._max_items or self._flight.pending_bytes >= self._max_bytes
        self.blocked = self._ended.is_set() or self._fault is not None or (full and self.on_block != "drop_oldest")
        return full

    def _outgoing(self, connection: int) -> Iterator[bytes]:
        """Feed gRPC; runs in its thread, until the connection is not the current one any more."""
        while True:
            with self._lock:
                self._work.wait_for(lambda: self._may_send() or self._connection != connection)
                if self._connection != connection:
                    return
                message = self._flight.take_message(_MESSAGE_BYTES)
                small = len(message) < _MESSAGE_BYTES
            yield message
            # Each message, and each answer, costs as much as dozens of items: let some gather if no one waits for it.
            if small:
                self._send_now.wait(_GATHER_S)

    def _feed(self, pipe: InsertPipe, connection: int) -> None:
        """Hand messages over as gRPC takes them; in a thread of its own."""
        for message in self._outgoing(connection):
            pipe.send(message)
            while pipe.num_unsent > 1 and self._connection == connection:
                time.sleep(_POLL_S)

    def _may_send(self) -> bool:
        """Whether gRPC may take a message. What it has taken cannot be dropped, so it takes no more than half then."""
        half_full = self.on_block == "drop_oldest" and 2 * self._flight.sent_items >= self._max_items
        return self._flight.has_queued and not half_full

    def _run(self) -> None:
        """Keep a connection while there is something to send, and read acknowledgements."""
        failures = 0
        while True:
            with self._lock:
                self._work.wait_for(lambda: self._flight.has_queued or self._ended.is_set())
            if self._ended.is_set():
                return
            try:
                self._probe()
                with self._lock:
                    if self._ended.is_set():
                        return
                    self._connection += 1
                    events = self._events = queue.SimpleQueue()
                    put = events.put
                    self._pipe = InsertPipe(self.channel, lambda _, event, put=put: put(event))  # type: ignore[misc]
                start_thread(functools.partial(self._feed, self._pipe, self._connection), "reverb-writer_feed")
                while (event := events.get()) is not None:
                    if isinstance(event, ReverbWriterError):
                        raise event  # noqa: TRY301  # as a lost connection, below
                    self._acknowledge(event)
                    failures = 0
            except ClosedError:
                self._end_with_channel()
                return
            except Exception as error:  # noqa: BLE001  # whatever it is, the callers must hear of it, not this thread
                self._disconnected(error)
            else:
                self._disconnected(ConnectionError("the server ended the stream"))
            self._ended.wait(backoff_s(failures))
            failures += 1

    def _acknowledge(self, keys: Sequence[int]) -> None:
        with self._lock:
            self._last_response_at = time.monotonic()
            self._flight.acknowledge(np.fromiter(keys, np.uint64, len(keys)))
            self._update()
            self._progress.set()
            if self.on_block == "drop_oldest":
                self._work.notify_all()

    def _probe(self) -> None:
        """Find the server, see whether it is still the same one, and whether it has the tables."""
        info = request_server_info(self.channel, _PROBE_TIMEOUT_S)
        with self._lock:
            tables = self._flight.tables()
            if self._state_id not in (None, info.state_id):
                self._restarts += 1
                text = "%s: the server was restarted; sending %d unconfirmed items. The rest is as in its checkpoint."
                _LOG.warning(text, self.channel.address, self.num_pending)
            self._state_id = info.state_id
            self._last_response_at = info.at
        check_tables_exist(tables, info, self.channel.address)
        self._before_sending(info, _PROBE_TIMEOUT_S)
        with self._lock:
            self._loss = self._fault = None
            self._update()

    def _disconnected(self, error: Exception) -> None:
        with self._lock:
            if self._ended.is_set():
                return
            self._connection += 1
            pipe, self._pipe = self._pipe, None
            if pipe is not None:
                pipe.close()
            reason = (pipe and pipe.reason) or str(error)
            # A table that a stream does not find may be there when the server is asked for its tables.
            is_gone = pipe is not None and isinstance(error, StructureError)
            if not (is_gone or isinstance(error, ConnectionError | ReplayTimeoutError)):
                self._fault = type(error) if isinstance(error, ReverbWriterError) else ReverbWriterError, str(error)
            if self._loss is None:
                self._reconnects += 1
                _LOG.warning("%s: insert stream lost (%s); connecting again.", self.channel.address, reason)
            self._loss = ConnectionLoss(error, reason)
            self._update()
            self._flight.requeue()
            self._work.notify_all()
            self._progress.set()

    def _end_with_channel(self) -> None:
        self._orphaned = not self._ended.is_set()
        self.abandon()

    def _wait(self, done: _Test, timeout_s: float, *, extend: bool = False, unless: _Test = bool) -> None:
        """Wait until `done` or `unless`, at most `timeout_s` seconds; without progress, if `extend`."""
        self._thread.start()  # unless the `write` before was interrupted, it runs
        wait = ConfirmationWait(self.channel, self._flight, timeout_s, extend=extend)
        try:
            with self._lock:
                self._waits.add(wait)
                self._send_now.set()
            if self._await(done, wait, unless):
                return
        finally:
            with self._lock:
                self._waits.discard(wait)
                if not self._waits:
                    self._send_now.clear()
                self._blocked_s += time.monotonic() - wait.began_at
        with self._lock:
            if done():
                return
            if self._ended.is_set():
                raise ClosedError("the insert stream was closed by another thread while this one waited.")
            self._raise_fault()
            tables = ", ".join(f"`{table}`" for table in sorted(self._flight.tables()))
            text = f"table {tables}: {self.num_pending} items unconfirmed after {wait.spent_s:.1f} s. "
            is_there = self._loss is None or self._loss.is_silence
            raise (ReplayTimeoutError if is_there else ServerUnavailableError)(text + self._explain(wait))

    def _await(self, done: _Test, wait: ConfirmationWait, unless: _Test) -> bool:
        """Return whether `unless` has ended the wait; `done`, the time or the end of the stream may have, too."""
        logged_at = wait.began_at
        while True:
            self._progress.clear()
            with self._lock:  # not while waiting: an interrupt in `Condition.wait` may leave it without the lock
                if done() or self._ended.is_set() or self._fault:
                    return False
                left_s = wait.left_s()
                if left_s and (now := time.monotonic()) - logged_at > _LOG_EVERY_S:
                    logged_at, waited_s = now, now - wait.began_at
                    _LOG.warning("%s: waiting for %.0f s: %s", self.channel.address, waited_s, self._explain(wait))
            if unless():
                return True
            if not left_s:
                return False
            self.check_connection()
            self._progress.wait(min(0.05, left_s))

    def _explain(self, wait: ConfirmationWait) -> str:
        return wait.explain(time.monotonic() - self._last_response_at, self._loss)
