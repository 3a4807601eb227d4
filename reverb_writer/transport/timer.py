"""The clock of a stream: what is due is sent, and the connection is looked after, whatever the one's time is."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from reverb_writer.errors import ClosedError, SpecError
from reverb_writer.flags import Flag

__all__ = ["Timer"]

_LOG = logging.getLogger("reverb_writer")

_LOOK_EVERY_S = 0.5


class Timer:
    """Runs callbacks in a thread of its own until `ended` is set. Thread-safe."""

    def __init__(
        self,
        address: str,
        ended: Flag,
        tick_s: float,
        look: Callable[[], None],
        on_closed: Callable[[], None],
    ) -> None:
        """Prepare; see `start`.

        Args:
            address: of the server, for the log.
            ended: whether to end.
            tick_s: how often those that were added are called, seconds, > 0; infinity for never.
            look: called twice a second at least.
            on_closed: called when one of them raises ClosedError.

        Raises:
            SpecError: `tick_s` is not > 0.
        """
        if not tick_s > 0:
            raise SpecError(f"`tick_s` must be > 0 seconds, got {tick_s!r}.")
        self._address, self._ended, self._tick_s = address, ended, tick_s
        self._look, self._on_closed = look, on_closed
        self._callbacks: list[Callable[[], None]] = []

    def add(self, callback: Callable[[], None]) -> None:
        """Call this, too."""
        self._callbacks.append(callback)

    def start(self) -> None:
        """Start the thread."""
        threading.Thread(target=self._run, name="reverb-writer_tick", daemon=True).start()

    def _run(self) -> None:
        due_at = time.monotonic() + self._tick_s
        while not self._ended.wait(min(max(due_at - time.monotonic(), 0.0), _LOOK_EVERY_S)):
            try:
                if time.monotonic() >= due_at:
                    due_at = time.monotonic() + self._tick_s
                    for callback in list(self._callbacks):
                        callback()
                self._look()
            except ClosedError:
                self._on_closed()
            except Exception:  # noqa: BLE001  # without this thread nothing would be sent in time any more
                if not self._ended.is_set():
                    _LOG.exception("%s: the stream's timer goes on after an error.", self._address)
