"""Ctrl-C at a chosen moment of a call, and what it must leave behind: no thread. Signals all the time."""

from __future__ import annotations

import contextlib
import gc
import logging
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType

import pytest
from threads import our_threads
from waiting import eventually


class Interrupts:
    """Raise KeyboardInterrupt at the n-th moment of this thread at which CPython handles signals, whosever code it is.

    It does so where a function begins, and where one of C returns: `threading.Condition.__enter__` has taken the lock
    by then and is left by an exception, so no one gives it back. `logging` is left out: its handlers would keep their
    locks, and no thread of any later test could log. So is `__del__`: CPython drops an exception there.
    """

    def __init__(self) -> None:
        self.left = 0
        # One object for as long as this lives: CPython 3.11 may call it once more after it has been taken out.
        self._hook = self._profile

    @contextlib.contextmanager
    def at(self, moment: int) -> Iterator[None]:
        self.left = moment
        sys.setprofile(self._hook)
        try:
            yield
        finally:
            sys.setprofile(None)

    def _profile(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if (
            event in ("call", "c_return")
            and code.co_filename not in (__file__, logging.__file__)
            and code.co_name != "__del__"
        ):
            self.left -= 1
            if not self.left:
                sys.setprofile(None)
                raise KeyboardInterrupt


def interrupted(call: Callable[[], object], moment: int) -> bool:
    """Call, interrupted at a moment of it; return whether it came to its end before."""
    interrupts = Interrupts()
    with contextlib.suppress(KeyboardInterrupt), interrupts.at(moment):
        call()
    return interrupts.left > 0


class EachMoment:
    """Interrupts each call at the same moment, counted from its beginning."""

    def __init__(self, growth: int | None = None) -> None:
        """Begin with the first moment; the next is one later, or `1 + moment // growth`."""
        self.moment, self.was_interrupted, self._growth = 1, True, growth

    def __call__(self, call: Callable[[], object]) -> None:
        """Make a call."""
        self.was_interrupted |= not interrupted(call, self.moment)

    def __iter__(self) -> Iterator[int]:
        """Go on with later moments until no call lasts that long."""
        while self.was_interrupted:
            self.was_interrupted = False
            yield self.moment
            self.moment += 1 + (self.moment // self._growth if self._growth else 0)


def await_end_of_threads(timeout_s: float) -> None:
    """Return when the package has no thread in this process any more."""
    gc.collect()
    eventually(lambda: not our_threads(), "the threads end", patience_s=timeout_s)


@contextlib.contextmanager
def many_signals() -> Iterator[None]:
    """Have a signal without an effect arrive each millisecond, as a sampling profiler does."""
    if not hasattr(signal, "setitimer"):
        pytest.skip("Windows has no interval timers")
    former = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)
