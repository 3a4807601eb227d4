"""The signals that end a server: noted when they come, heeded when there is time.

Not `signal.sigtimedwait`: in CPython 3.11 it makes up a signal when the process is stopped and continued (SIGSTOP, a
debugger, a frozen container) for longer than its time-out.
"""

from __future__ import annotations

import queue
import signal

__all__ = ["note", "wait"]

_came: queue.SimpleQueue[int] = queue.SimpleQueue()  # may be put to while it is read, by the same thread too


def note() -> None:
    """Note SIGTERM and SIGINT for `wait`, instead of ending; call it in the main thread."""
    for ending in (signal.SIGTERM, signal.SIGINT):
        signal.signal(ending, lambda number, _: _came.put(number))


def wait(timeout_s: float) -> signal.Signals | None:
    """Return the next signal; None if none comes within `timeout_s` seconds."""
    try:
        return signal.Signals(_came.get(timeout=timeout_s))
    except queue.Empty:
        return None
