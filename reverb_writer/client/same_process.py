"""State that observers and learners of one process share, and the end of observers that were not closed.

A learner that waits for samples has the complete windows sent that observers of its process still hold: it may wait for
just these. When the interpreter ends, observers deliver for up to two seconds; in a forked child they are refused.

`priority="max"` gives new items the largest priority that this process has set in their tables. It is 1 before a larger
one is set, and it never falls, until `Client.reset` empties the table. It does not follow the updates of other
processes: an actor that runs apart from its learner computes priorities, or takes a number that the learner publishes.

Source: Schaul et al. 2016, Prioritized Experience Replay, algorithm 1.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import sys
import time
import weakref
from collections.abc import Sequence
from typing import Any

from reverb_writer.transport import loop  # before `atexit.register` below, so that observers deliver before it ends

_FIRST_PRIORITY = 1.0
_SLACK_S = 0.5  # how much longer than a sender delivers

# By id, what holds complete windows for a while, to send many together. No WeakSet: one that another thread adds to
# cannot be iterated over.
_senders: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_largest: dict[tuple[str, str], float] = {}  # by address and table


def add_sender(sender: Any) -> None:
    """Have `sender.send_due()` called when a learner lacks samples; it must not raise or wait. Holds no reference."""
    _senders[id(sender)] = sender
    multiprocessing = sys.modules.get("multiprocessing")
    if multiprocessing is not None and multiprocessing.parent_process() is not None:
        # A forked child of CPython 3.10 and 3.11 skips `atexit`.
        multiprocessing.util.Finalize(None, _end, exitpriority=1)


def _living() -> list[Any]:
    return [sender for reference in _senders.valuerefs() if (sender := reference()) is not None]


def send_due() -> None:
    """Send the due windows of every observer."""
    for sender in _living():
        sender.send_due()


@atexit.register
def _end() -> None:
    if loop.is_ending():
        return
    waits = [wait for sender in _living() if (wait := sender.end_soon()) is not None]
    end = time.monotonic() + _SLACK_S + max((wait.timeout_s for wait in waits), default=0.0)
    for wait in waits:
        with contextlib.suppress(queue.Empty):
            wait.answer.get(timeout=max(end - time.monotonic(), 0.0))


def _after_fork() -> None:
    for sender in _living():
        sender.ring.granted = -1  # each step takes the slow path, where it is refused


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


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
