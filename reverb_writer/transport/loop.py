"""One asyncio loop for all calls and streams of this process, in a daemon thread that starts with the first call.

    any thread --submit, PendingCall--> the loop's thread: grpc.aio, timers, time-outs --> a queue or a function

The loop carries bytes: no function that it calls waits or takes long. Callers wait at a `Flag`, which Ctrl-C
cannot leave locked. When the interpreter ends, all calls end before any object of gRPC is deleted. A forked
child cannot use the loop.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

from reverb_writer.background import Flag, LateThread, Outcome
from reverb_writer.errors import ClosedError, ReplayTimeoutError, ReverbWriterError
from reverb_writer.transport import process_hooks

_T = TypeVar("_T")

_LOG = logging.getLogger(__package__)

THREAD_NAME: Final = "reverb-writer-loop"
_END_S = 2.0  # time for all calls to end when the interpreter ends
_SHORT_S = 30.0  # time for the loop to end a late call: milliseconds, except on an overloaded machine


class _Loop:
    """The loop and its thread."""

    def __init__(self) -> None:
        self.asyncio = asyncio.SelectorEventLoop()  # the user's policy may make other loops, such as uvloop's
        self.asyncio.set_exception_handler(_drop_spurious_errors)
        self.thread: int | None = None
        self.tasks: set[asyncio.Task[Any]] = set()
        self.closers: set[Callable[[str], object]] = set()  # bound methods of all that gRPC has open
        self.has_ended = Flag()
        self.start = LateThread(self._run, THREAD_NAME).start

    def _run(self) -> None:
        self.thread = threading.get_ident()
        self.asyncio.run_forever()
        self.has_ended.set()

    async def end(self) -> None:
        """End everything that is open, then the thread."""
        for close in [*self.closers]:
            close("the interpreter ends")
        others = self.tasks - {asyncio.current_task()}
        if others:
            await asyncio.wait(others, timeout=_END_S / 2)
        self.asyncio.stop()


_loops: dict[str, _Loop] = {}  # empty before the first call; then one loop
_is_ending = False


def submit(call: Callable[..., object], *arguments: Any) -> None:
    """Make the loop's thread call a function soon; never waits. Calls of one thread keep their order.

    Raises:
        ClosedError: the interpreter ends, or a parent process has used gRPC.
    """
    if _is_ending:
        raise ClosedError("the interpreter ends: nothing is sent any more.")
    process_hooks.claim()
    loop = _loops.get("")
    if loop is None:
        new = _Loop()
        loop = _loops.setdefault("", new)
        if loop is not new:  # another thread was first
            new.asyncio.close()
    if threading.get_ident() == loop.thread:
        loop.asyncio.call_soon(call, *arguments)
    else:
        loop.asyncio.call_soon_threadsafe(call, *arguments)
        loop.start()


def is_ending() -> bool:
    """Return whether the interpreter ends."""
    return _is_ending


def has_begun() -> bool:
    """Return whether the loop exists."""
    return bool(_loops)


def is_here() -> bool:
    """Return whether this is the loop's thread, which must not wait."""
    loop = _loops.get("")
    return loop is not None and loop.thread == threading.get_ident()


class PendingCall(Outcome[_T]):
    """A call on the loop. Thread-safe."""

    def __init__(
        self,
        work: Callable[[], Coroutine[Any, Any, _T]],
        address: str,
        timeout_s: float,
        deliver: Callable[[_T | ReverbWriterError], object] = lambda _: None,
    ) -> None:
        """Start the work on the loop; it returns the reply or raises ReverbWriterError. Raises as `submit`.

        The work itself ends after `timeout_s` seconds. The loop's thread calls `deliver` with the reply or the error;
        it must not wait.
        """
        super().__init__()
        self._address, self._timeout_s, self._deliver = address, timeout_s, deliver
        self._task: asyncio.Task[_T] | None = None
        submit(self._start, work)

    def cancel(self) -> None:
        """End the call; `result` raises ReplayTimeoutError. Idempotent; never waits."""
        if not self.done():
            with contextlib.suppress(ClosedError):
                submit(lambda: self._task and self._task.cancel())

    def result(self) -> _T:
        """Wait for the reply, or raise the call's error; an interrupt of the wait ends the call."""
        assert not is_here(), "the loop's thread would wait for itself"  # noqa: S101
        try:
            if not self.wait(self._timeout_s + _SHORT_S):
                raise ReplayTimeoutError(f"the server at {self._address}: gRPC did not end a call at its deadline.")
            return super().result()
        finally:
            self.cancel()

    def _start(self, work: Callable[[], Coroutine[Any, Any, _T]]) -> None:
        self._task = spawn(work())
        self._task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[_T]) -> None:
        def reply() -> _T:
            try:
                return task.result()
            except asyncio.CancelledError:
                text = f"the server at {self._address} did not answer before the call ended."
                raise ReplayTimeoutError(text) from None
            except ReverbWriterError:
                raise
            except Exception as error:  # the caller must get any error
                _LOG.exception("A call to %s has failed.", self._address)
                raise ReverbWriterError(f"the call to {self._address} failed: {error!r}.") from error

        self.settle(reply)
        if self._error is not None:
            # Its frames refer to this object, a circle, and to gRPC's call, which keeps the connection.
            self._error.__traceback__ = None
        self._deliver(self._value if self._error is None else self._error)


def spawn(work: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
    """Start a task. For the loop's thread only, as all functions below."""
    loop = _loops[""]
    task = loop.asyncio.create_task(work)
    loop.tasks.add(task)  # asyncio keeps no reference
    task.add_done_callback(loop.tasks.discard)
    return task


def close_at_end(close: Callable[[str], object]) -> None:
    """Call a method with the reason when the interpreter ends; keeps the method's object until `forget`."""
    _loops[""].closers.add(close)


def forget(close: Callable[[str], object]) -> None:
    """Undo `close_at_end`."""
    _loops[""].closers.discard(close)


def _drop_spurious_errors(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log errors of the loop, except that another loop has read gRPC's event first (grpc issue 25364)."""
    if not isinstance(context.get("exception"), BlockingIOError):
        loop.default_exception_handler(context)


@atexit.register
def _end() -> None:
    global _is_ending  # noqa: PLW0603  # once
    _is_ending = True
    loop = _loops.get("")
    if loop is None:
        return
    if not process_hooks.is_forked():
        loop.asyncio.call_soon_threadsafe(lambda: spawn(loop.end()))
        loop.has_ended.wait(_END_S)
    process_hooks.keep_for_ever(loop)


def _after_fork() -> None:
    for loop in _loops.values():
        process_hooks.keep_for_ever(loop)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
