"""What a wait is for, asked of the servers while it lasts, and logged every ten seconds."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Sequence

from reverb_writer.client import waiting_log
from reverb_writer.errors import ReplayTimeoutError, ServerUnavailableError
from reverb_writer.reading.thread_fetcher import ThreadFetcher
from reverb_writer.transport.server_probe import ServerProbe

__all__ = ["Wait", "unchained"]

_LOG = logging.getLogger("reverb_writer")

_LOOK_EVERY_S = 0.2


class Wait:
    """A wait for a batch, of some servers or of all. It never blocks: questions are on their way meanwhile.

    Attributes:
        look_at: `time.monotonic()` when `look` is to be called next.
    """

    def __init__(self, table: str, sources: Sequence[ThreadFetcher], began_at: float, timeout_s: float) -> None:
        """Begin to wait for samples of `table`, `timeout_s` seconds from `began_at`."""
        self._table, self._sources = table, sources
        self._began_at, self._timeout_s = began_at, timeout_s
        self._inquiries: dict[ThreadFetcher, ServerProbe] = {}
        self._log_at = began_at + waiting_log.LOG_EVERY_S
        self._pause_s = min(_LOOK_EVERY_S, timeout_s / 4)
        self.look_at = time.monotonic() + self._pause_s

    def look(self) -> None:
        """Ask the servers what is to be asked by now, and log what there is to be logged."""
        now = time.monotonic()
        self.look_at = now + self._pause_s
        for source in self._sources:
            if not source.has_ended and source.gone_since is None and now < self._began_at + self._timeout_s:
                if source not in self._inquiries:
                    self._inquiries[source] = source.probe(self._timeout_s)
                self._inquiries[source].proceed(now - self._began_at)
        if now >= self._log_at:
            self._log_at = now + waiting_log.LOG_EVERY_S
            _LOG.warning("table `%s`: no batch for %.0f s. %s", self._table, now - self._began_at, self.why())

    def why(self) -> str:
        """Say what keeps samples from coming, of each server that is not done."""
        going = [source for source in self._sources if not source.has_ended]
        return " ".join(source.why_waiting(self._inquiries.get(source)) for source in going)


@contextlib.contextmanager
def unchained() -> Iterator[None]:
    """Let a time-out out of the block without gRPC's errors behind it: its message names the cause."""
    try:
        yield
    except (ReplayTimeoutError, ServerUnavailableError) as error:
        raise error from None
