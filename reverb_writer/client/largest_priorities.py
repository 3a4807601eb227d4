"""The largest priority seen so far of each table: what `priority="max"` gives to new items.

    a learner updates priorities -> the largest is noted in its process, and stored as the priority of the table's spec
                                                                             | in `__specs__` (see `spec_table`)
    an actor writes new items    <- what its process has noted <- read with the spec, and again every second

It is 1 before a larger one is seen, and it never falls, until `Client.reset` empties the table. A server that keeps no
spec of the table tells other processes nothing; then only updates of this process count. What could not be stored is
stored with the next update.

Source: Schaul et al. 2016, Prioritized Experience Replay, algorithm 1.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable, Sequence

from reverb_writer.background import in_background

_FIRST = 1.0
_ASK_EVERY_S = 1.0

_lock = threading.Lock()
_seen: dict[tuple[str, str], float] = {}
_stored: dict[tuple[str, str], float] = {}
_ask_at: dict[tuple[str, str], float] = {}


def note(address: str, table: str, priority: float) -> None:
    """Note a priority that was set."""
    with _lock:
        _seen[address, table] = max(priority, _seen.get((address, table), _FIRST))


def note_stored(address: str, table: str, priority: float) -> None:
    """Note what the server stores."""
    note(address, table, priority)
    with _lock:
        _stored[address, table] = priority


def unstored(address: str, table: str) -> float | None:
    """Return the largest priority noted; None if the server stores it, as far as is known."""
    with _lock:
        largest = _seen.get((address, table), _FIRST)
        return largest if largest > _stored.get((address, table), _FIRST) else None


def forget(address: str, table: str) -> None:
    """Begin again, for the table is empty."""
    with _lock:
        _seen.pop((address, table), None)
        _stored.pop((address, table), None)


def current(address: str, tables: Sequence[str], ask: Callable[[Sequence[str]], None]) -> float:
    """Return the largest priority noted of any of some tables. Never waits.

    `ask` reads what a server stores, and notes it: in a thread of its own, once a second for a table.
    """
    now = time.monotonic()
    with _lock:
        due = [table for table in tables if now >= _ask_at.get((address, table), 0.0)]
        _ask_at.update(((address, table), now + _ASK_EVERY_S) for table in due)
        largest = max(_seen.get((address, table), _FIRST) for table in tables)
    if due:
        in_background(functools.partial(ask, due))
    return largest


def _after_fork() -> None:
    global _lock  # noqa: PLW0603  # another thread of the parent may have held it
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
