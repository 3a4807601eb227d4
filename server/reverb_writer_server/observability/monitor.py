"""Snapshots of a server's tables, taken every two seconds; whether it answers; how long a side has been blocked."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import reverb_writer as rw
from reverb_writer.tables.rate_limits import Standstill, StandstillDetector, figures, rates
from reverb_writer.tables.table_info import ServerInfo, TableInfo
from reverb_writer_server.reverb.ports import accepts_connections

_logger = logging.getLogger(__name__)
_EVERY_S = 2.0
_HISTORY = 300  # snapshots, ten minutes
_ANSWER_TIMEOUT_S = 5.0
_ACCEPT_TIMEOUT_S = 2.0
_FRESH_S = 6.0  # an answer is this old at most where the server answers at once, and once late


@dataclass(frozen=True)
class ServerSnapshot:
    """The server's tables at one moment.

    Attributes:
        tables: figures by name.
        standstills: the sides, inserts or samples, that are blocked.
        at: `time.monotonic()` of the snapshot.
    """

    tables: Mapping[str, TableInfo]
    standstills: tuple[Standstill, ...]
    at: float


class Monitor:
    """Takes a snapshot of a server every two seconds, in its own thread, until it is closed. Thread-safe.

    A server may answer on connections that it has, and yet accept no new one: both are asked for.

    Attributes:
        client: its client; other threads may use it too.
        ran_at: `time.monotonic()` at which its thread last began a round.
    """

    def __init__(self, address: str, order: Sequence[str]) -> None:
        """Take the first snapshot and start the thread.

        Args:
            address: address of the server, "HOST:PORT".
            order: names of the tables, in the order in which they are reported.
        """
        self._address = address
        self._order = order
        self.client = rw.Client(address, timeout_s=_ANSWER_TIMEOUT_S)
        self._watch = StandstillDetector()
        self._snapshots: deque[ServerSnapshot] = deque(maxlen=_HISTORY)
        self._closed = threading.Event()
        self._take_snapshot(self.client.request_info())
        self.ran_at = self._accepted_at = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="monitor", daemon=True)
        self._thread.start()

    def latest(self) -> ServerSnapshot:
        """Return the last snapshot."""
        return self._snapshots[-1]

    def age_s(self) -> float:
        """Return the age of the last snapshot in seconds."""
        return time.monotonic() - self.latest().at

    def silence_s(self) -> float:
        """Return for how many seconds the server has not answered, or has not accepted a new connection."""
        return max(self.age_s(), time.monotonic() - self._accepted_at)

    def answers(self) -> bool:
        """Return whether the server answers, so that the last snapshot tells what is true now."""
        return self.age_s() <= _FRESH_S

    def fault(self) -> str | None:
        """Say why clients cannot use the server now; None if they can."""
        if not self.answers():
            return f"the server has not answered for {self.age_s():.0f} s"
        if self.latest().at - self._accepted_at > _FRESH_S:  # Reverb has answered since
            return (
                f"the server has accepted no new connection for {self.silence_s():.0f} s: it may be out of file "
                "descriptors, or its listener has failed; its log says which"
            )
        return None

    def rates(self, since_s: float) -> dict[str, tuple[float, float]]:
        """Return inserts and samples a second by table, over the last `since_s` seconds."""
        snapshots = list(self._snapshots)
        first = next(one for one in snapshots if one.at >= snapshots[-1].at - since_s)
        return {name: _rates(first, snapshots[-1], name) for name in snapshots[-1].tables}

    def snapshot(self) -> list[dict[str, Any]]:
        """Return each table's figures, rates, history and standstills as JSON values."""
        snapshots = list(self._snapshots)
        now = snapshots[-1]
        recent = self.rates(10.0)
        return [
            {
                **figures(table),
                "inserts_per_s": recent[name][0],
                "samples_per_s": recent[name][1],
                "blocked": [dataclasses.asdict(one) for one in now.standstills if one.table == name],
                "history": [
                    [round(after.at - now.at, 1), *(round(rate, 1) for rate in _rates(before, after, name))]
                    for before, after in itertools.pairwise(snapshots)
                    if name in before.tables
                ],
            }
            for name, table in now.tables.items()
        ]

    def close(self) -> None:
        """Stop the thread. Idempotent."""
        self._closed.set()
        self._thread.join(2 * _ANSWER_TIMEOUT_S)
        self.client.close()

    def _run(self) -> None:
        was_usable = True
        while not self._closed.wait(_EVERY_S):
            self.ran_at = time.monotonic()
            try:
                if accepts_connections(self._address, _ACCEPT_TIMEOUT_S):
                    self._accepted_at = time.monotonic()
                self._take_snapshot(self.client.request_info())
            except (rw.ReverbWriterError, OSError) as error:
                _logger.debug("the server does not answer its own monitor: %s", error)
            except Exception:
                _logger.exception("the monitor has failed, and goes on")
            fault = self.fault()
            if (fault is None) is not was_usable:
                was_usable = fault is None
                _logger.log(logging.INFO if was_usable else logging.ERROR, "%s", fault or "the server answers again")

    def _take_snapshot(self, info: ServerInfo) -> None:
        tables = {name: info.tables[name] for name in self._order}
        self._snapshots.append(ServerSnapshot(tables, tuple(self._watch.update(info)), info.at))


def _rates(before: ServerSnapshot, after: ServerSnapshot, name: str) -> tuple[float, float]:
    if name not in before.tables:
        return 0.0, 0.0
    return rates(before.tables[name], after.tables[name], after.at - before.at)
