"""Waits: while one lasts, ask the servers for the cause, and log it every ten seconds."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence

from reverb_writer.client import on_shards
from reverb_writer.errors import ReplayTimeoutError, ServerUnavailableError
from reverb_writer.reading.server_link import ServerLink
from reverb_writer.transport.server_probe import ServerProbe

_LOG = logging.getLogger(__package__)

_LOOK_EVERY_S = 0.2


class Wait:
    """A wait for a batch, of some servers or of all. Its methods do not block: probes ask in the background."""

    def __init__(
        self, table: str, links: Callable[[], Sequence[ServerLink]], began_at: float, timeout_s: float
    ) -> None:
        """Begin to wait, `timeout_s` seconds from `began_at`, for samples of `table` over these connections."""
        self._table, self._links = table, links
        self._began_at, self._timeout_s = began_at, timeout_s
        self._probes: dict[ServerLink, ServerProbe] = {}
        self._log_at = began_at + on_shards.LOG_EVERY_S
        self._pause_s = min(_LOOK_EVERY_S, timeout_s / 4)
        self.look_at = time.monotonic() + self._pause_s  # when `look` is to be called next

    def look(self) -> None:
        """Have the probes ask what is due by now, and log the cause if ten seconds have passed."""
        now = time.monotonic()
        self.look_at = now + self._pause_s
        for link in self._links():
            if link.disconnected_at is None and now < self._began_at + self._timeout_s:
                if link not in self._probes:
                    self._probes[link] = link.probe(self._timeout_s)
                self._probes[link].proceed(now - self._began_at)
        if now >= self._log_at:
            self._log_at = now + on_shards.LOG_EVERY_S
            _LOG.warning("table `%s`: no batch for %.0f s. %s", self._table, now - self._began_at, self.why())

    def why(self) -> str:
        """Say what keeps samples from coming, for each server that has not ended."""
        return " ".join(link.why_waiting(self._probes.get(link)) for link in self._links())


@contextlib.contextmanager
def unchained() -> Iterator[None]:
    """Raise a time-out of the block without gRPC's errors as its cause: its message names the cause."""
    try:
        yield
    except (ReplayTimeoutError, ServerUnavailableError) as error:
        raise error from None
