"""The line of figures in the log."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
from reverb_writer_server.observability.banner import figures_line
from reverb_writer_server.observability.monitor import ServerSnapshot
from reverb_writer_server.observability.state import ServiceState

import reverb_writer as rw


def snapshot(client: rw.Client, at: float) -> ServerSnapshot:
    return ServerSnapshot(client.server_info(), (), at)


def line(before: ServerSnapshot, latest: ServerSnapshot) -> str:
    """Return the part of the line about the only table."""
    state = ServiceState()
    monitor: Any = types.SimpleNamespace(answers=lambda: True, latest=lambda: latest)  # a monitor that has answers
    state.monitor = monitor
    return figures_line(state, before).partition(";")[0]


def test_rates_are_those_since_the_line_before_and_none_where_they_are_unknown() -> None:
    with rw.LocalServer([rw.TableConfig("replay", 1000)]) as server, rw.Client(server.address) as client:
        empty = snapshot(client, 10.0)
        for _ in range(6):
            client.insert(np.zeros(1), {"replay": 1.0})
        list(client.sample("replay", 2))
        later = snapshot(client, 12.0)
    assert line(ServerSnapshot({}, (), 0.0), empty) == "replay 0/1,000"
    assert line(empty, empty) == "replay 0/1,000"
    assert line(empty, later) == "replay 6/1,000 +3/s -1/s"
