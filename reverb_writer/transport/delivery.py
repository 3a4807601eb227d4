"""Delivery of items to one server until it has confirmed them: connect, send, and send again after a loss.

    InFlight.add() -> proceed() -> Pipe -> server
    answers, and the end of a connection -> post() -> the owner's thread runs them

A `Delivery` has no thread and no lock: its owner calls it from one thread, and there runs the functions that other
threads give to `post`. After a loss of the connection, all unconfirmed items are sent again with the same keys; after a
restart of the server, `kept_requests` names confirmed items that are sent before them. The server keeps an item with a
known key and only sets the new priority, so no item exists twice.
"""

from __future__ import annotations

import collections
import functools
import logging
import math
import random
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from reverb_writer.errors import (
    ClosedError,
    FormatError,
    ReplayTimeoutError,
    ReverbWriterError,
    ServerUnavailableError,
    StructureError,
)
from reverb_writer.protocol import messages
from reverb_writer.protocol.responses import parse
from reverb_writer.tables.rate_limits import explain_inserts, explain_limiter, inserts_progress
from reverb_writer.tables.table_info import ServerInfo, check_tables_exist
from reverb_writer.transport.channel import Channel
from reverb_writer.transport.in_flight import InFlight, InsertRequest
from reverb_writer.transport.kept_requests import KeptRequests
from reverb_writer.transport.pipes import Event, LocalPipe, Pipe, open_pipe

_LOG = logging.getLogger(__package__)

Post = Callable[[Callable[[], None]], None]

_MESSAGE_BYTES = 1 << 20
_PROBE_TIMEOUT_S = 5.0
_QUESTION_TIMEOUT_S = 2.0
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.05, 2.0
_SILENCE_S = 10.0  # silence after which the connection is examined, if a confirmation is due
_REFUSALS = 5  # failures in a row after which refused items that were confirmed before are given up
_SAVES_EVERY_S = 1.0  # interval of questions for the kept requests that a checkpoint has


class Delivery:
    """Delivers items to one server.

    Attributes:
        flight: unconfirmed items, and counters.
        kept: confirmed requests that a restart of the server could lose.
        fault: kind and text of the error with which the server refuses items; None without a refusal.
        loss: error of the last attempt to connect; None while there is a connection, or before one is needed.
    """

    def __init__(
        self,
        channel: Channel,
        post: Post,
        counts: collections.Counter[str],
        *,
        needed: Callable[[], Iterable[int]] = lambda: (),
        max_kept_bytes: int = 0,
        info: ServerInfo | None = None,
    ) -> None:
        """Prepare the delivery. It connects when it has items, and does not close the channel.

        Args:
            channel: the connection to the server.
            post: makes the owner's thread call a function soon; callable from any thread, never waits.
            counts: counters to raise.
            needed: as for `InFlight`.
            max_kept_bytes: bound of the confirmed requests that are kept.
            info: the server's answer of a moment ago, instead of a question before the first connection.
        """
        self.channel = channel
        self.kept = KeptRequests(max_kept_bytes, counts)
        self.flight = InFlight(needed)
        self.fault: tuple[type[Exception], str] | None = None
        self.loss: Exception | None = None
        self._post, self._counts, self._info = post, counts, info
        self._pipe: Pipe | LocalPipe | None = None
        self._attempt = 0  # number of the pipe; events of an earlier one are ignored
        self._is_connecting = self._is_closed = False
        self._retry_at, self._failures = 0.0, 0
        self._state_id: int | None = None
        self._ask_saves_at, self._has_released = 0.0, False
        self._forget_answers()

    # --------------------------------------------------------------------------------------------------- what to send

    def proceed(self) -> float:
        """Connect and send, without a wait; return the seconds until more work is due, infinity for none."""
        if self._is_closed:
            return math.inf
        if self._pipe is not None:
            return min(self._send(self._pipe), self._ask_saves())
        if not (self.flight.has_queued or self.kept) or self._is_connecting:
            return math.inf
        left_s = self._retry_at - time.monotonic()
        if left_s > 0:
            return left_s
        self._is_connecting = True
        info, self._info = self._info, None
        if info is None:
            self._question(_PROBE_TIMEOUT_S, self._on_info)
        else:
            self._on_info(info)
        return math.inf

    def _send(self, pipe: Pipe | LocalPipe) -> float:
        """Send queued requests, and have a silent connection examined; return as `proceed`."""
        while self.flight.has_queued:
            pipe.send(self.flight.take_message(_MESSAGE_BYTES))
        if not self.flight.sent_items:
            return math.inf
        silent_s = time.monotonic() - max(self.flight.progress_at, self.channel.last_response_at)
        if silent_s < _SILENCE_S:
            return _SILENCE_S - silent_s
        self.channel.examine()
        return _SILENCE_S / 10

    def take_over(self, other: Delivery) -> None:
        """Keep the confirmed requests that another delivery to the same server has kept until now."""
        self.kept, other.kept = other.kept, self.kept
        self._state_id = other._state_id

    def close(self) -> int:
        """End the connection, give up pending items and return their number; release kept items. Idempotent."""
        self._is_closed = True
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None
        if num_uncovered := self.flight.again + self.kept.close():
            self._counts["uncovered_items"] += num_uncovered
            if self.kept.saves is not None:
                text = "%s: the observer ends with %d confirmed items that are in no checkpoint of the server yet."
                _LOG.info(text, self.channel.address, num_uncovered)
        return self.flight.drop_all()

    # ------------------------------------------------------------------------------------------------- the connection

    def _question(self, timeout_s: float, handle: Callable[[Any], None]) -> None:
        try:
            self.channel.start_info(timeout_s, self._posting(handle))
        except ClosedError as error:
            handle(error)

    def _posting(self, handle: Callable[[Any], None]) -> Callable[[Any], None]:
        """Return a function that makes the owner's thread handle an answer."""
        return lambda answer: self._post(functools.partial(handle, answer))

    def _on_info(self, info: ServerInfo | Exception) -> None:
        """Check the server's tables, open a stream, and send queued requests."""
        if self._is_closed:
            return
        self._is_connecting = False
        try:
            if isinstance(info, Exception):
                raise info  # noqa: TRY301  # as the error of the check
            if self._state_id not in (None, info.state_id):
                self._counts["server_restarts"] += 1
                if self.kept.max_bytes:
                    self.flight.send_again(self.kept.restarted(info))
                    self._counts["recovered_items"] += self.flight.again
                text = (
                    "%s: the server was restarted; its tables are as in the checkpoint that it has restored, or empty. "
                    "%d unconfirmed and %d confirmed items are sent again."
                )
                _LOG.warning(text, self.channel.address, self.flight.pending, self.flight.again)
            elif self._state_id is None:
                self.kept.seen(info)
            self._state_id = info.state_id
            check_tables_exist(self.flight.tables(), info, self.channel.address)
            self._attempt += 1
            deliver = self._posting(functools.partial(self._on_event, self._attempt))
            self._pipe = open_pipe(self.channel, messages.INSERT_STREAM, deliver)
        except Exception as error:  # noqa: BLE001  # the callers must get any error
            if isinstance(error, ReplayTimeoutError):
                self.channel.examine()
            self._lost(error)
            return
        self.loss = self.fault = None
        self.proceed()

    def _on_event(self, attempt: int, event: Event) -> None:
        pipe = self._pipe
        if attempt != self._attempt or pipe is None:
            return
        if isinstance(event, bytes):
            try:
                keys = parse("InsertStreamResponse", messages.InsertStreamResponse, event).keys
            except FormatError as error:
                pipe.close()
                event = error
        if isinstance(event, ReverbWriterError):
            self._pipe = None
            # A table that the stream did not find may exist later: the next question for the tables decides.
            self._lost(event, is_gone=isinstance(event, StructureError))
            return
        self._failures = 0
        self._counts["acknowledged_items"] += self.flight.acknowledge(np.fromiter(keys, np.uint64, len(keys)))
        self._keep(self.flight.take_finished())

    def _lost(self, error: Exception, *, is_gone: bool = False) -> None:
        is_refusal = not (is_gone or isinstance(error, ConnectionError | ReplayTimeoutError))
        if is_refusal and self.flight.pending:  # with nothing to send, no later attempt would clear it
            self.fault = type(error) if isinstance(error, ReverbWriterError) else ReverbWriterError, str(error)
        self._is_closed = self._is_closed or isinstance(error, ClosedError)
        if self.loss is None:
            self._counts["reconnects"] += 1
            _LOG.warning("%s: insert stream lost: %s The client connects again.", self.channel.address, error)
        self.loss = error
        self._counts["resent_items"] += self.flight.requeue()
        # New items must not wait for refused ones for ever. An expired token may be replaced, a missing table added.
        is_final = is_refusal and self._failures >= _REFUSALS and not isinstance(error, StructureError)
        if is_final and (num_refused := self.flight.drop_again()):
            self._counts["uncovered_items"] += num_refused
            _LOG.error("%s: refuses %d confirmed items that it has lost: %s", self.channel.address, num_refused, error)
        # The pause doubles with each failure in a row. It is random, so that clients do not all return at once.
        longest_s = min(_LAST_PAUSE_S, _FIRST_PAUSE_S * 2 ** min(self._failures, 16))
        self._retry_at = time.monotonic() + random.uniform(longest_s / 2, longest_s)  # noqa: S311  # no secret
        self._failures += 1

    # ------------------------------------------------------------------------------------------------ kept requests

    def _keep(self, requests: Iterable[InsertRequest]) -> None:
        """Keep requests that the server has confirmed as a whole."""
        saves, num_released = self.kept.saves, sum(map(self.kept.add, requests))
        if num_released and not self._has_released and saves is not None and saves.begun:
            self._has_released = True
            text = (
                "%s: more than `max_kept_bytes` = %d bytes of confirmed items are in no checkpoint. The oldest are "
                "lost if the server is killed now; `stats().uncovered_items` counts them. Raise `max_kept_bytes`, or "
                "lower `checkpoints.every_s` of the server."
            )
            _LOG.warning(text, self.channel.address, self.kept.max_bytes)

    def _ask_saves(self) -> float:
        """Ask which kept requests a checkpoint has, if it is time; return as `proceed`."""
        if not self.kept or self._ask_saves_at == math.inf:
            return math.inf
        left_s = self._ask_saves_at - time.monotonic()
        if left_s > 0:
            return left_s
        self._ask_saves_at = math.inf
        self.kept.asked()
        self._question(_PROBE_TIMEOUT_S, functools.partial(self._on_saves, self._attempt))
        return math.inf

    def _on_saves(self, attempt: int, info: ServerInfo | Exception) -> None:
        self._ask_saves_at = time.monotonic() + _SAVES_EVERY_S
        pipe = self._pipe
        if attempt != self._attempt or pipe is None or not isinstance(info, ServerInfo):
            return
        if info.state_id == self._state_id:
            self.kept.answered(info)
        else:  # it was restarted between the question for its tables and the stream
            self._pipe = None
            pipe.close()
            self._lost(ServerUnavailableError(f"the server at {self.channel.address} was restarted."))

    # --------------------------------------------------------------------------------------------- why nothing moves

    def _forget_answers(self) -> None:
        self._answers: list[ServerInfo] = []  # the first and the newest
        self._has_asked, self._refusal = False, ""

    def ask(self, *, is_first: bool = False) -> None:
        """Ask the server for the state of its tables; the first question of a wait discards earlier answers."""
        if is_first:
            self._forget_answers()
        self._has_asked = True
        self._question(_QUESTION_TIMEOUT_S, self._on_reply)

    def _on_reply(self, reply: ServerInfo | Exception) -> None:
        if isinstance(reply, ServerInfo):
            self._answers = [*self._answers[:1], reply]
        elif not isinstance(reply, ReplayTimeoutError | ConnectionError):
            self._refusal = str(reply)

    @property
    def lacks_table(self) -> bool:
        """Whether the server refuses items because it has no such table."""
        return self.fault is not None and issubclass(self.fault[0], StructureError)

    def has_tables(self, tables: Iterable[str]) -> bool:
        """Return whether the newest answer to a question names these tables."""
        return bool(self._answers) and self._answers[-1].tables.keys() >= set(tables)

    def limiter_text(self) -> str | None:
        """Return the rate limiter that blocks in the newest answer, with advice; None if no limiter blocks."""
        return explain_limiter(self._answers[-1], self.flight.tables()) if self._answers else None

    def limited_at(self) -> float:
        """Return `time.monotonic()` of the newest answer if a rate limiter blocks in it; else negative infinity."""
        return self._answers[-1].at if self.loss is None and self.limiter_text() else -math.inf

    def others_progress(self) -> bool:
        """Return whether other streams' inserts progressed between two answers while a rate limiter blocks ours."""
        answers = self._answers
        return len(answers) > 1 and inserts_progress(answers[0], answers[1], self.flight.tables())

    def explain(self) -> str:
        """Return the cause of missing confirmations, as far as it is known."""
        address, silence_s = self.channel.address, time.monotonic() - self.channel.last_response_at
        if self.loss is not None:
            return self.channel.explain_loss(self.loss)
        if not self._has_asked:
            return f"Its in-flight window is full; last heard of the server at {address} {silence_s:.1f} s ago."
        if not self._answers and self._refusal:
            return f"The server at {address} does not say what its tables do: {self._refusal}"
        if not self._answers:
            return f"The server at {address} holds the connection but does not answer; silent for {silence_s:.1f} s."
        return explain_inserts(self._answers[0], self._answers[-1], self.flight.tables()) or (
            f"The server at {address} is slow: last confirmation {time.monotonic() - self.flight.progress_at:.1f} s "
            "ago. Raise `timeout_s`."
        )
