"""What a server is doing, seen every other second, and for how long it has been doing so."""

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

__all__ = ["Monitor", "View"]

_logger = logging.getLogger(__name__)
_EVERY_S = 2.0
_HISTORY = 300  # looks, ten minutes
_ANSWER_WITHIN_S = 5.0


@dataclass(frozen=True)
class View:
    """The server at one look.

    Attributes:
        tables: as it told.
        standstills: the sides that stand still.
        at: `time.monotonic()` of the look.
    """

    tables: Mapping[str, TableInfo]
    standstills: tuple[Standstill, ...]
    at: float


class Monitor:
    """Looks at a server every two seconds, in a thread of its own, until it is closed. Thread-safe.

    Attributes:
        client: its client, which others may use as well.
    """

    def __init__(self, address: str, order: Sequence[str]) -> None:
        """Look once and begin.

        Args:
            address: of the server.
            order: the names of its tables, in the order in which to tell of them.
        """
        self._order = order
        self.client = rw.Client(address, timeout_s=_ANSWER_WITHIN_S)
        self._watch = StandstillDetector()
        self._views: deque[View] = deque(maxlen=_HISTORY)
        self._closed = threading.Event()
        self._look(self.client.request_info())
        self._thread = threading.Thread(target=self._run, name="monitor", daemon=True)
        self._thread.start()

    def latest(self) -> View:
        """Return the last look."""
        return self._views[-1]

    def answers(self, timeout_s: float) -> bool:
        """Return whether the server answers now."""
        try:
            self.client.server_info(timeout_s)
        except rw.ReverbWriterError:
            return False
        return True

    def rates(self, since_s: float) -> dict[str, tuple[float, float]]:
        """Return inserts and samples a second by table, over the last `since_s` seconds."""
        views = list(self._views)
        first = next(view for view in views if view.at >= views[-1].at - since_s)
        return {name: _rates(first, views[-1], name) for name in views[-1].tables}

    def snapshot(self) -> list[dict[str, Any]]:
        """Return each table's figures, rates, history and standstills as JSON scalars."""
        views = list(self._views)
        now = views[-1]
        recent = self.rates(10.0)
        return [
            {
                **figures(table),
                "inserts_per_s": recent[name][0],
                "samples_per_s": recent[name][1],
                "blocked": [dataclasses.asdict(one) for one in now.standstills if one.table == name],
                "history": [
                    [round(after.at - now.at, 1), *(round(rate, 1) for rate in _rates(before, after, name))]
                    for before, after in itertools.pairwise(views)
                    if name in before.tables
                ],
            }
            for name, table in now.tables.items()
        ]

    def close(self) -> None:
        """Stop looking. Idempotent."""
        self._closed.set()
        self._thread.join(2 * _ANSWER_WITHIN_S)
        self.client.close()

    def _run(self) -> None:
        while not self._closed.wait(_EVERY_S):
            try:
                self._look(self.client.request_info())
            except rw.ReverbWriterError as error:
                _logger.warning("the server does not answer its own monitor: %s", error)

    def _look(self, info: ServerInfo) -> None:
        tables = {name: info.tables[name] for name in self._order}
        self._views.append(View(tables, tuple(self._watch.update(info)), info.at))


def _rates(before: View, after: View, name: str) -> tuple[float, float]:
    if name not in before.tables:
        return 0.0, 0.0
    return rates(before.tables[name], after.tables[name], after.at - before.at)
