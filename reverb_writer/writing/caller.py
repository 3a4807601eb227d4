"""A waiting call, for the sender that wakes it and the thread that waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from reverb_writer.background import Inbox
from reverb_writer.transport.wait import Status


def nothing() -> None:
    """Do nothing: work that only wakes a thread."""


class Caller:
    """A call that waits for a sender. The waiting thread and the sender's thread use it.

    Attributes:
        kind: "room" for a step that needs room in the ring and in flight, "flush", or "close".
        end_at: `time.monotonic()` of its end without progress.
        inbox: the functions that the waiting thread calls.
        status: the status that was shown last. The waiting thread sets it to None before it waits for another.
        room: the room that was shown last: 0 for none, 1 for little, 2 for much.
        is_due: whether the call wants to see the status, even if nothing has changed.
        is_over: whether the call no longer waits.
    """

    def __init__(self, kind: Literal["room", "flush", "close"], end_at: float) -> None:
        """Begin without a status."""
        self.kind, self.end_at = kind, end_at
        self.inbox: Inbox[Callable[[], None]] = Inbox()
        self.status: Status | None = None
        self.room, self.is_due, self.is_over = 0, False, False

    def show(self, status: Status) -> None:
        """Wake the call; never waits."""
        self.is_due = False
        self.status = status
        self.inbox.put(nothing)
