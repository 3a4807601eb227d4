"""One insert stream: what is written arrives once, or the caller is told why not.

    write() -> InFlight -> gRPC's thread takes messages -> server -> acknowledgements, read by the stream's thread

A writing thread never waits for the network; when too much is in flight it waits for room, before it does the work.
When the connection is lost, all that is not acknowledged is sent again with the same keys: the server keeps an item
whose key it knows and takes the new priority, so nothing is there twice.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal

import grpc
import numpy as np

from reverb_writer.arguments import integer
from reverb_writer.errors import ClosedError, ReplayTimeoutError, ReverbWriterError, ServerUnavailableError, SpecError
from reverb_writer.flags import Flag
from reverb_writer.protocol import messages
from reverb_writer.protocol.responses import acknowledged_keys
from reverb_writer.transport import process_hooks
from reverb_writer.transport.channel import Channel, describe
from reverb_writer.transport.connection import Call
from reverb_writer.transport.in_flight import InFlight, InsertRequest, InsertStats
from reverb_writer.transport.server_info import check_tables_exist, request_server_info
from reverb_writer.transport.server_probe import Outage, Wait
from reverb_writer.transport.timer import Timer

__all__ = ["InsertStream", "OnBlock"]

_LOG = logging.getLogger("reverb_writer")

OnBlock = Literal["wait", "raise", "drop_oldest"]

_MESSAGE_BYTES = 1 << 20
_GATHER_S = 0.025
_REFUSALS = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.UNIMPLEMENTED,
}
_FIRST_BACKOFF_S, _LAST_BACKOFF_S = 0.05, 2.0
_PROBE_TIMEOUT_S = 5.0
_LOG_EVERY_S = 10.0
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
        tick_s: float = 0.25,
    ) -> None:
        """Start the stream's threads; the connection is opened when there is something to send.

        Args:
            channel: the connection; not closed by the stream.
            max_in_flight_items: unconfirmed items at which writers must wait, >= 1. One request may exceed it.
            max_in_flight_bytes: bytes of unconfirmed items and chunks at which they must wait, >= 1.
            on_block: what waiting means: "wait" up to the time-out, "raise" at once, or "drop_oldest": never wait, and
                give up the oldest items that gRPC has not taken over yet.
            tick_s: how often `on_tick` callbacks run, seconds, > 0; infinity for never.

        Raises:
            SpecError: a bound is < 1, `on_block` is none of the three, or `tick_s` is not > 0.
        """
        self._max_items = integer("max_in_flight_items", max_in_flight_items, minimum=1)
        self._max_bytes = integer("max_in_flight_bytes", max_in_flight_bytes, minimum=1)
        if on_block not in ("wait", "raise", "drop_oldest"):
            raise SpecError(f"`on_block` must be 'wait', 'raise' or 'drop_oldest', got {on_block!r}.")
        self.channel = channel
        self.on_block = on_block
        self.blocked = False
        self._make_locks()
        self._progress = Flag()  # something confirmed, or no hope that it will be
        self._ended = Flag()
        self._timer = Timer(channel.address, self._ended, tick_s, self._look, self._lose_channel)
        self._hurry = Flag()  # someone waits for confirmation
        self._flight = InFlight()
        self._connection = 0  # even while down; the generator of an old connection sees that it is not the current one
        self._call: Call | None = None
        self._fault: tuple[type[Exception], str] | None = None
        self._state_id: int | None = None
        self._heard_at = time.monotonic()
        self._down: Outage | None = None
        self._num_abandoned = 0
        self._waits: set[Wait] = set()
        self._blocked_s = 0.0
        self._reconnects = self._restarts = 0
        self._dropping = self._orphaned = False
        threading.Thread(target=self._run, name="reverb-writer_run", daemon=True).start()
        self._timer.start()
        process_hooks.watch(self)

    def after_fork(self) -> None:
        """Refuse all use in a forked child, and let go of locks that a thread of the parent may have held."""
        self.blocked = True
        self._make_locks()

    @property
    def is_forked(self) -> bool:
        """Whether this process is a forked child of the one that opened it."""
        return self.channel.is_forked

    def _make_locks(self) -> None:
        # Reentrant, for `abandon` may be called by the garbage collector, in whichever thread that happens to run.
        self._lock = threading.RLock()
        self._work = threading.Condition(self._lock)  # something to send

    def check(self) -> None:
        """Raise what keeps the stream from ever delivering: closed, forked, or refused by the server."""
        self.channel.check_usable()
        if self._ended.is_set():
            raise ClosedError("the insert stream is closed. Open the observer again, or make a new writer.")
        self._raise_fault()

    def _raise_fault(self) -> None:
        if self._fault is not None:
            kind, text = self._fault
            raise kind(text)  # a new one each time: an exception that is raised again keeps all its frames alive

    def wait_for_room(self, timeout_s: float, *, patient: bool = False) -> None:
        """Return when nothing speaks against writing: `blocked` is False; do as `on_block` says if it is not.

        `blocked` may be read before, to save the call: it is True when a bound is reached, and after `close`, a fork or
        a refusal by the server.

        Raises:
            ReplayTimeoutError, ServerUnavailableError: no room in time (at once under "raise"), or, if `patient`,
                nothing moved for that long; names the cause.
        """
        self.check()
        self._wait(lambda: not self.blocked, 0.0 if self.on_block == "raise" else timeout_s, patient=patient)

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
            while self._update() and self.on_block == "drop_oldest":
                if not self._flight.drop_oldest():
                    break
                if not self._dropping:
                    self._dropping = True
                    _LOG.warning("%s: in-flight window full, oldest items are dropped.", self.channel.address)
            self._work.notify_all()

    def flush(self, timeout_s: float, request: InsertRequest | None = None, *, patient: bool = False) -> None:
        """Return when everything written so far, or this one request, is acknowledged.

        Raises:
            ReplayTimeoutError, ServerUnavailableError: not in `timeout_s` seconds, or, if `patient`, nothing moved for
                that long; names the cause with its numbers. Nothing is lost.
        """
        if request is None:
            self.check()
            self._wait(lambda: not (self.num_pending or self._num_abandoned), timeout_s, patient=patient)
        elif request.num_pending:  # what is confirmed stays so, whoever closes
            self.check()
            self._wait(lambda: not request.num_pending, timeout_s, patient=patient)

    def on_tick(self, callback: Callable[[], None]) -> None:
        """Run `callback` every `tick_s` seconds in a thread until the stream is closed."""
        self._timer.add(callback)

    @property
    def num_pending(self) -> int:
        """Items not yet acknowledged."""
        return self._flight.pending

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
        if self.is_forked:
            return
        try:
            if not self._ended.is_set():
                self._wait(lambda: not self.num_pending, timeout_s)
        except ClosedError:
            self._orphaned |= not self._ended.is_set()
        finally:
            self.abandon()
        if self._orphaned:
            self._orphaned = False
            self.channel.check_usable()

    def abandon(self, num_unwritten: int = 0) -> None:
        """End at once and give up what is pending; log how much, with what writers have not handed over. Idempotent."""
        if self._ended.is_set() or self.is_forked:
            return
        with self._lock:
            self._ended.set()
            self._hurry.set()
            self._update()
            self._num_abandoned = self._flight.drop_all()
            undelivered = self._num_abandoned + num_unwritten
            self._work.notify_all()
            self._progress.set()
            self._connection += 1
            if self._call is not None:
                self._call.cancel()
        if undelivered:
            _LOG.error("%s: closed with %d items undelivered.", self.channel.address, undelivered)

    def __enter__(self) -> InsertStream:
        """Return the stream itself."""
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
                self._hurry.wait(_GATHER_S)

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
                    self._call = self.channel.stream(messages.INSERT_STREAM, self._outgoing(self._connection))
                for reply in self._call:
                    self._acknowledge(acknowledged_keys(reply))
                    failures = 0
            except ClosedError:
                self._lose_channel()
                return
            except Exception as error:  # noqa: BLE001  # whatever it is, the callers must hear of it, not this thread
                self._disconnected(error)
            else:
                self._disconnected(ConnectionError("the server ended the stream"))
            longest = min(_LAST_BACKOFF_S, _FIRST_BACKOFF_S * 2**failures)
            failures += 1
            self._ended.wait(random.uniform(longest / 2, longest))  # noqa: S311  # jitter, no secret

    def _acknowledge(self, keys: Sequence[int]) -> None:
        with self._lock:
            self._heard_at = time.monotonic()
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
            self._heard_at = info.at
        check_tables_exist(tables, info, self.channel.address)
        with self._lock:
            self._down = self._fault = None
            self._update()

    def _disconnected(self, error: Exception) -> None:
        with self._lock:
            if self._ended.is_set():
                return
            self._connection += 1
            call, self._call = self._call, None
            reason = str(error)
            if isinstance(error, grpc.RpcError):
                reason = describe(error) if call is None else call.why_ended(error)
                if error.code() in _REFUSALS:
                    self._fault = ReverbWriterError, f"the server at {self.channel.address} refuses: {reason}."
            elif not isinstance(error, ConnectionError | ReplayTimeoutError):
                self._fault = type(error) if isinstance(error, ReverbWriterError) else ReverbWriterError, reason
            if self._down is None:
                self._reconnects += 1
                _LOG.warning("%s: insert stream lost (%s); connecting again.", self.channel.address, reason)
            self._down = Outage(error, reason)
            self._update()
            self._flight.requeue()
            self._work.notify_all()
            self._progress.set()

    def _look(self) -> None:
        """Have a connection examined that says nothing although it should."""
        with self._lock:
            connection = None if self._call is None else self._call.connection
            if connection is not None:
                self._heard_at = max(self._heard_at, connection.heard_at)
            is_silent = self._flight.has_sent and time.monotonic() - self._heard_at > _SILENCE_S
        if connection is not None and is_silent:
            connection.examine()

    def _lose_channel(self) -> None:
        self._orphaned = not self._ended.is_set()
        self.abandon()

    def _wait(self, done: Callable[[], bool], timeout_s: float, *, patient: bool = False) -> None:
        """Wait until `done`, at most `timeout_s` seconds; without progress, if `patient`."""
        wait = Wait(self.channel, self._flight, timeout_s, patient=patient)
        try:
            with self._lock:
                self._waits.add(wait)
                self._hurry.set()
            self._await(done, wait)
        finally:
            with self._lock:
                self._waits.discard(wait)
                if not self._waits:
                    self._hurry.clear()
                self._blocked_s += time.monotonic() - wait.began_at
        with self._lock:
            if done():
                return
            if self._ended.is_set():
                raise ClosedError("the insert stream was closed by another thread while this one waited.")
            self._raise_fault()
            tables = ", ".join(f"`{table}`" for table in sorted(self._flight.tables()))
            text = f"table {tables}: {self.num_pending} items unconfirmed after {wait.spent_s:.1f} s. "
            is_there = self._down is None or self._down.is_silence
            raise (ReplayTimeoutError if is_there else ServerUnavailableError)(text + self._why(wait))

    def _await(self, done: Callable[[], bool], wait: Wait) -> None:
        logged_at = wait.began_at
        while True:
            self._progress.clear()
            with self._lock:  # not while waiting: an interrupt in `Condition.wait` may leave it without the lock
                if done() or self._ended.is_set() or self._fault or not (left_s := wait.left_s()):
                    return
                now = time.monotonic()
                if now - logged_at > _LOG_EVERY_S:
                    logged_at = now
                    text = "%s: waiting for %.0f s: %s"
                    _LOG.warning(text, self.channel.address, now - wait.began_at, self._why(wait))
            self._progress.wait(min(0.05, left_s))

    def _why(self, wait: Wait) -> str:
        return wait.why(time.monotonic() - self._heard_at, self._down)
