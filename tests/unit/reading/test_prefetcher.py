"""Batches of the thread that fetches, from a feed that a test plays."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import sampled
from shard_feeds import table_info
from waiting import eventually

from reverb_writer.background import Flag
from reverb_writer.decoding.table_structure import TableStructure
from reverb_writer.protocol.responses import SampleReassembler
from reverb_writer.reading.prefetcher import Prefetcher, Ready
from reverb_writer.reading.read_options import ReadOptions
from reverb_writer.reading.whole_samples import WholeSamples


class Played:
    """A feed whose samples have arrived."""

    removes_items = is_starved = False
    num_in_flight = num_waiting = num_for_batch = 0
    heard_at = 0.0

    def __init__(self, num_samples: int) -> None:
        self.changed, self.tables = Flag(), [table_info()]
        self.samples = SampleReassembler().feed(
            sampled.response(
                *[
                    (sampled.together(key, [key], [(0, 1)], 1), [sampled.chunk(key, [np.array([key])])])
                    for key in range(1, num_samples + 1)
                ]
            )
        )
        self.when_asked = list[Any]()  # functions that the next questions whether it is done call

    @property
    def is_done(self) -> bool:
        if self.when_asked:
            self.when_asked.pop()()
        return False

    def proceed(self, now: float, num_held: int) -> tuple[float, list[Any]]:  # noqa: ARG002  # as the real one
        return math.inf, []

    def take(self, num_samples: int, *, rest: bool) -> Any:  # noqa: ARG002  # as the real one
        taken, self.samples = self.samples[:num_samples], self.samples[num_samples:]
        return taken

    def end_batch(self) -> str:
        return ""

    def stop_requests(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def test_a_poll_that_has_got_a_batch_leaves_no_short_batch_behind() -> None:
    feed: Any = Played(6)
    prefetcher = Prefetcher(feed, WholeSamples(4), 4, ReadOptions(), TableStructure("replay", None))
    got: list[Ready] = []
    asked = Flag()

    def poll_returns() -> None:
        got.append(prefetcher._ready.popleft())
        prefetcher._request = None
        asked.set()

    try:
        prefetcher.start(())
        eventually(lambda: prefetcher._ready and prefetcher.num_for_batch == 2)
        # A poll gets the batch of four at the moment in which the thread has seen its request.
        feed.when_asked.append(poll_returns)
        prefetcher._request = Flag()
        feed.changed.set()
        assert asked.wait(60)
        eventually(lambda: not feed.changed.is_set())
        assert [len(ready.batch.info) for ready in got] == [4]
        assert prefetcher.pop() is None
        assert prefetcher.num_for_batch == 2
        rest = prefetcher.pop_rest()
        assert rest is not None
        assert len(rest.batch.info) == 2
    finally:
        prefetcher.stop(discards=True)
        prefetcher.join(60)
