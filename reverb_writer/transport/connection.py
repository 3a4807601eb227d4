"""One connection of gRPC: the calls that it carries, when it was heard of last, and whether it is dead.

gRPC notices after minutes that nothing comes over a connection any more. Nor does a call that is late prove it: the
server may be paused or busy. So a connection is given up only for what was seen, and only its own calls end then:

    nothing heard -> a question over it is not answered -> one over a new connection is, one over the old one is not
"""

from __future__ import annotations

import json
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Final

import grpc

from reverb_writer.errors import ClosedError
from reverb_writer.protocol import messages
from reverb_writer.transport import process_hooks
from reverb_writer.transport.uninterrupted import SHORT_S, uninterrupted

__all__ = ["MAX_REPLY_BYTES", "OPTIONS", "UNHEARD", "Call", "Connection", "is_refusal", "is_silence"]

MAX_REPLY_BYTES: Final = 8 << 20
"""Bound on every message of a server but those with samples. Tables of some hundred leaves take far less than 1 MiB."""

_ANSWER_WITHIN_S = 2.0
_AGAIN_WITHIN_S = 3.0
_NOT_BEFORE_S = 10.0  # from an examination that found nothing to the next one
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

UNHEARD = {grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE}
"""What a question ends with to which nobody has answered."""


class Call:
    """A stream that is under way: iterate for responses."""

    def __init__(self, connection: Connection, call: Any, timeout_s: float | None) -> None:
        """Take a call of gRPC, the connection that carries it, and the seconds after which it ends by itself."""
        self.connection = connection
        self._call = call
        self._ends_at = None if timeout_s is None else time.monotonic() + timeout_s + SHORT_S

    def __iter__(self) -> Iterator[bytes]:
        """Return the call itself."""
        return self

    def __next__(self) -> bytes:
        """Wait for the next response; raises `grpc.RpcError` when the stream has ended by an error."""
        left_s = None if self._ends_at is None else max(self._ends_at - time.monotonic(), 0.0)
        message: bytes = uninterrupted(lambda: next(self._call), left_s)
        self.connection.heard_at = time.monotonic()
        return message

    def cancel(self) -> None:
        """End the stream. Idempotent."""
        uninterrupted(self._call.cancel)

    def why_ended(self, error: grpc.RpcError) -> str:
        """Say in one line what ended the stream: gRPC's status and text, or that the connection was given up."""
        return self.connection.fault or f"{error.code().name}: {error.details()}"


class Connection:
    """One connection and its calls. Thread-safe.

    Attributes:
        heard_at: `time.monotonic()` when something came over it last; at first, when it was made.
        fault: why it was given up; None as long as it was not.
    """

    def __init__(self, connect: Callable[[], grpc.Channel], metadata: tuple[tuple[str, str], ...] | None) -> None:
        """Prepare the connection, made at the first call; `metadata` goes with each."""
        self.heard_at = time.monotonic()
        self.fault: str | None = None
        self._connect, self._metadata = connect, metadata
        self._channel: Any = connect()
        self._calls: weakref.WeakSet[Any] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._next_examination_at = 0.0

    def ask(self, method: str, request: bytes, timeout_s: float, *, wait_for_ready: bool = False) -> Any:
        """Start a unary call and return its `grpc.Future`.

        Raises:
            ClosedError: the connection is closed.
        """
        future = self._start(
            lambda: self._channel.unary_unary(method).future(
                request, timeout=_seconds(timeout_s), metadata=self._metadata, wait_for_ready=wait_for_ready
            )
        )
        future.add_done_callback(self._note)
        return future

    def stream(self, method: str, requests: Iterator[bytes], timeout_s: float | None) -> Call:
        """Open a bidirectional stream of bytes.

        Raises:
            ClosedError: the connection is closed.
        """
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
        self.ask(messages.SERVER_INFO, b"", _ANSWER_WITHIN_S).add_done_callback(lambda _: self._suspect(now))

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
        if future.code() not in UNHEARD:
            self.heard_at = time.monotonic()

    def _suspect(self, since: float) -> None:
        """Go on if nothing has been heard: ask once more, and over a new connection, too."""
        if self.heard_at >= since:
            self._next_examination_at = 0.0
            return
        try:
            again = self.ask(messages.SERVER_INFO, b"", _AGAIN_WITHIN_S)
        except ClosedError:
            return
        other = Connection(self._connect, self._metadata)
        # What is answered at the last moment over the new connection could have been answered here a moment later.
        elsewhere = other.ask(messages.SERVER_INFO, b"", _AGAIN_WITHIN_S * 2 / 3)

        def judge(question: Any) -> None:
            answered = elsewhere.done() and elsewhere.code() not in UNHEARD
            other.close()
            if answered and self.heard_at < since and question.code() is not grpc.StatusCode.CANCELLED:
                self._give_up(time.monotonic() - since)

        again.add_done_callback(judge)

    def _give_up(self, silence_s: float) -> None:
        with self._lock:
            self.fault = f"nothing came over the connection for {silence_s:.0f} s, while the server answers over others"
            calls = list(self._calls)
        for call in calls:
            call.cancel()


def is_silence(reason: str) -> bool:
    """Return whether gRPC's text for a lost or failed connection says that the other side is there but silent.

    A process that is stopped or overloaded does not take the connections that the kernel has made for it. A host has
    several addresses; at one of them it may be refused all the same.
    """
    text = reason.lower()
    return any(word in text for word in ("timed out", "timeout", "deadline exceeded")) and "dns" not in text


def is_refusal(reason: str) -> bool:
    """Return whether gRPC's text says that nothing listens at the address, and does not speak of silence, too."""
    text = reason.lower()
    return ("refused" in text or "no such file" in text) and not is_silence(reason)


def _seconds(timeout_s: float | None) -> float | None:
    return None if timeout_s is None or timeout_s > _FOR_EVER_S else timeout_s
