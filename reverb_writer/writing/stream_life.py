"""The life of a writer: open, flush, close, counters, and the end of a writer that was not closed."""

from __future__ import annotations

import contextlib
import copy
import logging
import time
import types
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal, Protocol

from reverb_writer.arguments import check_timeout
from reverb_writer.errors import ClosedError, FinishedError, ReverbWriterError
from reverb_writer.transport import process_hooks
from reverb_writer.transport.delivery import Post
from reverb_writer.writing.outbox import Outbox
from reverb_writer.writing.sender import Sender
from reverb_writer.writing.source import Source
from reverb_writer.writing.stream_options import Books, DeliveryOptions, ObserverStats
from reverb_writer.writing.waiting import LimiterNotice, WaitingCall

_LOG = logging.getLogger(__package__)

_LEAVE_S = 2.0  # time to deliver items when another error ends the `with` block
_STATS_S = 1.0  # time to wait for the counters


class Connection(Protocol):
    """A writer's way to its replay.

    Attributes:
        timeout_s: the writer's time-out of a call, in seconds.
    """

    timeout_s: float

    @property
    def address(self) -> str:
        """The replay's address, for messages."""

    def check_usable(self) -> None:
        """Raise ClosedError if the connection is closed, or belongs to a parent process."""

    def signatures(self, tables: Sequence[str], who: str) -> dict[str, Any]:
        """Return the signatures of tables; wait for the replay, and log that `who` waits.

        Raises:
            StructureError: a table does not exist.
            ServerUnavailableError, ReplayTimeoutError: no answer in time.
        """

    def largest_priority(self, tables: Sequence[str]) -> float:
        """Return the largest priority that is known to be set in the tables."""

    def outbox(self, options: DeliveryOptions, source: Source, post: Post) -> Outbox:
        """Return an outbox for the items of a source. Asks no server."""

    def close(self) -> None:
        """Close what was opened for the writer. Idempotent; does nothing in a forked child."""


Connect = Callable[[Any, float | None], Connection]
"""Makes the connection of a `replay` argument and a time-out in seconds, None for the default."""


class StreamLife:
    """A writer without methods that write. A context manager."""

    _name: ClassVar[str] = "writer"  # in messages
    _timeout_s: float  # of a call; known when the writer is open
    _signatures: dict[str, Any]  # of the tables; known when the writer is open
    _finalizer: weakref.finalize[..., Any]  # of the sender

    def __init__(self, replay: Any, connect: Connect, tables: Sequence[str], options: DeliveryOptions) -> None:
        """Connect to `replay`, and find the tables; the subclasses document the arguments."""
        self._options: DeliveryOptions = options
        self._replay, self._connect, self._tables = replay, connect, list(tables)
        self._sender: Sender | None = None
        self._connection: Connection | None = None  # None while the writer is closed
        self._books, self._last_stats = Books(), ObserverStats()
        self._notice, self._blocked_s = LimiterNotice(tables), 0.0
        self._is_leaving = False  # whether `close` has begun
        self.open()

    @property
    def client(self) -> Any:
        """The `replay` argument."""
        return self._replay

    def open(self) -> None:
        """Open the writer again after `close()`; does nothing if it is open. Completes a `close` that was interrupted.

        Raises:
            ReplayTimeoutError: an interrupted `close` could not deliver all items. The writer is closed.
            StructureError: a table no longer exists.
            ServerUnavailableError: no server answers.
            ClosedError: in a forked child.
        """
        if self._is_leaving:
            self.close()
        if self._connection is not None:
            self._connection.check_usable()
            if self._sender is None or not self._sender.is_ended:
                return
            self._leave(self._connection, self._sender)  # the sender has failed
        connection = self._connect(self._replay, self._options.timeout_s)
        try:
            self._signatures = connection.signatures(self._tables, self._name)
        except BaseException:
            connection.close()
            raise
        self._timeout_s, self._connection = connection.timeout_s, connection

    def flush(self, timeout_s: float | None = None) -> None:
        """Wait until the server has confirmed all complete windows.

        Args:
            timeout_s: time-out, in seconds; None to wait as a step does: the writer's time-out, counted from the last
                progress.

        Raises:
            ReplayTimeoutError: not confirmed in time; names the cause with its numbers. Nothing is lost.
            ServerUnavailableError: not confirmed in time because the server cannot be reached.
            FinishedError: not confirmed, and `until` is true.
        """
        self._check(self._sender)
        seconds = self._timeout_s if timeout_s is None else check_timeout(timeout_s)
        if self._sender is not None:
            self._wait(self._sender, "flush", seconds, extends=timeout_s is None)

    def close(self, timeout_s: float | None = None) -> None:
        """Deliver all complete windows, and end. Steps that are in no window are counted as dropped. Idempotent.

        If an interrupt ends the wait, the delivery continues, and another call completes it. When `until` returns true,
        undelivered items are dropped and counted.

        Args:
            timeout_s: time-out, in seconds; None for the writer's.

        Raises:
            ReplayTimeoutError: items were not delivered; names their number and the cause. The writer is closed.
            ServerUnavailableError: items were not delivered because the server cannot be reached.
        """
        connection, sender = self._connection, self._sender
        timeout_s = None if timeout_s is None else check_timeout(timeout_s)
        if connection is None:
            self._is_leaving = False
            return
        self._is_leaving = True
        try:
            if sender is not None and not process_hooks.is_forked():
                with contextlib.suppress(FinishedError):  # no one needs the items, and the log has their number
                    self._wait(sender, "close", self._timeout_s if timeout_s is None else timeout_s)
        except Exception:
            self._leave(connection, sender)
            raise
        self._leave(connection, sender)

    def _leave(self, connection: Connection, sender: Sender | None) -> None:
        """Forget the sender and the connection; after an interrupt, it may be called again."""
        if sender is not None:
            sender.end_soon()  # if `close` did not reach it
            stats = self._last_stats = self._stats_now()
            self._finalizer.detach()
            if stats.dropped_steps and not process_hooks.is_forked():  # a forked child has its parent's numbers
                reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(stats.dropped_steps.items()))
                level = logging.INFO if stats.items else logging.WARNING
                text = "The %s was closed after %d steps. Steps in no window, by reason: %s."
                _LOG.log(level, text, self._name, stats.steps, reasons)
        self._sender = self._connection = None  # before the connection closes, because an interrupt may end that
        self._is_leaving = False
        connection.close()

    def stats(self) -> ObserverStats:
        """Return the counters so far, from any thread."""
        return replace(self._stats_now(), blocked_s=self._blocked_s)

    def _stats_now(self) -> ObserverStats:
        return self._last_stats if self._sender is None else self._sender.stats(_STATS_S)

    def _counts_text(self, stats: ObserverStats) -> str:
        return f"{stats.items} items, {stats.pending_items} pending"

    def __repr__(self) -> str:
        address = "" if self._connection is None else f" at {self._connection.address}"
        return f"<{type(self).__name__} of {', '.join(self._tables)}{address}: {self._counts_text(self.stats())}>"

    def __enter__(self) -> Any:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        """Close; after an error of the block wait at most two seconds, and only log that items were not delivered."""
        if error is None:
            self.close()
            return
        try:
            self.close(min(self._timeout_s, _LEAVE_S))
        except ReverbWriterError as left:
            if not isinstance(error, FinishedError):
                _LOG.error("The %s was closed after an error, and could not deliver all items: %s", self._name, left)

    def __reduce__(self) -> Any:
        raise ClosedError(
            f"an {self._name} cannot be sent to another process: its thread and its connection stay here. Make one "
            "there, in a process started with `spawn`."
        )

    # ------------------------------------------------------------------------------------------------ what is inside

    def _wait(
        self, sender: Sender, kind: Literal["room", "flush", "close"], timeout_s: float, *, extends: bool = False
    ) -> None:
        began_at = time.monotonic()
        call = WaitingCall(sender, self._notice, kind, timeout_s, extends=extends, until=self._options.until)
        try:
            call.run()
        except Exception as error:  # after an interrupt, the sender delivers until the time-out of a `close`
            if kind == "close":
                sender.end_now(is_finished=isinstance(error, FinishedError))
            raise
        finally:
            self._blocked_s += time.monotonic() - began_at

    def _wait_for_room(self, sender: Sender) -> None:
        """Wait until the next call is granted."""
        self._check(sender)
        is_patient = self._options.on_block != "raise"
        self._wait(sender, "room", self._timeout_s if is_patient else 0.0, extends=is_patient)

    def _check(self, sender: Sender | None) -> Connection:
        """Raise ClosedError if the writer or its connection is closed, or in a forked child."""
        if self._connection is None or (sender is not None and sender.is_ended):
            raise ClosedError(f"the {self._name} is closed. Call `open()` to write again.")
        self._connection.check_usable()
        return self._connection

    def _new_books(self) -> Books:
        """Return counters for the next sender: an earlier one that is still ending may change its own."""
        self._books = copy.deepcopy(self._books)
        return self._books

    def _launch(self, connection: Connection, source: Source) -> Sender:
        """Return a sender of a source's rows. Asks no server."""
        sender = Sender(source, connection.outbox, self._options, self._name)
        # Without `close`, a program must hang neither at garbage collection nor at the interpreter's end.
        self._finalizer = weakref.finalize(self, sender.end_soon, connection.close)
        self._finalizer.atexit = False
        return sender
