"""Waits: while one lasts, ask the servers for the cause, and log it every ten seconds."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from reverb_writer.client import server_set
from reverb_writer.reading.mixer import Source

_LOG = logging.getLogger(__package__)

_LOOK_EVERY_S = 0.2


class Wait:
    """A wait for a batch, of some servers or of all. Its methods do not block: the streams ask in the background."""

    def __init__(self, table: str, sources: Callable[[], Sequence[Source]], began_at: float, timeout_s: float) -> None:
        """Begin to wait, `timeout_s` seconds from `began_at`, for samples of `table` from these servers."""
        self._table, self._sources = table, sources
        self._began_at = began_at
        self._log_at = began_at + server_set.LOG_EVERY_S
        self._pause_s = min(_LOOK_EVERY_S, timeout_s / 4)
        self.look_at = time.monotonic() + self._pause_s  # when `look` is to be called next

    def look(self) -> None:
        """Have the servers asked for the cause, and log it if ten seconds have passed."""
        now = time.monotonic()
        self.look_at = now + self._pause_s
        for source in self._sources():
            source.stream.look(now, self._began_at)
        if now >= self._log_at:
            self._log_at = now + server_set.LOG_EVERY_S
            _LOG.warning("table `%s`: no batch for %.0f s. %s", self._table, now - self._began_at, self.why())

    def why(self) -> str:
        """Say what keeps samples from coming, for each server that has not ended."""
        streams = [source.stream for source in self._sources()]
        return " ".join(stream.explain(self._began_at) for stream in streams if not stream.is_done)
