"""Work in other threads for the main thread, which an interrupt may stop at any moment.

`KeyboardInterrupt`, or another exception of a signal handler, may be raised anywhere in the main thread, even in
`threading.Condition.__enter__`, after the lock was taken and before any code that releases it. Every thread that needs
the lock later hangs for ever. Other threads get no signals. So work that takes Python's locks, such as starting a
thread, runs outside the main thread:

    in_background(work) -> a new thread -> Outcome, which has no lock

Calls to a server do not need this, because they run on the loop, see `transport/loop.py`.
"""

from __future__ import annotations

import _thread
import collections
import contextlib
import logging
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from reverb_writer.errors import ClosedError

_T = TypeVar("_T")

_LOG = logging.getLogger(__package__)

LOG_EVERY_S = 10.0
"""Interval of the log's lines about a call that waits, in seconds."""


class Flag:
    """A `threading.Event` without a shared lock: an interrupt of the main thread in a method does no harm.

    Each wait has a lock of its own, which `set` releases. Before CPython 3.13, `queue.SimpleQueue.get` loses its
    time-out if a signal arrives at that moment, and waits for ever; `acquire` of a lock does not.
    """

    def __init__(self) -> None:
        """Start unset."""
        self._is_set = False
        self._waiters: collections.deque[_thread.LockType] = collections.deque()  # held

    def is_set(self) -> bool:
        """Return whether the flag is set."""
        return self._is_set

    def set(self) -> None:
        """Set the flag, and wake all waiting threads."""
        self._is_set = True
        for waiter in self._waiters.copy():
            with contextlib.suppress(RuntimeError):  # another thread has released it
                waiter.release()

    def clear(self) -> None:
        """Unset the flag."""
        self._is_set = False

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait at most `timeout_s` seconds, None for ever, until the flag is set; return whether it is."""
        if self._is_set:
            return True
        waiter = _thread.allocate_lock()
        waiter.acquire()
        self._waiters.append(waiter)
        try:
            if self._is_set:
                return True
            is_released = waiter.acquire(
                timeout=-1 if timeout_s is None else min(max(timeout_s, 0.0), threading.TIMEOUT_MAX)
            )
        finally:
            self._waiters.remove(waiter)
        return is_released or self._is_set


class Inbox(Generic[_T]):
    """A `queue.SimpleQueue` that one thread reads, and that keeps its time-out although signals arrive, as a `Flag`."""

    def __init__(self) -> None:
        """Start empty."""
        self._things: collections.deque[_T] = collections.deque()
        self._has_come = Flag()

    def empty(self) -> bool:
        """Return whether there is nothing to get."""
        return not self._things

    def put(self, thing: _T) -> None:
        """Add a thing at the end; never waits."""
        self._things.append(thing)
        self._has_come.set()

    def get(self, timeout_s: float) -> _T:
        """Wait at most `timeout_s` seconds for the first thing, and return it; raise `queue.Empty` if none comes."""
        end_at = time.monotonic() + timeout_s
        while not self._things:
            self._has_come.clear()
            if not self._things and not self._has_come.wait(end_at - time.monotonic()):
                raise queue.Empty
        return self._things.popleft()


class Outcome(Flag, Generic[_T]):
    """The result of work in another thread; set at the end of the work. Thread-safe."""

    def __init__(self) -> None:
        """Begin without a result."""
        super().__init__()
        self._value: Any = None
        self._error: Any = None

    def done(self) -> bool:
        """Return whether the work has ended."""
        return self.is_set()

    def result(self) -> _T:
        """Wait for the end of the work; return its result, or raise its error."""
        self.wait()
        if self._error is None:
            return self._value  # type: ignore[no-any-return]
        try:
            raise self._error
        finally:
            del self  # the error refers to this frame

    def settle(self, work: Callable[[], _T]) -> None:
        """Do the work, and store its result or error."""
        try:
            self._value = work()
        except BaseException as error:  # noqa: BLE001  # `result` raises it
            self._error = error
        self.set()


def may_be_interrupted() -> bool:
    """Return whether this is the main thread and others can do its work: none runs while the interpreter ends."""
    # `current_thread` would permanently record each thread that `threading` did not start.
    return threading.get_ident() == threading.main_thread().ident and not sys.is_finalizing()


def in_background(work: Callable[[], _T], *, or_here: bool = True) -> Outcome[_T]:
    """Do work in another thread; an interrupt does not stop the work.

    While the interpreter ends, do it here, or not at all if `or_here` is false.
    """
    outcome: Outcome[_T] = Outcome()
    try:
        if not sys.is_finalizing():
            _thread.start_new_thread(_begin, (lambda: outcome.settle(work),))  # `Thread.start` takes Python's locks
            return outcome
    except RuntimeError:
        pass
    if or_here:
        outcome.settle(work)
    return outcome


def start_thread(target: Callable[[], None], name: str) -> threading.Thread:
    """Start a daemon thread. After an interrupt of this call, the thread may still start."""
    thread = threading.Thread(target=target, name=name, daemon=True)
    in_background(thread.start).result()
    return thread


@contextlib.contextmanager
def logged(describe: Callable[[], str]) -> Iterator[None]:
    """Log the text of `describe` and the time spent in the block, every ten seconds."""
    # An interrupt may keep `done` from being set. Only this frame refers to `block`, so `block` ends with the frame.
    done, block = Flag(), Flag()
    is_alive = weakref.ref(block)
    start = time.monotonic()

    def run() -> None:
        while not done.wait(LOG_EVERY_S) and is_alive():
            _LOG.warning("%s (%.0f s so far).", describe(), time.monotonic() - start)

    try:
        in_background(run, or_here=False)  # it ends with the block
        yield
    finally:
        done.set()


class LateThread:
    """A daemon thread that begins at first use. Thread-safe."""

    def __init__(self, target: Callable[[], None], name: str) -> None:
        """Set the thread's function and name."""
        self._target, self._name = target, name
        self._has_begun = threading.Lock()  # the thread takes it, and never releases it

    @property
    def has_begun(self) -> bool:
        """Whether the thread runs or has run."""
        return self._has_begun.locked()

    def start(self) -> None:
        """Start the thread if it has not begun. After an interrupt, call again.

        Raises:
            ClosedError: the interpreter ends. CPython 3.12 starts no thread from the end of the main thread on.
        """
        if self.has_begun:
            return
        try:
            start_thread(self.run, self._name)
        except RuntimeError as error:
            if "at interpreter shutdown" not in str(error):  # such as a limit of the system
                raise
            raise ClosedError("the interpreter ends, and starts no thread any more.") from None

    def run(self) -> None:
        """Call the thread's function in this thread, unless it was called before."""
        if self._has_begun.acquire(blocking=False):
            self._target()


def _begin(work: Callable[[], None]) -> None:
    """Work in a thread that `threading` starts: it would permanently record another thread that runs gRPC."""
    try:
        threading.Thread(target=work, name="reverb-writer_calls", daemon=True).start()
    except RuntimeError:  # the interpreter ends
        work()
