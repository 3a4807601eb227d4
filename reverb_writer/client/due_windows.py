"""Windows that observers of this process hold back, to send many together: sent before a learner waits for more."""

from __future__ import annotations

import weakref
from typing import Protocol

__all__ = ["add", "send_due"]


class Sender(Protocol):
    """What holds windows back for a while, to send many together."""

    def send_due(self) -> None:
        """Send them now; never raises or waits."""


_senders: weakref.WeakSet[Sender] = weakref.WeakSet()


def add(sender: Sender) -> None:
    """Have its windows sent before a learner of this process waits; holds no reference."""
    _senders.add(sender)


def send_due() -> None:
    """Send what is due of every observer: who acts and learns in turns would wait for what is still here."""
    if _senders:
        for sender in list(_senders):
            sender.send_due()
