"""Wait for what another thread or process will do."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PATIENCE_S = 150.0  # the end of a stopped server takes 40 s on two cores that others use, too


def eventually(
    condition: Callable[[], Any], what: str = "", *, pause_s: float = 0.02, patience_s: float = PATIENCE_S
) -> Any:
    """Return the first true value of `condition`, asked every `pause_s` seconds."""
    end = time.monotonic() + patience_s
    while not (value := condition()):
        assert time.monotonic() < end, f"it did not come true within {patience_s:g} s: {what or condition}"
        time.sleep(pause_s)
    return value


def process_state(number: int) -> str:
    """Return the letter of a process's state: T if it is stopped, Z if it has ended, X if there is none."""
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"
