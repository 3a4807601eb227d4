"""How many items may be complete and unconfirmed at one server."""

from __future__ import annotations

import math
import time

_LEAST, _LEAST_CALLS = 400, 32
_MOST = 16_384
_AHEAD_S, _EPOCH_S = 0.1, 0.05


def least_items(items_per_call: float) -> int:
    """Return the default: what 32 calls complete in the long run, 400 or more.

    A split DQN learns with up to 2,000 items and not with 16,384; see docs/decisions/in-flight.md.

    >>> least_items(1), least_items(64)
    (400, 2048)
    """
    return max(_LEAST, math.ceil(_LEAST_CALLS * items_per_call))


class ItemLimit:
    """A fixed number of items; or one that is larger while the server confirms more in a tenth of a second.

    An actor that does nothing but write would stand still half of the time with 400 items. One that a rate limiter
    holds up gets few confirmations, so its limit is the smallest one again a tenth of a second later. Not thread-safe.

    Attributes:
        items: the limit now.
    """

    def __init__(self, least: int, *, is_fixed: bool) -> None:
        """Take the number, which `is_fixed`, or the smallest number otherwise."""
        self.items = self._least = least
        self._is_fixed = is_fixed
        self._since = time.monotonic()
        self._before = 0  # items confirmed until then

    def update(self, acknowledged: int) -> None:
        """Follow the number of items confirmed so far."""
        now = time.monotonic()
        if self._is_fixed or now - self._since < _EPOCH_S:
            return
        rate = (acknowledged - self._before) / (now - self._since)
        self.items = max(self._least, min(int(_AHEAD_S * rate), _MOST))
        self._since, self._before = now, acknowledged
