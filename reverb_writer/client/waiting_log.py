"""Calls that wait say so in the log."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator

from reverb_writer.background import Flag, in_background

_LOG = logging.getLogger(__package__)

LOG_EVERY_S = 10.0


@contextlib.contextmanager
def logged(describe: Callable[[], str]) -> Iterator[None]:
    """Log every ten seconds for how long the block has been waiting, and for what: `describe` says it."""
    done = Flag()
    start = time.monotonic()

    def run() -> None:
        while not done.wait(LOG_EVERY_S):
            _LOG.warning("%s for %.0f s.", describe(), time.monotonic() - start)

    try:
        in_background(run)
        yield
    finally:
        done.set()
