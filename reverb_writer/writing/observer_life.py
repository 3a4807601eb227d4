"""The life of an observer: open, flush, close, counters, and what is left when it is forgotten."""

from __future__ import annotations

import copy
import logging
import time
import types
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from reverb_writer.arguments import check_timeout, integer
from reverb_writer.errors import ClosedError, FinishedError, ReverbWriterError
from reverb_writer.steps import StepStructure
from reverb_writer.transport.waits import Wait
from reverb_writer.writing.observer_stats import Books, ObserverStats
from reverb_writer.writing.sender import Sender
from reverb_writer.writing.session import Session
from reverb_writer.writing.step_layout import StepLayout
from reverb_writer.writing.stream_options import StreamOptions
from reverb_writer.writing.window_targets import WindowTarget

_LOG = logging.getLogger(__package__)

_LEAVE_S = 2.0  # how long items are still delivered for when an error is under way
_STATS_S = 1.0  # how long the counters are waited for


class ObserverLife:
    """What an observer does besides taking steps. A context manager."""

    _spans_episodes = False
    _max_steps: int | None = None  # of an episode; None for no bound

    def __init__(
        self,
        replay: Any,
        targets: Sequence[WindowTarget],
        *,
        spec: Any,
        mask: bool,
        num_envs: int | None,
        options: StreamOptions,
    ) -> None:
        """Find the tables; see the observers for the arguments."""
        self._replay, self._targets, self._mask, self._options = replay, tuple(targets), mask, options
        self._num_envs = None if num_envs is None else integer("num_envs", num_envs, minimum=1)
        self._all_envs = np.arange(1 if self._num_envs is None else self._num_envs)
        self._structure: StepStructure | None = None
        self._sender: Sender | None = None
        self._session: Session | None = None
        self._books, self._last_stats = Books(), ObserverStats()
        self._blocked_s = 0.0
        self._woken_for = -1
        self._num_before = 0  # steps before the sender's first, for messages
        self._thread: int | None = None  # the one whose episode is under way
        self._is_marked = self._spans_episodes or self._max_steps is not None  # whether ends of episodes are known
        self._unmarked_steps = 0
        self.open()
        if spec is not None:
            self._start(spec, is_spec=True)

    @property
    def client(self) -> Any:
        """The replay, as it was given."""
        return self._replay

    @property
    def num_envs(self) -> int | None:
        """Number of environments that step together; None if steps have no batch dimension."""
        return self._num_envs

    @property
    def num_steps(self) -> int:
        """Steps that were taken so far, of all environments; after an interrupt, whether a call took its step."""
        sender = self._sender
        return self._last_stats.steps if sender is None else self._num_before + sender.ring.head[0]

    def open(self) -> None:
        """Open the observer again after `close()`; does nothing if it is open.

        Raises:
            StructureError: a table is not there any more.
            ServerUnavailableError: no server answers.
        """
        if self._session is None:
            self._session = Session(self._replay, self._targets, self._options)

    def flush(self, timeout_s: float | None = None) -> None:
        """Return when all windows that are complete are confirmed by the server.

        Args:
            timeout_s: seconds to wait at most; None to wait as a step does, for the observer's time-out from the last
                progress.

        Raises:
            ReplayTimeoutError: not in time; names the cause with its numbers. Nothing is lost by it.
            ServerUnavailableError: not in time, because the server is gone.
        """
        self._check(self._sender)
        seconds = self._open_session.timeout_s if timeout_s is None else check_timeout(timeout_s)
        if self._sender is not None:
            self._wait(self._sender, Wait("flush", seconds, extends=timeout_s is None))

    def close(self, timeout_s: float | None = None) -> None:
        """Deliver the windows that are complete, and end. Steps that are in none are counted as dropped. Idempotent.

        If an interrupt ends the wait, the delivery goes on, and another call completes it.

        Args:
            timeout_s: seconds to wait at most; None for the observer's.

        Raises:
            ReplayTimeoutError: items were left; says how many and why. The observer is closed nevertheless.
            ServerUnavailableError: items were left, because the server is gone.
        """
        session, sender = self._session, self._sender
        timeout_s = None if timeout_s is None else check_timeout(timeout_s)
        if session is None:
            return
        try:
            if sender is not None and not sender.is_forked:
                self._wait(sender, Wait("close", session.timeout_s if timeout_s is None else timeout_s))
        except Exception:
            self._leave(session, sender)
            raise
        self._leave(session, sender)

    def _leave(self, session: Session, sender: Sender | None) -> None:
        """Forget the sender and the session; a call that an interrupt ends may be made again."""
        if sender is not None:
            sender.end_soon()  # if it did not hear of the end
            self._last_stats = self._stats_now()
            self._finalizer.detach()
            if not sender.is_forked:  # those of a forked child are its parent's
                self._say_what_was_dropped(self._last_stats)
        session.close()
        self._sender = self._session = None

    def _say_what_was_dropped(self, stats: ObserverStats) -> None:
        dropped = stats.dropped_steps
        if dropped:
            reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(dropped.items()))
            level = logging.INFO if stats.items else logging.WARNING
            _LOG.log(level, "Observer closed: of %d steps some are in no window (%s).", stats.steps, reasons)

    def stats(self) -> ObserverStats:
        """Return the counters so far; callable from any thread."""
        return replace(self._stats_now(), blocked_s=self._blocked_s, unmarked_steps=self._unmarked_steps)

    def _stats_now(self) -> ObserverStats:
        sender = self._sender
        if sender is None:
            return self._last_stats
        return replace(sender.stats(_STATS_S), steps=self._num_before + sender.ring.head[0])

    def __repr__(self) -> str:
        tables = ", ".join(dict.fromkeys(table for target in self._targets for table in target.tables))
        stats, address = self.stats(), "" if self._session is None else f" at {self._session.address}"
        counts = f"{stats.steps} steps, {stats.items} items, {stats.pending_items} pending"
        return f"<{type(self).__name__} of {tables}{address}: {counts}>"

    def __enter__(self) -> Any:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        """Close; while an error is under way within two seconds, and what is left then is only logged."""
        if error is None:
            self.close()
            return
        try:
            self.close(min(self._session.timeout_s, _LEAVE_S) if self._session is not None else None)
        except ReverbWriterError as left:
            if not isinstance(error, FinishedError):
                _LOG.error("While another error was under way, the observer could not deliver all items: %s", left)

    def __reduce__(self) -> Any:
        raise ClosedError(
            "an observer cannot be sent to another process: its thread and its connection stay here. Make one there, "
            "in a process started with `spawn`."
        )

    # ------------------------------------------------------------------------------------------------ what is inside

    def _wait(self, sender: Sender, wait: Wait) -> None:
        began_at = time.monotonic()
        try:
            sender.wait(wait)
        finally:
            self._blocked_s += time.monotonic() - began_at

    @property
    def _open_session(self) -> Session:
        if self._session is None:
            raise ClosedError("the observer is closed. Call `open()` to write again.")
        return self._session

    def _check(self, sender: Sender | None) -> None:
        """Raise if nothing can be written: closed, forked, or the client is closed."""
        self._open_session.client.connections.check_usable()
        if sender is not None and sender.is_ended:
            raise ClosedError("the observer is closed. Call `open()` to write again.")

    def _start(self, example: Any, *, is_spec: bool = False) -> Sender:
        """Take the layout from the first step or a spec, and start what sends the steps."""
        session = self._open_session
        session.client.connections.check_usable()
        structure = self._structure
        if structure is None:
            structure = StepStructure(example, batch_size=self._num_envs, is_spec=is_spec)
        layout = StepLayout(structure, mask=self._mask)
        sizes = session.sizes(layout, len(self._all_envs))
        self._books = copy.deepcopy(self._books)  # a sender that has not heard of `close` may still change its own
        sender = session.new_sender(
            layout, self._num_envs, self._books, spans_episodes=self._spans_episodes, max_steps=self._max_steps
        )
        # A program that forgets `close` must not hang, neither at garbage collection nor when the interpreter ends.
        self._finalizer = weakref.finalize(self, _forget, sender, session)
        self._finalizer.atexit = False
        self._sizes, self._flatten, self._ends_episode = sizes, structure.flatten, structure.ends_episode
        self._is_marked = self._is_marked or structure.marks_ends
        self._num_before = self._last_stats.steps
        self._structure, self._woken_for, self._sender = structure, -1, sender
        return sender


def _forget(sender: Sender, session: Session) -> None:
    """Deliver in the background, for two seconds, what an observer has left that was not closed."""
    if not sender.is_forked:
        sender.end_soon(session.close)
