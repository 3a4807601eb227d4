"""Sends the complete windows that observers of this process still hold, before a learner of it waits for samples."""

from __future__ import annotations

import weakref
from typing import Protocol


class Sender(Protocol):
    """An object that holds complete windows for a while, to send many together."""

    def send_due(self) -> None:
        """Send them now; never raises or waits."""


_senders: weakref.WeakSet[Sender] = weakref.WeakSet()


def add(sender: Sender) -> None:
    """Have the sender's windows sent before a learner of this process waits; holds no reference."""
    _senders.add(sender)


def send_due() -> None:
    """Send the due windows of every observer: a process that acts and learns would wait for its own windows."""
    if _senders:
        for sender in list(_senders):
            sender.send_due()
