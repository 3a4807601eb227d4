"""Calls of gRPC's Python code, made where no interrupt can meet them.

`KeyboardInterrupt`, and whatever else a handler of a signal raises, comes at any moment of the main thread: also in
`threading.Condition.__enter__`, when the lock has just been taken and no one is there yet to give it back. A call or a
channel of gRPC whose lock was lost so hangs for ever, with all who use it. So the main thread has a thread made for
each call, and waits for it at a queue, which needs no lock of Python's. Other threads get no signals.
"""

from __future__ import annotations

import _thread
import queue
import sys
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import grpc

from reverb_writer.errors import ReplayTimeoutError
from reverb_writer.flags import Flag

__all__ = ["SHORT_S", "CallError", "Question", "uninterrupted"]

SHORT_S = 5.0
"""How long to wait for what gRPC does without waiting for a server, and for its word after a deadline of its own."""

_T = TypeVar("_T")


class CallError(grpc.RpcError):
    """What ended a call, without the call and its lock."""

    def __init__(self, code: grpc.StatusCode, details: str | None) -> None:
        """Take gRPC's status and text."""
        super().__init__(code, details)
        self._code, self._details = code, details

    def code(self) -> grpc.StatusCode:
        """Return the status."""
        return self._code

    def details(self) -> str | None:
        """Return the text."""
        return self._details


def uninterrupted(work: Callable[[], _T], timeout_s: float | None = SHORT_S) -> _T:
    """Do something and return its result; in the main thread, have another thread do it.

    Who is interrupted meanwhile does not get the result: the work goes on to its end.

    Args:
        work: to be done.
        timeout_s: how long to wait for the thread; None for ever.

    Raises:
        ReplayTimeoutError: it does not come to an end in time.
        CallError: in place of gRPC's own error.
    """
    # When the interpreter ends, the main thread is the only one that runs. `current_thread` would remember for good
    # each thread that was not started by `threading`.
    if threading.get_ident() != threading.main_thread().ident or sys.is_finalizing():
        return _plain(work)
    outcome: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            outcome.put((_plain(work), None))
        except BaseException as error:  # noqa: BLE001  # raised in the thread that waits
            outcome.put((None, error))

    try:
        _thread.start_new_thread(run, ())  # `threading.Thread.start` waits with a lock of Python's
    except RuntimeError:  # the interpreter ends
        return _plain(work)
    try:
        value, error = outcome.get(timeout=None if timeout_s is None else min(timeout_s, threading.TIMEOUT_MAX))
    except queue.Empty:
        raise ReplayTimeoutError(f"gRPC did not answer within {timeout_s:.1f} s; it should have by itself.") from None
    if error is not None:
        raise error
    return value  # type: ignore[no-any-return]


class Question:
    """A unary call under way. What has become of it is read in gRPC's thread."""

    def __init__(self, future: Any, timeout_s: float) -> None:
        """Take a `grpc.Future` that ends after `timeout_s` seconds by itself."""
        self._future, self._timeout_s = future, timeout_s
        self._ended = Flag()
        self._outcome: tuple[grpc.StatusCode, str | None, bytes | None] | None = None
        future.add_done_callback(self._note)

    def done(self) -> bool:
        """Return whether it has ended."""
        return self._outcome is not None

    def code(self) -> grpc.StatusCode | None:
        """Return gRPC's status; None as long as it is under way."""
        return None if self._outcome is None else self._outcome[0]

    def details(self) -> str | None:
        """Return gRPC's text."""
        return None if self._outcome is None else self._outcome[1]

    def result(self) -> bytes:
        """Wait for the answer.

        Raises:
            CallError: there is none.
        """
        self._ended.wait(self._timeout_s + SHORT_S)
        late = grpc.StatusCode.DEADLINE_EXCEEDED, "gRPC did not end the call in time", None
        code, details, reply = self._outcome or late
        if reply is None:
            raise CallError(code, details)
        return reply

    def cancel(self) -> None:
        """End it. Idempotent."""
        if self._outcome is None:
            uninterrupted(self._future.cancel)

    def _note(self, future: Any) -> None:
        code = future.code()
        self._outcome = code, future.details(), future.result() if code is grpc.StatusCode.OK else None
        self._ended.set()


def _plain(work: Callable[[], _T]) -> _T:
    try:
        return work()
    except CallError:
        raise
    except grpc.RpcError as error:
        raise CallError(error.code(), error.details()) from None
