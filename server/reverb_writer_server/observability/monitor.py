"""Snapshots of a server's tables, taken every two seconds, and how long inserts or samples have been blocked."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import reverb_writer as rw
from reverb_writer.rate_limits import Standstill, StandstillDetector, figures, rates
from reverb_writer.table_info import ServerInfo, TableInfo

__all__ = ["Monitor", "ServerSnapshot"]

_logger = logging.getLogger(__name__)
_EVERY_S = 2.0
_HISTORY = 300  # snapshots, ten minutes
_ANSWER_TIMEOUT_S = 5.0


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

    Attributes:
        client: its client; other threads may use it too.
    """

    def __init__(self, address: str, order: Sequence[str]) -> None:
        """Take the first snapshot and start the thread.

        Args:
            address: address of the server.
            order: names of the tables, in the order in which they are reported.
        """
        self._order = order
        self.client = rw.Client(address, timeout_s=_ANSWER_TIMEOUT_S)
        self._watch = StandstillDetector()
        self._snapshots: deque[ServerSnapshot] = deque(maxlen=_HISTORY)
        self._closed = threading.Event()
        self._take_snapshot(self.client.request_info())
        self._thread = threading.Thread(target=self._run, name="monitor", daemon=True)
        self._thread.start()

    def latest(self) -> ServerSnapshot:
        """Return the last snapshot."""
        return self._snapshots[-1]

    def answers(self, timeout_s: float) -> bool:
        """Return whether the server answers now."""
        try:
            self.client.server_info(timeout_s)
        except rw.ReverbWriterError:
            return False
        return True

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
        while not self._closed.wait(_EVERY_S):
            try:
                self._take_snapshot(self.client.request_info())
            except rw.ReverbWriterError as error:
                _logger.warning("the server does not answer its own monitor: %s", error)

    def _take_snapshot(self, info: ServerInfo) -> None:
        tables = {name: info.tables[name] for name in self._order}
        self._snapshots.append(ServerSnapshot(tables, tuple(self._watch.update(info)), info.at))


def _rates(before: ServerSnapshot, after: ServerSnapshot, name: str) -> tuple[float, float]:
    if name not in before.tables:
        return 0.0, 0.0
    return rates(before.tables[name], after.tables[name], after.at - before.at)
