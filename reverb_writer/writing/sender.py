"""The sender: one thread that does all work after the copy of a step.

    rows of the source, answers of the server, waiting calls, time
        -> one inbox -> take rows -> write complete items to the outbox -> grant further rows

The source is a `Cutter`, which makes windows of steps, or an `ItemSource`, whose rows are whole items. The outbox
delivers them. The thread receives no signals and shares only the source's rows: so there are no locks, and Ctrl-C
leaves nothing half done. Other threads put functions into the inbox, and the sender calls them. It sleeps without work:
an observer without steps costs nothing.
"""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from reverb_writer.background import Flag, LateThread
from reverb_writer.client import same_process
from reverb_writer.errors import ClosedError, FinishedError, ReplayTimeoutError, ReverbWriterError
from reverb_writer.transport import process_hooks
from reverb_writer.transport.delivery import Delivery
from reverb_writer.transport.wait import Wait
from reverb_writer.writing.outbox import MakeOutbox
from reverb_writer.writing.source import REQUEST_BYTES, REQUEST_ITEMS, Source
from reverb_writer.writing.stream_options import DeliveryOptions, ObserverStats

_LOG = logging.getLogger(__package__)

_WAKE_ROWS, _WAKE_CALLS = 256, 8
_ROOM_S = 0.002
_NOTICE_S = 0.2  # sum of the waits of steps after which the log names the cause
_LOOK_S = 0.25  # interval of looks at rows that have not woken the thread
_HANDOVER_S = 5.0  # time that a call waits for the sender's answer after its time-out
_EXIT_S = 2.0
_UNTIL_S = 0.2  # interval at which a waiting call asks whether the run has ended


class Sender:
    """Sends the items of one writer. Methods are thread-safe unless their names begin with an underscore.

    Attributes:
        ring: the rows between the writer and the sender.
        is_ended: whether the sender is closed.
    """

    def __init__(self, source: Source, make_outbox: MakeOutbox, options: DeliveryOptions, name: str) -> None:
        """Make the outbox and a thread, which starts with the first work; errors call the sender's owner `name`."""
        self.is_ended = False
        self._options, self._name = options, name
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._waits: list[Wait] = []
        self._look_at = math.inf  # time of the next look at rows that do not wake the thread
        self._late_at, self._late_row = 0.0, 0  # time of the look that seals open rows which begin before this row
        self._is_idle = True  # whether the last look found no new rows: then the next row wakes the thread
        self._is_closing = False
        self._room_waited_s, self._ask_limiter_at_s = 0.0, _NOTICE_S
        self._turned_at = time.monotonic()
        self._ident: int | None = None
        self._failure: tuple[type[Exception], str] | None = None
        self._at_end: Callable[[], None] = lambda: None
        self._thread = LateThread(self._run, "reverb-writer_send")

        self.ring: Any = source.ring  # the caller knows which rows
        self._source = source
        self._outbox = make_outbox(options, source, self.post)
        self._stats = self._stats_now()
        self._grant()
        same_process.add_sender(self)

    # ------------------------------------------------------------------------------------------ from other threads

    def post(self, work: Callable[[], None] = lambda: None) -> None:
        """Wake the thread and have it call a function; never waits."""
        if self.is_ended:  # the inbox would keep a late error, and its frames gRPC's call and connection
            return
        self._inbox.put(work)
        with contextlib.suppress(ClosedError):  # the interpreter ends: `close` does the work, see `_post_wait`
            self._thread.start()  # at each call, because an interrupt may have kept it from starting

    def wait(self, wait: Wait) -> None:
        """Wait until the sender answers; raise its error."""
        if threading.get_ident() == self._ident:
            raise ClosedError("a `priority` function called its own observer, which waits for the function.")
        self._post_wait(wait)
        if self.is_ended:
            wait.answer.put(None if wait.kind == "close" and self._failure is None else self._end_error())
        try:
            while True:
                with contextlib.suppress(queue.Empty):
                    error = wait.answer.get(wait.timeout_s + _HANDOVER_S)
                    break
                silent_s = time.monotonic() - self._turned_at
                if silent_s > wait.timeout_s:
                    raise ReplayTimeoutError(
                        f"the {self._name} has done nothing for {silent_s:.1f} s. A `priority` function may be waiting "
                        "for a lock that this thread holds: release it before you call the observer."
                    )
        finally:
            wait.is_abandoned = True
        if error is not None:
            raise error

    def send_due(self) -> None:
        """Send all complete items soon; never waits."""
        if self._thread.has_begun:  # a sender that an interrupt kept from its observer must not begin
            self.post(self._send_now)

    def stats(self, timeout_s: float) -> ObserverStats:
        """Return the counters so far, without steps; older ones if the thread does not answer within `timeout_s`."""
        if not (self.is_ended or process_hooks.is_forked() or threading.get_ident() == self._ident):
            counted = Flag()
            self.post(self._count)
            self.post(counted.set)
            if not counted.wait(timeout_s / 2):  # if the process was paused, the time ended before the thread ran
                counted.wait(timeout_s / 2)
        return self._stats

    def end_soon(self, then: Callable[[], None] = lambda: None) -> Wait | None:
        """Begin to deliver for up to two seconds, then end and call `then`; return None if nothing is to be done."""
        # A started thread may not have begun yet: its work is in the inbox.
        if self.is_ended or process_hooks.is_forked() or not (self._thread.has_begun or not self._inbox.empty()):
            then()
            return None
        self._at_end = then
        wait = Wait("close", _EXIT_S)
        self._post_wait(wait)
        return wait

    def _post_wait(self, wait: Wait) -> None:
        """Have the thread answer a call. If it cannot start because the interpreter ends, only `close` works, here."""
        self._inbox.put(lambda: self._waits.append(wait))
        try:
            self._thread.start()
        except ClosedError:
            if wait.kind != "close":
                raise
            self._thread.run()

    # ------------------------------------------------------------------------------------------------- the thread

    def _run(self) -> None:
        self._ident = threading.get_ident()
        while not self.is_ended:
            try:
                self._turn()
            except BaseException as error:  # noqa: BLE001  # callers must get an error, and not wait for this thread
                _LOG.exception(
                    "The thread of an %s has failed; the %s is closed. Please report it.", self._name, self._name
                )
                self._failure = (
                    ReverbWriterError,
                    f"the {self._name} has failed ({error!r}) and is closed. See its log.",
                )
                self._end(self._end_error())
        self._ident = None

    def _turn(self) -> None:
        """Wait for work, and do all of it."""
        with contextlib.suppress(queue.Empty):
            self._inbox.get(timeout=self._pause_s())()
            while True:
                self._inbox.get_nowait()()
        now = self._turned_at = time.monotonic()
        self._outbox.check()
        is_look, is_free = now >= self._look_at, self._is_free
        # A confirmation alone is no reason to take rows: with few rows, a turn costs more than the rows.
        if is_look or is_free or self._waits or self.ring.due():
            self._source.take()
        is_look = is_look or (is_free and self._source.has_new)
        if is_look:
            self._look(now)
        if self._is_urgent():
            self._send_now()
        elif is_look or self._is_enough():
            self._write()
            if self._source.num_unencoded >= self._part_of_limit(2):
                # These items wait for full chunks, and the server would run out of work.
                self._source.seal_fullest(self._source.num_unencoded // 2)
                self._write()
        self._grant()
        self._answer_waits()
        self._watch_ring()

    def _pause_s(self) -> float | None:
        """Send queued requests; return the seconds until more work is due, None if only the inbox can bring work."""
        times = [self._look_at - time.monotonic(), self._outbox.proceed(), *(wait.left_s() for wait in self._waits)]
        if self._waits and self._options.until is not None:
            times.append(_UNTIL_S)
        pause_s = min(times)
        return None if pause_s > threading.TIMEOUT_MAX else max(pause_s, 0.0)

    def _look(self, now: float) -> None:
        """Seal open rows that complete windows, and plan the next look.

        Rows in which an episode has ended are sealed at once. Other rows are sealed when half of `max_delay_s` has
        passed, because short chunks are the largest cost.
        """
        source, half_s = self._source, self._options.max_delay_s / 2
        is_late = now >= self._late_at
        source.seal_open(self._late_row if is_late else 0)
        if is_late:
            self._late_row, self._late_at = source.taken, now + half_s
        self._is_idle, source.has_new = not source.has_new, False
        self._look_at = self._late_at if source.num_unencoded else math.inf
        if not self._is_idle:
            self._look_at = min(self._late_at, now + _LOOK_S)

    @property
    def _is_free(self) -> bool:
        """Whether the next row is sent at once: the thread is idle, or rows are items and nothing is in flight."""
        return self._is_idle or (self._source.is_prompt and not self._outbox.num_written)

    def _watch_ring(self) -> None:
        """Set the row and the item that wake the thread."""
        taken = self._source.taken
        if self._is_free:
            self.ring.wake_after = taken, math.inf
            if self.ring.head[0] != taken:  # a row was written before `wake_after` was set
                self._look_at = 0.0
        else:
            rows = max(_WAKE_ROWS, _WAKE_CALLS * self.ring.num_envs)
            num_items = self._source.num_counted + self._part_of_limit(2)
            self.ring.wake_after = taken + rows - 1, num_items - 1

    def _part_of_limit(self, parts: int) -> int:
        """Return one of `parts` equal parts of the items that may be in flight, at least one item."""
        return max(self._outbox.limit // parts, 1)

    @property
    def _num_pending(self) -> int:
        """Number of items that are complete and not confirmed."""
        return self._source.num_unencoded + self._outbox.num_written

    def _is_enough(self) -> bool:
        """Return whether enough is complete for a message."""
        enough = min(REQUEST_ITEMS, self._part_of_limit(2))
        return self._source.num_unencoded >= enough or self._source.unsent_bytes >= REQUEST_BYTES

    def _write(self) -> None:
        """Write the items that are complete in chunks."""
        self._outbox.write(self._source.take_ready())

    def _is_urgent(self) -> bool:
        """Whether a call waits for windows that are complete and not sent."""
        if not self._source.num_unencoded or not self._waits:
            return False
        return not self._outbox.num_written or any(wait.kind != "room" for wait in self._waits)

    def _send_now(self) -> None:
        if not self.is_ended:
            self._source.take()
            self._source.seal_open()
            self._write()

    def _grant(self) -> None:
        """Set the bounds of rows and items; the rows' never falls, because a call may have read it."""
        if self._is_closing or self._outbox.fault is not None or self.is_ended:
            self.ring.granted = -1
        else:
            self.ring.granted = max(self.ring.granted, self._source.release_rows())
            self.ring.granted_items = self._source.num_counted + self._outbox.room() - self._source.num_unencoded
            self._source.note_in_flight(self._outbox.pending_bytes)

    # ------------------------------------------------------------------------------------------------ waiting calls

    def _answer_waits(self) -> None:
        """Answer all calls whose wait has ended."""
        if not self._waits:
            return
        delivery, progress_at = self._outbox.delivery, self._outbox.progress_at
        closes = [wait for wait in self._waits if wait.kind == "close"]
        for wait in list(self._waits):
            if self.is_ended:
                return
            # The delivery of an interrupted `close` continues, until its time-out or within the next `close`.
            if wait.is_abandoned and (wait.kind != "close" or wait is not closes[-1]):
                self._waits.remove(wait)
                continue
            try:
                if self._is_done(wait):
                    self._answer(wait, None)
                elif late := wait.proceed(delivery, progress_at, self._num_pending):
                    self._answer(wait, late)
            except Exception as error:  # noqa: BLE001  # raised by the waiting call
                self._answer(wait, error)
        self._note_limiter(delivery)

    def _is_done(self, wait: Wait) -> bool:
        """Return whether a call's wait has ended; raise the call's error."""
        if wait.kind != "close" and self._is_closing:
            raise self._end_error()
        if wait.kind == "close" and not self._is_closing:
            self._begin_close()
        num_pending, until, fault = self._num_pending, self._options.until, self._outbox.fault
        if fault is not None and (wait.kind != "close" or num_pending):
            kind, text = fault
            raise kind(text)
        if self._has_room(wait) if wait.kind == "room" else not num_pending:
            return True
        if until is not None and wait.waited_s >= _UNTIL_S and until():
            raise FinishedError(f"the run has ended (`until` is true): {num_pending} items are not delivered.")
        return False

    def _has_room(self, wait: Wait) -> bool:
        """Return whether a waiting step may be written.

        If there is little room, it waits two more milliseconds for confirmations that make much: to wake the caller's
        thread for each row costs more than the rows.
        """
        num_rows, num_items = self.ring.room()
        has_room = num_rows > 0 and num_items > 0
        is_much = num_rows >= self.ring.size // 4 and num_items >= self._part_of_limit(4)
        has_waited = wait.had_room_for(min(_ROOM_S, wait.timeout_s), has_room=has_room)
        return has_room and (has_waited or is_much or not self._outbox.num_written)

    def _answer(self, wait: Wait, error: Exception | None) -> None:
        self._waits.remove(wait)
        if wait.kind == "room":
            self._room_waited_s += wait.waited_s
        if wait.kind == "close":
            self._end(error)
        wait.answer.put(error)

    def _note_limiter(self, delivery: Delivery) -> None:
        """Log once that the actor waits for a rate limiter.

        An actor that is as fast as its learner has many short waits. So the server is asked when the sum of the waits
        is 0.2 s, and again whenever the sum has doubled, until a limiter blocks.
        """
        if self._ask_limiter_at_s == math.inf:
            return
        text = delivery.questions.limiter_text()
        if text is not None:
            self._ask_limiter_at_s = math.inf
            _LOG.info("%s: writing waits for a rate limiter. %s", delivery.channel.address, text)
        elif self._room_waited_s >= self._ask_limiter_at_s:
            self._ask_limiter_at_s = 2 * self._room_waited_s
            delivery.questions.ask()

    # -------------------------------------------------------------------------------------------------------- the end

    def _begin_close(self) -> None:
        self._is_closing = True
        self.ring.granted = -1
        self._source.take()
        self._source.cut(lambda _: True, "reset")
        self._send_now()
        self._outbox.proceed()

    def _end(self, error: Exception | None = None) -> None:
        """Give up pending items, and end the thread; other calls of `close` get the same error."""
        self.ring.granted = -1
        num_unencoded, self._source.num_unencoded = self._source.num_unencoded, 0
        self._source.books.counts["items"] += num_unencoded
        num_left = num_unencoded + self._outbox.close()
        if num_left and isinstance(error, FinishedError):  # the learner needs no more items
            _LOG.debug("%s: the run has ended; %d undelivered items are dropped.", self._outbox.address, num_left)
        elif num_left:
            text = "%s: the %s has ended with %d undelivered items. `close(timeout_s=...)` waits longer for them."
            _LOG.error(text, self._outbox.address, self._name, num_left)
        self.is_ended = True  # later posts see it; earlier posts are answered here
        self._count()
        while not self._inbox.empty():
            self._inbox.get()()
        for wait in self._waits:
            wait.answer.put(error if wait.kind == "close" else self._end_error())
        self._at_end()

    def _end_error(self) -> Exception:
        """Return the error of a call that waits for an ended sender."""
        if self._failure is not None:
            kind, text = self._failure
            return kind(text)
        return ClosedError(f"the {self._name} was closed by another thread while this one waited.")

    def _count(self) -> None:
        """Assign the counters."""
        if not self.is_ended:
            self._source.take()
        self._stats = self._stats_now()

    def _stats_now(self) -> ObserverStats:
        outbox = self._outbox
        return self._source.books.stats(
            self._source.num_unencoded,
            outbox.num_written,
            pending_bytes=outbox.pending_bytes,
            kept_bytes=outbox.kept_bytes,
        )
