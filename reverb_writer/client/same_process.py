"""State that observers and learners of one process share, and the end of observers that were not closed.

A learner that lacks samples makes the observers of its process send the complete windows that they hold: it may wait
for these. When the interpreter ends, observers deliver for up to two seconds. In a forked child they refuse steps.

`priority="max"` gives new items the largest priority that this process has set in their tables, at least 1. It never
falls until `Client.reset` empties the table. An actor in another process than its learner hears the learner's largest
priorities with each version of `Variables` that it reads from the same addresses.

Source: Schaul et al. 2016, Prioritized Experience Replay, algorithm 1.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from reverb_writer.transport import loop  # before `atexit.register` below, so that observers deliver before it ends

EXIT_S = 2.0
"""Time for which a sender delivers when its observer was not closed."""

_FIRST_PRIORITY = 1.0
_SLACK_S = 0.5  # time to wait after this time

# By id: senders, which hold complete windows to send many together. It is no WeakSet: iteration over a WeakSet fails
# when another thread adds to it.
_senders: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_largest: dict[tuple[str, str], float] = {}  # by address and table
_heard: dict[str, dict[str, float]] = {}  # the same of a learner in another process; by address, then by table


def add_sender(sender: Any) -> None:
    """Call `sender.send_due()` when a learner lacks samples; it must not raise or wait. Keeps a weak reference."""
    _senders[id(sender)] = sender
    multiprocessing = sys.modules.get("multiprocessing")
    if multiprocessing is not None and multiprocessing.parent_process() is not None:
        # A forked child of CPython 3.10 and 3.11 skips `atexit`.
        multiprocessing.util.Finalize(None, _end, exitpriority=1)


def _living() -> list[Any]:
    return [sender for reference in _senders.valuerefs() if (sender := reference()) is not None]


def send_due() -> None:
    """Send the due windows of all observers."""
    for sender in _living():
        sender.send_due()


@atexit.register
def _end() -> None:
    if loop.is_ending():
        return
    ends = [has_ended for sender in _living() if (has_ended := sender.end_soon()) is not None]
    end_at = time.monotonic() + EXIT_S + _SLACK_S
    for has_ended in ends:
        has_ended.wait(end_at - time.monotonic())


def _after_fork() -> None:
    for sender in _living():
        sender.ring.granted = -1  # each step takes the slow path, which refuses it


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def note_priority(address: str, table: str, priority: float) -> None:
    """Note a priority that was set. A race of two threads may lose one, until the next update."""
    if priority > _largest.get((address, table), _FIRST_PRIORITY):
        _largest[address, table] = priority


def forget_priorities(address: str, table: str) -> None:
    """Forget the largest priority because the table is empty."""
    _largest.pop((address, table), None)
    _heard[address] = {name: priority for name, priority in _heard.get(address, {}).items() if name != table}


def largest_priority(address: str, tables: Sequence[str]) -> float:
    """Return the largest known priority of all given tables."""
    heard = _heard.get(address, {})
    return max(max(_largest.get((address, table), _FIRST_PRIORITY), heard.get(table, 0.0)) for table in tables)


def priorities_set(addresses: Sequence[str]) -> dict[str, float]:
    """Return the largest priorities that this process has set on servers, by table; without tables at the first one."""
    found: dict[str, float] = {}
    for (address, table), priority in [*_largest.items()]:
        if address in addresses:
            found[table] = max(priority, found.get(table, priority))
    return found


def hear_priorities(addresses: Sequence[str], priorities: Mapping[str, float]) -> None:
    """Take the largest priorities that a learner in another process knows, in place of what it knew before."""
    for address in addresses:
        _heard[address] = dict(priorities)
