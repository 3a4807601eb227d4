"""What becomes of streams and calls that nobody has closed: at the end of the interpreter, and in a forked child."""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
import weakref
from typing import Any, Protocol, TypeVar

__all__ = ["unless_forked", "watch", "watch_call"]


class Stream(Protocol):
    """What can be watched."""

    @property
    def is_forked(self) -> bool:
        """Whether this process is a forked child of the one that opened it."""

    def abandon(self) -> None:
        """End at once."""

    def check(self) -> None:
        """Raise ClosedError in a forked child, and where it is of no use any more."""

    def after_fork(self) -> None:
        """Refuse all use: this process is a forked child."""


_Lock = TypeVar("_Lock")

_streams: weakref.WeakSet[Stream] = weakref.WeakSet()
_calls: weakref.WeakSet[Any] = weakref.WeakSet()
_ending = threading.Event()


def watch(stream: Stream) -> None:
    """Abandon the stream when the interpreter ends, and tell it of forks; holds no reference."""
    _streams.add(stream)


def unless_forked(stream: Stream, lock: _Lock) -> _Lock:
    """Return the lock; raise in a forked child, where a thread that is not there may hold it for ever."""
    if stream.is_forked:
        stream.check()
    return lock


def watch_call(call: Any) -> None:
    """Never delete a call of gRPC that is still there when the interpreter ends; holds no reference until then.

    Deleting one takes its lock. One of gRPC's threads may have held it when the interpreter stopped them all: nobody
    would ever give it back, and the program would not end.
    """
    if _ending.is_set():
        _keep(call)
    else:
        _calls.add(call)


def _keep(call: Any) -> None:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(call))


@atexit.register
def _end() -> None:
    _ending.set()
    for stream in list(_streams):
        stream.abandon()
    for call in list(_calls):
        _keep(call)


def _after_fork() -> None:
    for stream in list(_streams):
        stream.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
