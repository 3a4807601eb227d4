"""Ask a server for its tables every two seconds: their figures, its silence, and the time of blocked sides."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import reverb_writer as rw
from reverb_writer.tables.rate_limits import Standstill, StandstillDetector, json_figures
from reverb_writer.tables.table_info import TableInfo
from reverb_writer_server.reverb.sockets import accepts_connections

_logger = logging.getLogger(__name__)
_EVERY_S = 2.0
_ANSWER_TIMEOUT_S = 5.0
_ACCEPT_TIMEOUT_S = 2.0
_FRESH_S = 6.0  # limit of the age of an answer, if one answer in a row is late


@dataclass(frozen=True)
class ServerSnapshot:
    """The server's tables at one moment."""

    tables: Mapping[str, TableInfo]  # by name; empty before the first answer
    standstills: tuple[Standstill, ...]  # the blocked sides: inserts or samples
    at: float  # `time.monotonic()`


class Monitor:
    """Takes a snapshot of a server every two seconds, in its own thread, until it is closed. Thread-safe.

    A server may answer on its connections without accepting new ones, so both are tested.
    """

    def __init__(self, address: str, order: Sequence[str], is_saving: Callable[[], bool]) -> None:
        """Start the thread; the server need not answer yet.

        `order` has the names of the tables; `is_saving` returns whether a checkpoint is being written and progresses.
        """
        self._address, self._order, self._is_saving = address, order, is_saving
        self._client = rw.Client(address, timeout_s=_ANSWER_TIMEOUT_S)
        self._watch = StandstillDetector()
        self._closed, self._answered = threading.Event(), threading.Event()
        self.ran_at = self._accepted_at = self._saved_at = time.monotonic()  # last round, new connection, save
        self._latest = ServerSnapshot({}, (), self.ran_at)
        self._thread = threading.Thread(target=self._run, name="monitor", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float) -> bool:
        """Wait for the first answer, and return whether it has arrived."""
        return self._answered.wait(timeout_s)

    def latest(self) -> ServerSnapshot:
        """Return the last snapshot."""
        return self._latest

    def age_s(self) -> float:
        """Return the age of the last snapshot in seconds."""
        return time.monotonic() - self.latest().at

    def silence_s(self) -> float:
        """Return the seconds since the server last answered and accepted a new connection."""
        return max(self.age_s(), time.monotonic() - self._accepted_at)

    def standstill_s(self) -> float:
        """Return the same, without the time of a checkpoint that the server writes.

        Two saves at once take all threads of gRPC, which has one per two processors, and then it serves nothing else.
        """
        return min(self.silence_s(), time.monotonic() - self._saved_at)

    def answers(self) -> bool:
        """Return whether the server answers, so that the last snapshot is up to date."""
        return self._answered.is_set() and self.age_s() <= _FRESH_S

    def fault(self) -> str | None:
        """Return why clients cannot use the server now; None if they can."""
        if not self.answers():
            return f"the server has not answered for {self.age_s():.0f} s"
        if self.latest().at - self._accepted_at > _FRESH_S:  # Reverb has answered since
            return (
                f"the server has accepted no new connection for {self.silence_s():.0f} s: it may be out of file "
                "descriptors, or its listener has failed; see its log"
            )
        return None

    def snapshot(self) -> list[dict[str, Any]]:
        """Return each table's figures and standstills as JSON values."""
        now = self.latest()
        blocked = [dataclasses.asdict(one) for one in now.standstills]
        return [
            {**json_figures(table), "blocked": [one for one in blocked if one["table"] == name]}
            for name, table in now.tables.items()
        ]

    def close(self) -> None:
        """Stop the thread. Idempotent."""
        self._closed.set()
        self._thread.join(2 * _ANSWER_TIMEOUT_S)
        self._client.close()

    def _run(self) -> None:
        was_usable = True
        while not self._closed.is_set():
            self.ran_at = time.monotonic()
            try:
                self._look()
            except (rw.errors.ReverbWriterError, OSError) as error:
                _logger.debug("the server does not answer its own monitor: %s", error)
            except Exception:
                _logger.exception("the monitor has failed, and continues")
            fault = self.fault() if self._answered.is_set() or self.silence_s() > _FRESH_S else None
            if (fault is None) is not was_usable:
                was_usable = fault is None
                _logger.log(logging.INFO if was_usable else logging.ERROR, "%s", fault or "the server answers again")
            self._closed.wait(_EVERY_S)

    def _look(self) -> None:
        if self._is_saving():
            self._saved_at = time.monotonic()
        if accepts_connections(self._address, _ACCEPT_TIMEOUT_S):
            self._accepted_at = time.monotonic()
        info = self._client.shards[0].channel.server_info(_ANSWER_TIMEOUT_S)
        tables = {name: info.tables[name] for name in self._order}
        self._latest = ServerSnapshot(tables, tuple(self._watch.update(info)), info.at)
        self._answered.set()
