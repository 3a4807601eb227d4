"""One connection of gRPC: the calls that it carries, when the last response came, and whether it is dead.

gRPC notices only after minutes that a connection is dead. A late call does not prove it: the server may be paused or
busy. So a connection is given up only after these observations, and only its own calls end then:

    no response -> a probe over it is not answered -> one over a new connection is, one over the old one is not
"""

from __future__ import annotations

import json
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Final

import grpc

from reverb_writer.background import SHORT_S, Flag, uninterrupted
from reverb_writer.errors import ClosedError, ReplayTimeoutError, ReverbWriterError
from reverb_writer.protocol import messages
from reverb_writer.transport import process_hooks
from reverb_writer.transport.grpc_errors import NO_ANSWER, describe_error, translate_error

MAX_REPLY_BYTES: Final = 8 << 20
"""Bound on every message of a server but those with samples. Tables of some hundred leaves take far less than 1 MiB."""

_ANSWER_WITHIN_S = 2.0
_AGAIN_WITHIN_S = 3.0
_NOT_BEFORE_S = 10.0  # from an examination without a finding to the next one
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.05, 2.0
_FOR_EVER_S = 1e9  # longer deadlines overflow in gRPC
_SERVICE = messages.SERVER_INFO.split("/")[1]

OPTIONS: list[tuple[str, Any]] = [
    # Reverb's own client sets no limits on steps and samples either: a window of frames is larger than 4 MB.
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    (
        "grpc.service_config",
        json.dumps(
            {
                "methodConfig": [
                    {"name": [{"service": _SERVICE}], "maxResponseMessageBytes": MAX_REPLY_BYTES},
                    {"name": [{"service": _SERVICE, "method": messages.SAMPLE_STREAM.split("/")[2]}]},
                ]
            }
        ),
    ),
    # A restarted server is found within seconds; gRPC would wait up to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # A vanished host (no FIN, no RST) is noticed. Reverb's server counts pings that come more often than every five
    # minutes on a silent stream as abuse, so streams that may be silent for long check by `ServerInfo` instead.
    ("grpc.keepalive_time_ms", 300_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    # Two clients in one process are two connections: one that is blocked does not block the other.
    ("grpc.use_local_subchannel_pool", 1),
]


class Reply:
    """The reply to a unary call, to come. Thread-safe."""

    def __init__(self, future: Any, address: str, timeout_s: float) -> None:
        """Take gRPC's future, which ends after `timeout_s` seconds by itself, and the server's address for errors."""
        self._future, self._address, self._timeout_s = future, address, timeout_s
        self._ended = Flag()
        self._outcome: bytes | ReverbWriterError | None = None
        future.add_done_callback(self._note)  # what has become of it is read in gRPC's thread, under gRPC's lock

    def done(self) -> bool:
        """Return whether the reply has come, or never will."""
        return self._outcome is not None

    def cancel(self) -> None:
        """End the call; `result` raises ReplayTimeoutError. Idempotent."""
        if self._outcome is None:
            uninterrupted(self._future.cancel)

    def result(self) -> bytes:
        """Wait for the reply."""
        self._ended.wait(self._timeout_s + SHORT_S)
        outcome = self._outcome
        if outcome is None:
            raise ReplayTimeoutError(f"the server at {self._address}: gRPC did not end a call at its deadline.")
        if isinstance(outcome, ReverbWriterError):
            raise outcome
        return outcome

    def _note(self, future: Any) -> None:
        try:
            self._outcome = future.result()
        except grpc.FutureCancelledError:  # also if the connection was given up
            text = f"the server at {self._address} did not answer before the call ended."
            self._outcome = ReplayTimeoutError(text)
        except grpc.RpcError as error:
            self._outcome = translate_error(error, self._address)
        self._ended.set()


class Call:
    """A stream that is under way: iterate for responses."""

    def __init__(self, connection: Connection, call: Any, timeout_s: float | None) -> None:
        """Take a call of gRPC, the connection that carries it, and the seconds after which it ends by itself."""
        self.connection = connection  # what carries it
        # what ended it, in one line: gRPC's status and text, or why the connection was given up. None until then
        self.end_reason: str | None = None
        self._call = call
        self._ends_at = None if timeout_s is None else time.monotonic() + timeout_s + SHORT_S

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        """Wait for the next response; raises what `translate_error` makes of the error that has ended the stream."""
        left_s = None if self._ends_at is None else max(self._ends_at - time.monotonic(), 0.0)
        message = uninterrupted(self._next, left_s)
        self.connection.last_response_at = time.monotonic()
        return message

    def _next(self) -> bytes:
        try:
            message: bytes = next(self._call)
        except grpc.RpcError as error:
            self.end_reason = self.connection.fault or describe_error(error)
            address = self.connection.address
            raise translate_error(error, address, is_stream=True, reason=self.end_reason) from error
        return message

    def cancel(self) -> None:
        """End the stream. Idempotent."""
        uninterrupted(self._call.cancel)


class Connection:
    """One connection and its calls. Thread-safe. A call over a closed connection raises ClosedError."""

    def __init__(
        self, address: str, connect: Callable[[], grpc.Channel], metadata: tuple[tuple[str, str], ...] | None
    ) -> None:
        """Prepare the connection, made at the first call; `metadata` goes with each."""
        self.address = address  # of the server, for errors
        # `time.monotonic()` when something came over it last; at first, when it was made
        self.last_response_at = time.monotonic()
        self.fault: str | None = None  # why it was given up; None as long as it was not
        self._connect, self._metadata = connect, metadata
        self._channel: Any = connect()
        self._calls: weakref.WeakSet[Any] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._next_examination_at = 0.0

    def ask(self, method: str, request: bytes, timeout_s: float, *, wait_for_ready: bool = False) -> Any:
        """Start a unary call and return its `grpc.Future`."""
        future = self._start(
            lambda: self._channel.unary_unary(method).future(
                request, timeout=_seconds(timeout_s), metadata=self._metadata, wait_for_ready=wait_for_ready
            )
        )
        future.add_done_callback(self._note)
        return future

    def stream(self, method: str, requests: Iterator[bytes], timeout_s: float | None) -> Call:
        """Open a bidirectional stream of bytes."""
        call = self._start(
            lambda: self._channel.stream_stream(method)(requests, timeout=_seconds(timeout_s), metadata=self._metadata)
        )
        call.add_done_callback(lambda _: None)  # keeps it until gRPC's thread is done with it: to delete takes its lock
        return Call(self, call, _seconds(timeout_s))

    def examine(self) -> None:
        """Find out in the background whether the connection is dead, and end its calls if it is; never waits.

        A server that is paused or busy answers over no connection: nothing is given up for that.
        """
        now = time.monotonic()
        with self._lock:
            if self.fault is not None or now < self._next_examination_at:
                return
            self._next_examination_at = now + _NOT_BEFORE_S
        uninterrupted(
            lambda: self.ask(messages.SERVER_INFO, b"", _ANSWER_WITHIN_S).add_done_callback(
                lambda _: self._suspect(now)
            )
        )

    def give_up(self, fault: str) -> None:
        """Have its calls end, and no further ones begin: `fault` says why."""
        with self._lock:
            self.fault = fault
            calls = list(self._calls)
        for call in calls:
            call.cancel()

    def close(self) -> None:
        """Close the connection; its calls end with an error. Idempotent."""
        self._channel.close()

    def _start(self, start: Callable[[], Any]) -> Any:
        try:
            call = start()
        except ValueError as error:  # gRPC's word for a closed channel
            raise ClosedError("the connection was closed by another thread. Make a new client.") from error
        process_hooks.watch_call(call)
        with self._lock:
            self._calls.add(call)
        if self.fault is not None:
            call.cancel()
        return call

    def _note(self, future: Any) -> None:
        if future.code() not in NO_ANSWER:
            self.last_response_at = time.monotonic()

    def _suspect(self, since: float) -> None:
        """Go on if nothing has been heard: ask once more, and over a new connection, too."""
        if self.last_response_at >= since:
            self._next_examination_at = 0.0
            return
        try:
            again = self.ask(messages.SERVER_INFO, b"", _AGAIN_WITHIN_S)
        except ClosedError:
            return
        other = Connection(self.address, self._connect, self._metadata)
        # What is answered at the last moment over the new connection could have been answered here a moment later.
        elsewhere = other.ask(messages.SERVER_INFO, b"", _AGAIN_WITHIN_S * 2 / 3)

        def judge(question: Any) -> None:
            answered = elsewhere.done() and elsewhere.code() not in NO_ANSWER
            other.close()
            if answered and self.last_response_at < since and question.code() is not grpc.StatusCode.CANCELLED:
                silence_s = time.monotonic() - since
                self.give_up(
                    f"nothing came over the connection for {silence_s:.0f} s, while the server answers over others"
                )

        again.add_done_callback(judge)


def backoff_s(failures: int) -> float:
    """Return a random time that doubles with each failure in a row, seconds, so that clients come back one by one."""
    longest = min(_LAST_PAUSE_S, _FIRST_PAUSE_S * 2 ** min(failures, 16))
    return random.uniform(longest / 2, longest)  # noqa: S311  # jitter, no secret


def _seconds(timeout_s: float | None) -> float | None:
    return None if timeout_s is None or timeout_s > _FOR_EVER_S else timeout_s
