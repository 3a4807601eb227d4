"""Work done by other threads, for a thread that an interrupt may meet at any moment.

`KeyboardInterrupt`, and whatever else a handler of a signal raises, comes at any moment of the main thread: also in
`threading.Condition.__enter__`, when the lock has just been taken and no code runs yet that releases it. All who need
that lock later hang for ever. Other threads get no signals. So work that takes locks of Python's, such as starting a
thread, is kept out of the main thread:

    in_background(work) -> a new thread -> Outcome, which has no lock

Calls to a server need none of this: they run on the loop, see `transport/loop.py`.
"""

from __future__ import annotations

import _thread
import collections
import queue
import sys
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

_T = TypeVar("_T")


class Flag:
    """As `threading.Event`, but without a lock: the main thread may be interrupted in any of its methods."""

    def __init__(self) -> None:
        """Start unset."""
        self._is_set = False
        self._waiters: collections.deque[queue.SimpleQueue[None]] = collections.deque()

    def is_set(self) -> bool:
        """Return whether it is set."""
        return self._is_set

    def set(self) -> None:
        """Set it, and wake all that wait."""
        self._is_set = True
        for waiter in self._waiters.copy():
            waiter.put(None)

    def clear(self) -> None:
        """Take it back."""
        self._is_set = False

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it is set, `timeout_s` seconds at most, None for ever; return whether it is."""
        if self._is_set:
            return True
        waiter: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._waiters.append(waiter)
        try:
            if self._is_set:
                return True
            waiter.get(timeout=None if timeout_s is None else min(max(timeout_s, 0.0), threading.TIMEOUT_MAX))
        except queue.Empty:
            return self._is_set
        finally:
            self._waiters.remove(waiter)
        return True


class Outcome(Flag, Generic[_T]):
    """The result of work in another thread; set when the work has ended. Thread-safe."""

    def __init__(self) -> None:
        """Begin without one."""
        super().__init__()
        self._value: Any = None
        self._error: Any = None

    def done(self) -> bool:
        """Return whether the work has come to its end."""
        return self.is_set()

    def result(self) -> _T:
        """Wait for the end of the work; return what it has returned, or raise what it has raised."""
        self.wait()
        if self._error is None:
            return self._value  # type: ignore[no-any-return]
        try:
            raise self._error
        finally:
            del self  # the error refers to this frame

    def settle(self, work: Callable[[], _T]) -> None:
        """Do the work and keep what comes of it."""
        try:
            self._value = work()
        except BaseException as error:  # noqa: BLE001  # raised in the thread that asks for the result
            self._error = error
        self.set()


def may_be_interrupted() -> bool:
    """Return whether this is the main thread, and others can do its work: at the end of the interpreter none runs."""
    # `current_thread` would remember for good each thread that was not started by `threading`.
    return threading.get_ident() == threading.main_thread().ident and not sys.is_finalizing()


def in_background(work: Callable[[], _T]) -> Outcome[_T]:
    """Have another thread do something, or do it here if the interpreter ends; an interrupt does not end the work."""
    outcome: Outcome[_T] = Outcome()
    try:
        if not sys.is_finalizing():
            _thread.start_new_thread(_begin, (lambda: outcome.settle(work),))  # `Thread.start` takes locks of Python's
            return outcome
    except RuntimeError:
        pass
    outcome.settle(work)
    return outcome


def start_thread(target: Callable[[], None], name: str) -> threading.Thread:
    """Start a daemon thread. If this is interrupted, the thread may start all the same."""
    thread = threading.Thread(target=target, name=name, daemon=True)
    in_background(thread.start).result()
    return thread


class LateThread:
    """A daemon thread that begins when it is first needed. Thread-safe."""

    def __init__(self, target: Callable[[], None], name: str) -> None:
        """Take what it does, and its name."""
        self._target, self._name = target, name
        self._has_begun = threading.Lock()  # taken by the thread, and never released

    @property
    def has_begun(self) -> bool:
        """Whether it runs, or has run."""
        return self._has_begun.locked()

    def start(self) -> None:
        """Start it, if it does not run yet; an interrupt of this may be followed by another call."""
        if not self.has_begun:
            start_thread(self._run, self._name)

    def _run(self) -> None:
        if self._has_begun.acquire(blocking=False):
            self._target()


def _begin(work: Callable[[], None]) -> None:
    """Work in a thread that `threading` has started: it keeps a record for good of others that gRPC runs in."""
    try:
        threading.Thread(target=work, name="reverb-writer_calls", daemon=True).start()
    except RuntimeError:  # the interpreter ends
        work()
