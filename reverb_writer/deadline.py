"""The deadline of a call, shared by all calls that it makes."""

from __future__ import annotations

import time

from reverb_writer.errors import ReplayTimeoutError

LEAST_S = 0.05
"""Minimum time of a call, in seconds, even if other calls have used up the common time."""


class Deadline:
    """The end of a call's time. Thread-safe."""

    def __init__(self, timeout_s: float) -> None:
        """Start the time now."""
        self.timeout_s = timeout_s  # total time of the call, seconds
        self._end = time.monotonic() + timeout_s

    def extend(self, seconds: float) -> None:
        """Add `seconds` that the caller spent elsewhere."""
        self._end += seconds

    @property
    def spent_s(self) -> float:
        """Seconds since the time began."""
        return self.timeout_s - (self._end - time.monotonic())

    def left_s(self, what: str = "the server did not answer") -> float:
        """Return the remaining seconds, > 0; `what` begins the error's message.

        Raises:
            ReplayTimeoutError: the time is up.
        """
        left_s = self._end - time.monotonic()
        if left_s <= 0:
            raise ReplayTimeoutError(f"{what} within {self.timeout_s:.1f} s.")
        return left_s
