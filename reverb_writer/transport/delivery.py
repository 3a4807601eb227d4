"""Delivery of items to one server until it has confirmed them: connect, send, and send again after a loss.

    InFlight.add() -> proceed() -> Pipe -> server
    answers, messages, the end of a stream -> post() -> a box in the owner's thread -> proceed()

A `Delivery` has no thread and no lock. It is a coroutine, which its owner resumes by `proceed`, always in one thread.
Each `yield` waits; its value is the number of seconds after which more work is due, if nothing comes before. The owner
also runs the functions that other threads give to `post`. After a loss of the connection, all unconfirmed items are
sent again with the same keys; after a restart of the server, `kept_requests` names confirmed items that are sent before
them. The server keeps an item with a known key and only sets the new priority, so no item exists twice.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import logging
import math
import random
import time
from collections.abc import Callable, Generator, Iterable
from typing import Any, TypeVar

import numpy as np

from reverb_writer.errors import (
    ClosedError,
    ReplayTimeoutError,
    ReverbWriterError,
    ServerUnavailableError,
    StructureError,
)
from reverb_writer.protocol import messages
from reverb_writer.protocol.responses import parse
from reverb_writer.tables.table_info import ServerInfo, check_tables_exist
from reverb_writer.transport.channel import Channel
from reverb_writer.transport.in_flight import InFlight, InsertRequest
from reverb_writer.transport.kept_requests import KeptRequests
from reverb_writer.transport.pipes import open_pipe

_LOG = logging.getLogger(__package__)

Post = Callable[[Callable[[], None]], None]

_MESSAGE_BYTES = 1 << 20
_PROBE_TIMEOUT_S = 5.0
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.05, 2.0
_SILENCE_S = 10.0  # silence after which the connection is examined, if a confirmation is due
_REFUSALS = 5  # failures in a row after which refused items that were confirmed before are given up
_SAVES_EVERY_S = 1.0  # interval of questions for the kept requests that a checkpoint has

_Result = TypeVar("_Result")
_Waits = Generator[float, None, _Result]
"""A part of the coroutine, which returns a result."""


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
        self.loss: ReverbWriterError | None = None
        self._post, self._counts = post, counts
        self._failures = 0  # losses since the last confirmation
        self._state_id: int | None = None
        self._has_released = False
        self._work = self._deliver(info)

    @property
    def lacks_table(self) -> bool:
        """Whether the server refuses items because it has no such table."""
        return self.fault is not None and issubclass(self.fault[0], StructureError)

    def proceed(self) -> float:
        """Do all due work, without a wait; return the seconds until more is due, infinity for none."""
        return next(self._work, math.inf)

    def take_over(self, other: Delivery) -> None:
        """Keep the confirmed requests that another delivery to the same server has kept until now."""
        self.kept, other.kept = other.kept, self.kept
        self._state_id = other._state_id

    def close(self) -> int:
        """End the connection, give up pending items and return their number; release kept items. Idempotent."""
        self._work.close()
        if num_uncovered := self.flight.again + self.kept.close():
            self._counts["uncovered_items"] += num_uncovered
            if self.kept.saves is not None:
                text = "%s: the observer ends with %d confirmed items that are in no checkpoint of the server yet."
                _LOG.info(text, self.channel.address, num_uncovered)
        return self.flight.drop_all()

    # ------------------------------------------------------------------------------------------------- the coroutine

    def _deliver(self, info: ServerInfo | None) -> _Waits[None]:
        """Connect when there are items, carry them until the connection is lost, pause, and begin again."""
        while True:
            while not (self.flight.has_queued or self.kept):
                yield math.inf
            try:
                yield from self._check_server(info)
                yield from self._carry()
            except ReverbWriterError as error:
                self._lose(error)
                if isinstance(error, ClosedError):
                    return
            info = None
            # The pause doubles with each failure in a row. It is random, so that clients do not all return at once.
            longest_s = min(_LAST_PAUSE_S, _FIRST_PAUSE_S * 2 ** min(self._failures, 16))
            self._failures += 1
            yield from _pause(random.uniform(longest_s / 2, longest_s))  # noqa: S311  # no secret

    def _check_server(self, info: ServerInfo | None) -> _Waits[None]:
        """Have confirmed items sent again if the server was restarted; check that it has the tables."""
        answer = (yield from self._ask_tables()) if info is None else info
        if isinstance(answer, ReplayTimeoutError):
            self.channel.examine()
        if isinstance(answer, ReverbWriterError):
            raise answer
        if self._state_id is None:
            self.kept.seen(answer)
        elif self._state_id != answer.state_id:
            self._recover(answer)
        self._state_id = answer.state_id
        check_tables_exist(self.flight.tables(), answer, self.channel.address)

    def _carry(self) -> _Waits[None]:
        """Send requests and take confirmations over one stream, until it is lost."""
        events: collections.deque[bytes | ReverbWriterError] = collections.deque()
        with contextlib.closing(open_pipe(self.channel, messages.INSERT_STREAM, self._posting(events))) as pipe:
            self.loss = self.fault = None
            saves = self._follow_saves()
            while True:
                while events:
                    self._take(events.popleft())
                while self.flight.has_queued:
                    pipe.send(self.flight.take_message(_MESSAGE_BYTES))
                yield min(self._examine_silence(), next(saves))

    def _follow_saves(self) -> _Waits[None]:
        """Ask from time to time which kept requests a checkpoint has."""
        while True:
            while not self.kept:
                yield math.inf
            self.kept.asked()
            answer = yield from self._ask_tables()
            if isinstance(answer, ServerInfo):
                if answer.state_id != self._state_id:  # between the question for its tables and the stream
                    raise ServerUnavailableError(f"the server at {self.channel.address} was restarted.")
                self.kept.answered(answer)
            yield from _pause(_SAVES_EVERY_S)

    def _ask_tables(self) -> _Waits[ServerInfo | ReverbWriterError]:
        answers: collections.deque[ServerInfo | ReverbWriterError] = collections.deque()
        self.channel.start_info(_PROBE_TIMEOUT_S, self._posting(answers))
        while not answers:
            yield math.inf
        return answers.pop()

    # -------------------------------------------------------------------------------------------- what it does at once

    def _posting(self, box: collections.deque[Any]) -> Callable[[Any], None]:
        """Return a function for any thread: the owner's thread puts what it gets into `box`, and proceeds."""

        def arrive(thing: Any) -> None:
            box.append(thing)
            self.proceed()

        return lambda thing: self._post(functools.partial(arrive, thing))

    def _recover(self, info: ServerInfo) -> None:
        """Queue the items that a restarted server lacks."""
        self._counts["server_restarts"] += 1
        if self.kept.max_bytes:
            self.flight.send_again(self.kept.restarted(info))
            self._counts["recovered_items"] += self.flight.again
        text = (
            "%s: the server was restarted; its tables are as in the checkpoint that it has restored, or empty. "
            "%d unconfirmed and %d confirmed items are sent again."
        )
        _LOG.warning(text, self.channel.address, self.flight.pending, self.flight.again)

    def _take(self, event: bytes | ReverbWriterError) -> None:
        """Take the keys of confirmed items, or raise the error that has ended the stream."""
        if isinstance(event, StructureError):
            # A table that the stream did not find may exist later: the next question for the tables decides.
            raise ServerUnavailableError(str(event))
        if isinstance(event, ReverbWriterError):
            raise event
        keys = parse("InsertStreamResponse", messages.InsertStreamResponse, event).keys
        self._failures = 0
        self._counts["acknowledged_items"] += self.flight.acknowledge(np.fromiter(keys, np.uint64, len(keys)))
        self._keep(self.flight.take_finished())

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

    def _examine_silence(self) -> float:
        """Have a silent connection examined if a confirmation is due; return as `proceed`."""
        if not self.flight.has_sent:
            return math.inf
        silent_s = time.monotonic() - max(self.flight.progress_at, self.channel.last_response_at)
        if silent_s < _SILENCE_S:
            return _SILENCE_S - silent_s
        self.channel.examine()
        return _SILENCE_S / 10

    def _lose(self, error: ReverbWriterError) -> None:
        """Note the error that has ended an attempt to connect or a stream, and queue what was sent."""
        is_refusal = not isinstance(error, ConnectionError | ReplayTimeoutError)
        if is_refusal and self.flight.pending:  # with nothing to send, no later attempt would clear it
            self.fault = type(error), str(error)
        if self.loss is None and not isinstance(error, ClosedError):  # after a close, it does not connect again
            self._counts["reconnects"] += 1
            _LOG.warning("%s: insert stream lost: %s The client connects again.", self.channel.address, error)
        self.loss = error.with_traceback(None)  # its frames refer to the stream
        self._counts["resent_items"] += self.flight.requeue()
        # New items must not wait for refused ones for ever. An expired token may be replaced, a missing table added.
        is_final = is_refusal and self._failures >= _REFUSALS and not isinstance(error, StructureError)
        if is_final and (num_refused := self.flight.drop_again()):
            self._counts["uncovered_items"] += num_refused
            _LOG.error("%s: refuses %d confirmed items that it has lost: %s", self.channel.address, num_refused, error)


def _pause(seconds: float) -> _Waits[None]:
    end_at = time.monotonic() + seconds
    while (left_s := end_at - time.monotonic()) > 0:
        yield left_s
