"""How long to wait before a lost connection is tried again."""

from __future__ import annotations

import random

__all__ = ["backoff_s"]

_FIRST_S, _LAST_S = 0.05, 2.0


def backoff_s(failures: int) -> float:
    """Return a random time that doubles with each failure in a row, seconds, so that clients come back one by one."""
    longest = min(_LAST_S, _FIRST_S * 2 ** min(failures, 16))
    return random.uniform(longest / 2, longest)  # noqa: S311  # jitter, no secret
