"""What becomes of observers that were not closed: when the interpreter ends, and in a forked child.

This module is imported after `transport.loop`, so its function is called before the loop ends.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import sys
import time

from reverb_writer.client.same_process import senders
from reverb_writer.transport import loop

_SLACK_S = 0.5  # how much longer than a sender delivers


def watch() -> None:
    """Have the senders deliver when a child of `multiprocessing` ends, too."""
    multiprocessing = sys.modules.get("multiprocessing")
    if multiprocessing is not None and multiprocessing.parent_process() is not None:
        # A forked child of CPython 3.10 and 3.11 skips `atexit`.
        multiprocessing.util.Finalize(None, _end, exitpriority=1)


@atexit.register
def _end() -> None:
    if loop.is_ending():
        return
    waits = [wait for sender in senders() if (wait := sender.end_soon()) is not None]
    end = time.monotonic() + _SLACK_S + max((wait.timeout_s for wait in waits), default=0.0)
    for wait in waits:
        with contextlib.suppress(queue.Empty):
            wait.answer.get(timeout=max(end - time.monotonic(), 0.0))


def _after_fork() -> None:
    for sender in senders():
        sender.ring.granted = -1  # each step takes the slow path, where it is refused


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
