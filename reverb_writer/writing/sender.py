"""The sender: one thread that does all work after the copy of a step.

    answers of the server, calls that wait or say that rows are due -> one inbox, or the time of the next look
        -> take rows -> write complete items to the outbox -> grant further rows -> wake waiting calls

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
from reverb_writer.errors import ClosedError, ReverbWriterError
from reverb_writer.transport import process_hooks
from reverb_writer.transport.wait import Status
from reverb_writer.writing.caller import Caller, nothing
from reverb_writer.writing.outbox import MakeOutbox
from reverb_writer.writing.source import REQUEST_BYTES, REQUEST_ITEMS, Source
from reverb_writer.writing.stream_options import DeliveryOptions, ObserverStats

_LOG = logging.getLogger(__package__)

_WAKE_ROWS, _WAKE_CALLS = 256, 8
_LOOK_S = 0.25  # interval of looks at rows that have not woken the thread
_END_WITHIN_S = 2.0  # time that a call waits for the end of the thread


class Sender:
    """Sends the items of one writer. Methods are thread-safe unless their names begin with an underscore.

    Attributes:
        name: the sender's owner, in messages.
        ring: the rows between the writer and the sender.
        tables: the tables that get its items.
        is_ended: whether the sender is closed.
        turned_at: `time.monotonic()` of the thread's last turn.
    """

    def __init__(self, source: Source, make_outbox: MakeOutbox, options: DeliveryOptions, name: str) -> None:
        """Make the outbox and a thread, which starts with the first work; errors call the sender's owner `name`."""
        self.is_ended, self._has_ended = False, Flag()
        self._options, self.name = options, name
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._calls: list[Caller] = []
        self._last: dict[Caller, Status] = {}  # of the calls that waited at the end
        self._look_at = math.inf  # time of the next look at rows that do not wake the thread
        self._late_at, self._late_row = 0.0, 0  # time of the look that seals open rows which begin before this row
        self._is_idle = True  # whether the last look found no new rows: then the next row wakes the thread
        self._is_closing = False
        self._close_by: float | None = None  # time at which a `close` ends
        self.turned_at = time.monotonic()
        self._ident: int | None = None
        self._failure: tuple[type[Exception], str] | None = None
        self._at_end: Callable[[], None] = lambda: None
        self._thread = LateThread(self._run, "reverb-writer_send")

        self.ring: Any = source.ring  # the caller knows which rows
        self.tables = source.tables
        self._source = source
        self._outbox = make_outbox(options, source, self.post)
        self._stats = self._stats_now()
        self._grant()
        same_process.add_sender(self)

    # ------------------------------------------------------------------------------------------ from other threads

    def post(self, work: Callable[[], None] = nothing) -> None:
        """Wake the thread and have it call a function; never waits."""
        if self.is_ended:  # the inbox would keep a late error, and its frames gRPC's call and connection
            return
        self._inbox.put(work)
        with contextlib.suppress(ClosedError):  # the interpreter ends: `close` does the work, see `_begin`
            self._thread.start()  # at each call, because an interrupt may have kept it from starting

    def attend(self, call: Caller) -> None:
        """Wake a call when it may continue or is due. A "close" is begun, and continues until its time-out without it.

        Raises:
            ClosedError: this is the sender's thread, or the interpreter ends and the call is no "close".
        """
        if threading.get_ident() == self._ident:
            raise ClosedError("a `priority` function called its own observer, which waits for the function.")
        self._inbox.put(lambda: self._attend(call))
        self._begin(is_close=call.kind == "close")
        if self.is_ended:  # the thread may have ended before it heard of the call
            call.show(self._status(call))

    def ask(self, call: Caller) -> None:
        """Show the status to an attended call soon; never waits."""
        call.is_due = True
        self.post()
        if self.is_ended:
            call.show(self._status(call))

    def end_now(self, *, is_finished: bool) -> None:
        """Give up pending items, and wait for the end; `is_finished`: whether the learner needs no more items."""
        if threading.get_ident() == self._ident:
            return
        self.post(lambda: None if self.is_ended else self._end(is_finished=is_finished))
        self._has_ended.wait(_END_WITHIN_S)

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

    def end_soon(self, then: Callable[[], None] = lambda: None) -> Flag | None:
        """Begin to deliver for up to two seconds, then end and call `then`.

        Return a flag that is set at the end; None if nothing is to be done.
        """
        # A started thread may not have begun yet: its work is in the inbox.
        if self.is_ended or process_hooks.is_forked() or not (self._thread.has_begun or not self._inbox.empty()):
            then()
            return None
        self._at_end, end_at = then, time.monotonic() + same_process.EXIT_S
        self._inbox.put(lambda: self._close_within(end_at))
        self._begin(is_close=True)
        return self._has_ended

    def _begin(self, *, is_close: bool) -> None:
        """Start the thread. If it cannot start because the interpreter ends, only `close` works, here."""
        try:
            self._thread.start()
        except ClosedError:
            if not is_close:
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
                    "The thread of an %s has failed; the %s is closed. Please report it.", self.name, self.name
                )
                self._failure = (
                    ReverbWriterError,
                    f"the {self.name} has failed ({error!r}) and is closed. See its log.",
                )
                self._end()
        self._ident = None

    def _turn(self) -> None:
        """Wait for work, and do all of it."""
        with contextlib.suppress(queue.Empty):
            self._inbox.get(timeout=self._pause_s())()
            while True:
                self._inbox.get_nowait()()
        now = self.turned_at = time.monotonic()
        if self._calls:
            self._calls = [call for call in self._calls if not call.is_over]
        self._outbox.check()
        is_look, is_free = now >= self._look_at, self._is_free
        # A confirmation alone is no reason to take rows: with few rows, a turn costs more than the rows.
        if is_look or is_free or self._calls or self.ring.due():
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
        if self._close_by is not None:
            self._close(self._close_by)
        for call in self._calls:
            self._wake(call)
        self._watch_ring()

    def _pause_s(self) -> float | None:
        """Send queued requests; return the seconds until more work is due, None if only the inbox can bring work."""
        due_at = self._look_at if self._close_by is None else min(self._look_at, self._close_by)
        pause_s = min(due_at - time.monotonic(), self._outbox.proceed())
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
        if not self._source.num_unencoded or not (self._calls or self._is_closing):
            return False
        return self._is_closing or not self._outbox.num_written or any(call.kind != "room" for call in self._calls)

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

    def _attend(self, call: Caller) -> None:
        self._calls.append(call)
        if call.kind == "close":
            self._close_within(call.end_at)

    def _wake(self, call: Caller) -> None:
        """Show the status to a call that may continue or wants to see it."""
        if call.kind == "room":
            room_before, call.room = call.room, self._room()
            may_go_on = call.room > room_before
        else:
            may_go_on = not (self._num_pending or self._is_closing)
        if may_go_on or call.is_due or self._fault(call) is not None:
            call.show(self._status(call))

    def _room(self) -> int:
        """Return 0 if a waiting step has no room, 1 if it has little, 2 if it has so much that it need not wait."""
        num_rows, num_items = self.ring.room()
        if num_rows <= 0 or num_items <= 0:
            return 0
        is_much = num_rows >= self.ring.size // 4 and num_items >= self._part_of_limit(4)
        return 2 if is_much or not self._outbox.num_written else 1

    def _status(self, call: Caller) -> Status:
        return self._last.get(call) or self._status_now(call)

    def _status_now(self, call: Caller, *, is_final: bool = False) -> Status:
        delivery, at = self._outbox.delivery, self._outbox.progress_at
        return Status(delivery.channel, self._num_pending, at, delivery.loss, self._fault(call), is_final)

    def _fault(self, call: Caller) -> tuple[type[Exception], str] | None:
        """Return kind and text of the error that ends a call."""
        if self._failure is not None:
            return self._failure
        if call.kind != "close" and (self._is_closing or self.is_ended):
            return ClosedError, f"the {self.name} was closed by another thread while this one waited."
        return self._outbox.fault if call.kind != "close" or self._num_pending else None

    # -------------------------------------------------------------------------------------------------------- the end

    def _close_within(self, end_at: float) -> None:
        """Deliver until `end_at`, a `time.monotonic()`; the next `close` replaces the time."""
        self._close_by = end_at

    def _close(self, end_at: float) -> None:
        """Begin to close; end when everything is confirmed, or at `end_at`."""
        if not self._is_closing:
            self._is_closing = True
            self.ring.granted = -1
            self._source.take()
            self._source.cut(lambda _: True, "reset")
            self._send_now()
            self._outbox.proceed()
        if not self._num_pending or self._outbox.fault is not None or time.monotonic() >= end_at:
            self._end()

    def _end(self, *, is_finished: bool = False) -> None:
        """Give up pending items, and end the thread. `is_finished`: whether the learner needs no more items."""
        self.ring.granted, self._close_by = -1, None
        self._last = {call: self._status_now(call, is_final=True) for call in self._calls}
        num_unencoded, self._source.num_unencoded = self._source.num_unencoded, 0
        self._source.books.counts["items"] += num_unencoded
        num_left = num_unencoded + self._outbox.close()
        if num_left and is_finished:
            _LOG.debug("%s: the run has ended; %d undelivered items are dropped.", self._outbox.address, num_left)
        elif num_left:
            text = "%s: the %s has ended with %d undelivered items. `close(timeout_s=...)` waits longer for them."
            _LOG.error(text, self._outbox.address, self.name, num_left)
        self.is_ended = True  # later posts see it; earlier posts are done here
        self._count()
        while not self._inbox.empty():
            self._inbox.get()()
        for call in self._calls:
            call.show(self._status(call))
        self._calls.clear()
        self._at_end()
        self._has_ended.set()

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
