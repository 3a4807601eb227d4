"""A flag between threads that an interrupt cannot break."""

from __future__ import annotations

import collections
import queue
import threading


class Flag:
    """As `threading.Event`, but without a lock: the main thread may be interrupted in any of its methods.

    `threading.Event` has its lock taken by a function of Python's. When `KeyboardInterrupt` comes at its end, the lock
    stays taken, and every thread that sets, clears or awaits the event hangs for ever.
    """

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
