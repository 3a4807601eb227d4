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

from reverb_writer.errors import ReplayTimeoutError

__all__ = ["SHORT_S", "uninterrupted"]

SHORT_S = 5.0
"""How long to wait for what gRPC does without waiting for a server, and for its word after a deadline of its own."""

_T = TypeVar("_T")


def uninterrupted(work: Callable[[], _T], timeout_s: float | None = SHORT_S) -> _T:
    """Do something and return its result; in the main thread, have another thread do it.

    Who is interrupted meanwhile does not get the result: the work goes on to its end.

    Args:
        work: to be done.
        timeout_s: how long to wait for the thread; None for ever.

    Raises:
        ReplayTimeoutError: it does not come to an end in time.
        BaseException: whatever the work raises.
    """
    # When the interpreter ends, the main thread is the only one that runs. `current_thread` would remember for good
    # each thread that was not started by `threading`.
    if threading.get_ident() != threading.main_thread().ident or sys.is_finalizing():
        return work()
    outcome: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            outcome.put((work(), None))
        except BaseException as error:  # noqa: BLE001  # raised in the thread that waits
            outcome.put((None, error))

    try:
        _thread.start_new_thread(run, ())  # `threading.Thread.start` waits with a lock of Python's
    except RuntimeError:  # the interpreter ends
        return work()
    try:
        value, error = outcome.get(timeout=None if timeout_s is None else min(timeout_s, threading.TIMEOUT_MAX))
    except queue.Empty:
        raise ReplayTimeoutError(f"gRPC did not answer within {timeout_s:.1f} s; it should have by itself.") from None
    if error is not None:
        try:
            raise error
        finally:
            del error  # it refers to this frame
    return value  # type: ignore[no-any-return]
