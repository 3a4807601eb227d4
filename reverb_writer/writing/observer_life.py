"""The life of an observer: open, flush, close, counters, and the end of an observer that was not closed."""

from __future__ import annotations

import contextlib
import copy
import logging
import time
import types
import weakref
from dataclasses import replace
from typing import Any

import numpy as np

from reverb_writer.arguments import check_timeout, integer, options_of
from reverb_writer.client.client import Client, as_client
from reverb_writer.client.server_set import answering, logged
from reverb_writer.errors import ClosedError, FinishedError, ReverbWriterError
from reverb_writer.steps import StepStructure
from reverb_writer.transport import process_hooks
from reverb_writer.transport.wait import Wait
from reverb_writer.writing.sender import Sender
from reverb_writer.writing.step_kinds import StepKinds
from reverb_writer.writing.step_layout import StepLayout
from reverb_writer.writing.stream_options import Books, ObserverStats, StreamKeywords, StreamOptions
from reverb_writer.writing.window_target import WindowTarget

_LOG = logging.getLogger(__package__)

_LEAVE_S = 2.0  # time to deliver items when another error ends the `with` block
_STATS_S = 1.0  # time to wait for the counters


class ObserverLife:
    """An observer without methods that take steps. A context manager."""

    _spans_episodes = False
    _max_steps: int | None = None  # of an episode; None for no bound
    _bypass = False  # whether a longer episode is dropped without an error

    def __init__(
        self,
        replay: Any,
        target: WindowTarget,
        *,
        spec: Any,
        num_envs: int | None,
        options: StreamKeywords,
    ) -> None:
        """Find the tables; the observers document the arguments."""
        self._options = options_of(StreamOptions, options, self)
        self._replay, self._target = replay, target
        self._num_envs = None if num_envs is None else integer("num_envs", num_envs, minimum=1)
        self._all_envs = np.arange(1 if self._num_envs is None else self._num_envs)
        self._structure: StepStructure | None = None
        self._sender: Sender | None = None
        self._client: Client | None = None  # None while the observer is closed
        self._books, self._last_stats = Books(), ObserverStats()
        self._blocked_s = 0.0
        self._woken_for: tuple[float, float] | None = None
        self._num_before = 0  # steps before the sender's first, for messages
        self._thread: int | None = None  # the thread of the open episode
        self._is_marked = self._spans_episodes or self._max_steps is not None  # whether ends of episodes are known
        self._unmarked_steps = self._unknown_ends = 0
        self.open()
        if spec is not None:
            self._start(spec, is_spec=True)

    @property
    def client(self) -> Any:
        """The `replay` argument."""
        return self._replay

    @property
    def num_envs(self) -> int | None:
        """Number of environments that step together; None if steps have no batch dimension."""
        return self._num_envs

    @property
    def num_steps(self) -> int:
        """Steps taken so far, in all environments. After an interrupt, it shows whether the call took its step."""
        sender = self._sender
        return self._last_stats.steps if sender is None else self._num_before + sender.ring.head[0]

    def open(self) -> None:
        """Open the observer again after `close()`; does nothing if it is open.

        Raises:
            StructureError: a table no longer exists.
            ServerUnavailableError: no server answers.
            ClosedError: in a forked child.
        """
        if self._client is not None:
            self._client.connections.check_usable()
            if self._sender is None or not self._sender.is_ended:
                return
            self._leave(self._client, self._sender)  # an interrupt ended `close`, or the sender has failed
        options = self._options
        client, owns_client = as_client(self._replay, options.timeout_s)
        timeout_s = client.timeout_s if options.timeout_s is None else options.timeout_s
        try:
            with logged(lambda: f"an observer waits for the server at {client.address}"):
                info, *_ = answering(
                    client.connections.in_state("up"), client.timeout_s, [*self._target.tables]
                ).values()
        except BaseException:
            if owns_client:
                client.close()
            raise
        self._signatures = {table: info.tables[table].signature for table in self._target.tables}
        self._timeout_s, self._owns_client, self._client = timeout_s, owns_client, client

    def flush(self, timeout_s: float | None = None) -> None:
        """Wait until the server has confirmed all complete windows.

        Args:
            timeout_s: time-out, in seconds; None to wait as a step does: the observer's time-out, counted from the last
                progress.

        Raises:
            ReplayTimeoutError: not confirmed in time; names the cause with its numbers. Nothing is lost.
            ServerUnavailableError: not confirmed in time because the server cannot be reached.
            FinishedError: not confirmed, and `until` is true.
        """
        self._check(self._sender)
        seconds = self._timeout_s if timeout_s is None else check_timeout(timeout_s)
        if self._sender is not None:
            self._wait(self._sender, Wait("flush", seconds, extends=timeout_s is None))

    def close(self, timeout_s: float | None = None) -> None:
        """Deliver all complete windows, and end. Steps that are in no window are counted as dropped. Idempotent.

        If an interrupt ends the wait, the delivery continues, and another call completes it. When `until` returns true,
        undelivered items are dropped and counted.

        Args:
            timeout_s: time-out, in seconds; None for the observer's.

        Raises:
            ReplayTimeoutError: items were not delivered; names their number and the cause. The observer is closed.
            ServerUnavailableError: items were not delivered because the server cannot be reached.
        """
        client, sender = self._client, self._sender
        timeout_s = None if timeout_s is None else check_timeout(timeout_s)
        if client is None:
            return
        try:
            if sender is not None and not process_hooks.is_forked():
                with contextlib.suppress(FinishedError):  # no one needs the items, and the log has their number
                    self._wait(sender, Wait("close", self._timeout_s if timeout_s is None else timeout_s))
        except Exception:
            self._leave(client, sender)
            raise
        self._leave(client, sender)

    def _leave(self, client: Client, sender: Sender | None) -> None:
        """Forget the sender and the client; after an interrupt, it may be called again."""
        if sender is not None:
            sender.end_soon()  # if `close` did not reach it
            stats = self._last_stats = self._stats_now()
            self._finalizer.detach()
            if stats.dropped_steps and not process_hooks.is_forked():  # a forked child has its parent's numbers
                reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(stats.dropped_steps.items()))
                level = logging.INFO if stats.items else logging.WARNING
                text = "The observer was closed after %d steps. Steps in no window, by reason: %s."
                _LOG.log(level, text, stats.steps, reasons)
        self._sender = self._client = None  # before the client closes, because an interrupt may end that
        if self._owns_client:
            client.close()

    def stats(self) -> ObserverStats:
        """Return the counters so far, from any thread."""
        return replace(
            self._stats_now(),
            blocked_s=self._blocked_s,
            unmarked_steps=self._unmarked_steps,
            unknown_ends=self._unknown_ends,
        )

    def _stats_now(self) -> ObserverStats:
        sender = self._sender
        if sender is None:
            return self._last_stats
        return replace(sender.stats(_STATS_S), steps=self._num_before + sender.ring.head[0])

    def __repr__(self) -> str:
        stats, address = self.stats(), "" if self._client is None else f" at {self._client.address}"
        counts = f"{stats.steps} steps, {stats.items} items, {stats.pending_items} pending"
        return f"<{type(self).__name__} of {', '.join(self._target.tables)}{address}: {counts}>"

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
                _LOG.error("The observer was closed after an error, and could not deliver all items: %s", left)

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

    def _check(self, sender: Sender | None) -> Client:
        """Raise ClosedError if the observer or its client is closed, or in a forked child."""
        if self._client is None or (sender is not None and sender.is_ended):
            raise ClosedError("the observer is closed. Call `open()` to write again.")
        self._client.connections.check_usable()
        return self._client

    def _start(self, example: Any, *, is_spec: bool = False) -> Sender:
        """Take the layout from the first step or a spec, and make the sender. Asks no server."""
        client, options, target = self._check(None), self._options, self._target
        structure = self._structure
        if structure is None:
            structure = StepStructure(example, batch_size=self._num_envs, is_spec=is_spec)
        kinds = StepKinds(structure, options.last_row)
        layout = StepLayout(structure, store_flags=options.store_flags)
        layout.check(target, self._signatures)
        self._books = copy.deepcopy(self._books)  # an earlier sender that is still ending may change its books
        sender = Sender(
            client,
            layout,
            target,
            options,
            self._books,
            num_envs=self._num_envs,
        )
        # Without `close`, a program must hang neither at garbage collection nor at the interpreter's end.
        self._finalizer = weakref.finalize(self, sender.end_soon, client.close if self._owns_client else lambda: None)
        self._finalizer.atexit = False
        self._flatten, self._kinds = structure.flatten, kinds
        self._is_marked = self._is_marked or kinds.marks_ends
        self._num_before = self._last_stats.steps
        self._structure, self._woken_for, self._sender = structure, None, sender
        return sender
