"""The deadline of a call, passed down to every call that it makes."""

from __future__ import annotations

import time

from reverb_writer.errors import ReplayTimeoutError


class Deadline:
    """The end of a call's time. Thread-safe."""

    def __init__(self, timeout_s: float) -> None:
        """Start the time now."""
        self.timeout_s = timeout_s  # how long the call may take in all, seconds
        self._end = _Moment(time.monotonic() + timeout_s)
        self._earlier_s = 0.0

    def earlier(self, seconds: float) -> Deadline:
        """Return a deadline that ends so many seconds earlier, to leave time for later work; `extend` moves both."""
        deadline = Deadline(self.timeout_s)
        deadline._end, deadline._earlier_s = self._end, self._earlier_s + seconds
        return deadline

    def extend(self, seconds: float) -> None:
        """Add time, because the caller has spent so many seconds elsewhere."""
        self._end.at += seconds

    @property
    def spent_s(self) -> float:
        """Seconds since the time began."""
        return self.timeout_s - self._left_s()

    def left_s(self, what: str = "the server did not answer") -> float:
        """Return the seconds that are left, > 0; `what` did not happen in time, for the error.

        Raises:
            ReplayTimeoutError: the time is up.
        """
        left_s = self._left_s()
        if left_s <= 0:
            raise ReplayTimeoutError(f"{what} within {self.timeout_s:.1f} s.")
        return left_s

    def _left_s(self) -> float:
        return self._end.at - self._earlier_s - time.monotonic()


class _Moment:
    """A moment that deadlines share."""

    def __init__(self, at: float) -> None:
        self.at = at
