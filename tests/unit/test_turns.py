"""Who is asked for the next batch, when several have one."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from reverb_writer.reading.prefetch import Fetched
from reverb_writer.reading.stats import PrefetchStats
from reverb_writer.reading.turns import Turns
from reverb_writer.wire.samples import SampleInfos


class Ready:
    """A source that always has a batch, of one item with its key."""

    gone_since: float | None = None
    is_forked = has_ended = False

    def __init__(self, key: int) -> None:
        self.key = key

    def take(self, *, partial: bool = False) -> Fetched:  # noqa: ARG002  # as sources do
        numbers = np.zeros(1)
        infos = SampleInfos(
            np.array([self.key], np.uint64), numbers, numbers, numbers.astype(np.int64), numbers.astype(np.int32)
        )
        return Fetched([], infos, 0.0)

    def check_usable(self) -> None:
        pass

    def why_waiting(self) -> str:
        return ""

    def stats(self) -> PrefetchStats:
        return PrefetchStats()

    def close(self, drain_s: float = 0.0) -> None:
        pass


def test_servers_take_turns_and_so_do_the_workers_of_each() -> None:
    def start(_: Callable[[], None]) -> list[list[Ready]]:
        return [[Ready(10), Ready(11)], [Ready(20), Ready(21), Ready(22)]]

    turns = Turns("replay", 1, start)
    taken = []
    for _ in range(8):
        fetched = turns.next(0.0, 1.0)
        assert fetched is not None
        taken.append((turns.latest, int(fetched.infos.keys[0])))
    assert taken == [(0, 10), (1, 20), (0, 11), (1, 21), (0, 10), (1, 22), (0, 11), (1, 20)]
