"""The clock of an observer: complete windows are sent in time, and a silent connection is examined."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from reverb_writer.background import start_thread
from reverb_writer.transport.insert_stream import InsertStream

_LOG = logging.getLogger(__package__)

_CHECK_EVERY_S = 0.5


def start_clock(stream: InsertStream, send_every_s: float, send: Callable[[], None]) -> None:
    """Start a thread that sends what is due and checks the stream's connection, until the stream is closed.

    Calls `send`, which must not keep the observer alive, every `send_every_s` seconds; infinity for never.
    """
    start_thread(lambda: _run(stream, send_every_s, send), "reverb-writer_tick")


def _run(stream: InsertStream, send_every_s: float, send: Callable[[], None]) -> None:
    due_at = time.monotonic() + send_every_s
    while not stream.wait_closed(min(max(due_at - time.monotonic(), 0.0), _CHECK_EVERY_S)):
        try:
            if time.monotonic() >= due_at:
                due_at = time.monotonic() + send_every_s
                send()
            stream.check_connection()
        except Exception:  # noqa: BLE001  # without this thread nothing would be sent in time any more
            if not stream.wait_closed(0.0):
                _LOG.exception("%s: the observer's clock goes on after an error.", stream.channel.address)
    stream.abandon()  # an interrupt may have left the thread that has closed it half-way
