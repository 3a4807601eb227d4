"""Cleanup of streams and calls that were not closed: when the interpreter ends, and in a forked child."""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
import weakref
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from reverb_writer.transport.insert_stream import InsertStream

_Lock = TypeVar("_Lock")

_streams: weakref.WeakSet[InsertStream] = weakref.WeakSet()
_calls: weakref.WeakSet[Any] = weakref.WeakSet()
_ending = threading.Event()


def watch(stream: InsertStream) -> None:
    """Abandon the stream when the interpreter ends, and tell it of forks; holds no reference."""
    _streams.add(stream)


def unless_forked(stream: InsertStream, lock: _Lock) -> _Lock:
    """Return the lock; raise in a forked child, where a thread of the parent may hold it for ever."""
    if stream.channel.is_forked:
        stream.check()
    return lock


def watch_call(call: Any) -> None:
    """Keep a call of gRPC that still exists when the interpreter ends from being deleted; holds no reference before.

    Deleting a call takes its lock. A thread of gRPC that the interpreter has stopped may hold that lock and never
    release it: the program would not end.
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
