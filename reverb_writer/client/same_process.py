"""What observers and learners of one process share: windows that are due, and the largest priority of each table.

A learner that waits for samples has the complete windows sent that observers of its process still hold: it may wait for
just these.

`priority="max"` gives new items the largest priority that this process has set in their tables. It is 1 before a larger
one is set, and it never falls, until `Client.reset` empties the table. It does not follow the updates of other
processes: an actor that runs apart from its learner computes priorities, or takes a number that the learner publishes.

Source: Schaul et al. 2016, Prioritized Experience Replay, algorithm 1.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

_FIRST_PRIORITY = 1.0

# By id, what holds complete windows for a while, to send many together. No WeakSet: one that another thread adds to
# cannot be iterated over.
_senders: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_largest: dict[tuple[str, str], float] = {}  # by address and table


def add_sender(sender: Any) -> None:
    """Have `sender.send_due()` called when a learner lacks samples; it must not raise or wait. Holds no reference."""
    _senders[id(sender)] = sender


def senders() -> list[Any]:
    """Return those that live."""
    return [sender for reference in _senders.valuerefs() if (sender := reference()) is not None]


def send_due() -> None:
    """Send the due windows of every observer."""
    for sender in senders():
        sender.send_due()


def note_priority(address: str, table: str, priority: float) -> None:
    """Note a priority that was set. Of two threads at once, one may not be noted: the next update makes up for it."""
    if priority > _largest.get((address, table), _FIRST_PRIORITY):
        _largest[address, table] = priority


def forget_priorities(address: str, table: str) -> None:
    """Begin again, because the table is empty."""
    _largest.pop((address, table), None)


def largest_priority(address: str, tables: Sequence[str]) -> float:
    """Return the largest priority noted of any of some tables."""
    return max(_largest.get((address, table), _FIRST_PRIORITY) for table in tables)
