"""Calls that wait say so in the log."""

from __future__ import annotations

import _thread
import contextlib
import logging
import time
from collections.abc import Callable, Iterator

from reverb_writer.flags import Flag

__all__ = ["LOG_EVERY_S", "logged"]

_LOG = logging.getLogger("reverb_writer")

LOG_EVERY_S = 10.0


@contextlib.contextmanager
def logged(describe: Callable[[], str]) -> Iterator[None]:
    """Log every ten seconds for how long the block has been waiting, and for what: `describe` says it."""
    done = Flag()
    start = time.monotonic()

    def run() -> None:
        while not done.wait(LOG_EVERY_S):
            _LOG.warning("%s for %.0f s.", describe(), time.monotonic() - start)

    _thread.start_new_thread(run, ())  # `Thread.start` waits with a lock, which an interrupt may leave taken
    try:
        yield
    finally:
        done.set()
