"""The largest priority that this process has set in each table: what `priority="max"` gives to new items.

It is 1 before a larger one is set, and it never falls, until `Client.reset` empties the table. It does not follow the
updates of other processes: an actor that runs apart from its learner computes priorities, or takes a number that the
learner publishes.

Source: Schaul et al. 2016, Prioritized Experience Replay, algorithm 1.
"""

from __future__ import annotations

from collections.abc import Sequence

_FIRST = 1.0

_largest: dict[tuple[str, str], float] = {}  # by address and table


def note(address: str, table: str, priority: float) -> None:
    """Note a priority that was set. Of two threads at once, one may not be noted: the next update makes up for it."""
    if priority > _largest.get((address, table), _FIRST):
        _largest[address, table] = priority


def forget(address: str, table: str) -> None:
    """Begin again, because the table is empty."""
    _largest.pop((address, table), None)


def current(address: str, tables: Sequence[str]) -> float:
    """Return the largest priority noted of any of some tables."""
    return max(_largest.get((address, table), _FIRST) for table in tables)
