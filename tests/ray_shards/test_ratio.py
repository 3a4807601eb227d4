"""Rate limiters of shards on Ray: together they keep the ratio that one table would, also when a shard is lost."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from waiting import eventually

import reverb_writer as rw
import reverb_writer.ray as rwr
from reverb_writer.tables.table_info import RateLimiterInfo

Start = Callable[..., rwr.ReplayCluster]

# 2 x 20 = 40 samples are the middle; the two shards have half of it each.
TABLE = rw.TableConfig("replay", 100_000, rate_limiter=rw.SampleToInsertRatio(2.0, min_size=20, error_buffer=32.0))


def test_samples_per_insert_stays_in_its_bounds_when_a_shard_is_lost(start: Start, tmp_path: Path) -> None:
    cluster = start("bounded", [TABLE], checkpoints=str(tmp_path))
    source, may_end = cluster.target(), threading.Event()
    first, second = [shard.name for shard in source.look_up(10).shards]
    actors = [threading.Thread(target=write, args=(source, number, may_end), daemon=True) for number in range(4)]
    for actor in actors:
        actor.start()
    with rw.ReplayDataset(source, "replay", 4, max_in_flight_batches=1, timeout_s=60) as dataset:
        read(dataset, lambda: all(one.num_samples > 100 for one in limiters_of(cluster).values()))
        for shard in source.look_up(10).shards:
            with rw.Client(shard.address, timeout_s=60) as client:
                client.checkpoint()
        victim = cluster.status().shards[0]
        assert victim.pid is not None
        os.kill(victim.pid, signal.SIGKILL)
        other = limiters_of(cluster)[second].num_samples
        read(dataset, lambda: limiters_of(cluster)[second].num_samples > other + 100)
        eventually(lambda: cluster.status().is_serving, "the shard is back")
        restored = limiters_of(cluster)[first].num_samples
        assert restored > 0
        read(dataset, lambda: limiters_of(cluster)[first].num_samples > restored + 100)
        may_end.set()
        while any(actor.is_alive() for actor in actors):  # their last items wait for samples
            dataset.poll(0.1)
    found = limiters_of(cluster).values()
    assert (sum(one.min_diff for one in found), sum(one.max_diff for one in found)) == (8.0, 72.0)
    assert 8 <= sum(2 * one.num_inserts - one.num_samples for one in found) <= 72


def write(source: Any, number: int, may_end: threading.Event) -> None:
    options: Any = {"patience_s": 1.0, "timeout_s": 60, "max_in_flight_items": 8}
    with rw.TrajectoryObserver(source, "replay", 1, **options) as observer:
        for step in itertools.count():
            observer({"number": np.int64(step)}, end_of_episode=step % 3 == 2)
            if may_end.is_set() and step % 3 == 2:
                break


def read(dataset: rw.ReplayDataset, is_enough: Callable[[], bool]) -> None:
    """Read batches, and check the bounds, until it is enough."""
    while not is_enough():
        for _ in range(5):
            next(dataset)


def limiters_of(cluster: rwr.ReplayCluster) -> dict[str, RateLimiterInfo]:
    """Return the rate limiters of the shards that answer, by name; each is within its bounds."""
    found = {}
    for shard in cluster.target().look_up(10).shards:
        with rw.Client(shard.address, timeout_s=2) as client:
            try:
                one = client.server_info()["replay"].rate_limiter
            except (rw.errors.ServerUnavailableError, rw.errors.ReplayTimeoutError):
                continue
        if one.num_samples:  # until there are `min_size` items, nothing is sampled, and all is inserted
            assert one.min_diff <= one.diff <= one.max_diff
        found[shard.name] = one
    return found
