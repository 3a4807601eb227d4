"""What must happen to streams that nobody has closed: at the end of the interpreter, and in a forked child."""

from __future__ import annotations

import atexit
import os
import weakref
from typing import Protocol

__all__ = ["watch"]


class Stream(Protocol):
    """What can be watched."""

    def abandon(self) -> None:
        """End at once."""

    def after_fork(self) -> None:
        """Refuse all use: this process is a forked child."""


_streams: weakref.WeakSet[Stream] = weakref.WeakSet()


def watch(stream: Stream) -> None:
    """Abandon the stream when the interpreter ends, and tell it of forks; holds no reference."""
    _streams.add(stream)


@atexit.register
def _abandon_all() -> None:
    for stream in list(_streams):
        stream.abandon()


def _after_fork() -> None:
    for stream in list(_streams):
        stream.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
