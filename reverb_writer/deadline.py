"""The deadline of a call, passed down to every call that it makes."""

from __future__ import annotations

import time

from reverb_writer.errors import ReplayTimeoutError

LEAST_S = 0.05
"""Time that a call gets, in seconds, even if the time of all has been spent on others."""


class Deadline:
    """The end of a call's time. Thread-safe."""

    def __init__(self, timeout_s: float) -> None:
        """Start the time now."""
        self.timeout_s = timeout_s  # how long the call may take in all, seconds
        self._end = time.monotonic() + timeout_s

    def extend(self, seconds: float) -> None:
        """Add time, because the caller has spent so many seconds elsewhere."""
        self._end += seconds

    @property
    def spent_s(self) -> float:
        """Seconds since the time began."""
        return self.timeout_s - (self._end - time.monotonic())

    def left_s(self, what: str = "the server did not answer") -> float:
        """Return the seconds that are left, > 0; `what` did not happen in time, for the error.

        Raises:
            ReplayTimeoutError: the time is up.
        """
        left_s = self._end - time.monotonic()
        if left_s <= 0:
            raise ReplayTimeoutError(f"{what} within {self.timeout_s:.1f} s.")
        return left_s
