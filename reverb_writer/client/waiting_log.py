"""Calls that wait say so in the log."""

from __future__ import annotations

import contextlib
import logging
import time
import weakref
from collections.abc import Callable, Iterator

from reverb_writer.background import Flag, in_background

_LOG = logging.getLogger(__package__)

LOG_EVERY_S = 10.0


@contextlib.contextmanager
def logged(describe: Callable[[], str]) -> Iterator[None]:
    """Log every ten seconds for how long the block has been waiting, and for what: `describe` says it."""
    done, block = Flag(), _Block()
    is_alive = weakref.ref(block)  # an interrupt may keep `done` from being set; nothing keeps the block alive
    start = time.monotonic()

    def run() -> None:
        while not done.wait(LOG_EVERY_S) and is_alive():
            _LOG.warning("%s for %.0f s.", describe(), time.monotonic() - start)

    try:
        in_background(run)
        yield
    finally:
        done.set()


class _Block:
    """Lives as long as the frame of a block that waits."""
