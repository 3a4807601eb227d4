"""One of two shards is killed: how long until reads go on, the writer is done with it, and the shard is back.

Its server is started as shards on Ray are, without Ray: what Ray adds is the start of an actor for each server.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

import reverb_writer as rw
from benchmarks.comparison import Effort, progress
from benchmarks.processes import TABLE
from benchmarks.report import Table
from reverb_writer.ray.shard_actor import ChildEnd, ServerChild
from reverb_writer.writing.stream_options import StreamKeywords

_SIZES = [int(float(size) * 1e9) for size in os.environ.get("REVERB_WRITER_FAILOVER_GB", "0.01,1").split(",")]
_ITEM_BYTES = 1_000_000
_PATIENCE_S = 1.0
_LONGEST_S = 300.0


def failover(effort: Effort) -> Table:
    """Medians of `rounds` kills, for shards of 10 MB and of 1 GB."""
    rows = []
    for size in _SIZES:
        taken = list(_kills(size, effort.rounds))
        figures = [f"{statistics.median(times):.1f} ({max(times):.1f})" for times in zip(*taken, strict=True)]
        rows.append([f"{size / 1e9:g} GB", *figures])
    return Table(
        f"A shard is killed: medians of {effort.rounds} (and the longest), seconds",
        [
            "in the shard",
            "until the next batch",
            "until all items of the writer go to the other one",
            "until it serves again",
        ],
        rows,
        f"Two shards on this machine; the writer's `patience_s` is {_PATIENCE_S:g}. It is done when it has given "
        "the shard up and the other one has confirmed its items. What is in the shard does not compress. It serves "
        "again when its items are restored and can be sampled.",
    )


def _kills(size: int, rounds: int) -> Iterator[tuple[float, float, float]]:
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        shards = [stack.enter_context(contextlib.closing(_Shard(Path(folder) / name / "c"))) for name in ("a", "b")]
        addresses = [f"localhost:{shard.port}" for shard in shards]
        noise = np.random.default_rng(0)
        for address, num_bytes in zip(addresses, (size, _ITEM_BYTES), strict=True):
            with rw.Client(address, timeout_s=_LONGEST_S) as client:
                for _ in range(num_bytes // _ITEM_BYTES):
                    client.insert({"x": noise.integers(0, 255, (1, _ITEM_BYTES), np.uint8)}, {TABLE: 1.0})
                client.checkpoint()
        progress(f"{size / 1e9:g} GB are saved")
        for _ in range(rounds):
            times = _kill(shards[0], addresses)
            progress(" ".join(f"{one:.2f}" for one in times))
            yield times


def _kill(shard: _Shard, addresses: list[str]) -> tuple[float, float, float]:
    """Kill the first shard while one thread reads and one writes."""
    batches: list[float] = []
    moved: list[float] = []
    stop = threading.Event()

    def read() -> None:
        with rw.ReplayDataset(addresses, TABLE, 1, timeout_s=_LONGEST_S, max_in_flight_batches=2) as dataset:
            while not stop.is_set():
                next(dataset)
                batches.append(time.monotonic())

    def write() -> None:
        options: StreamKeywords = {"patience_s": _PATIENCE_S, "timeout_s": _LONGEST_S}
        with rw.TrajectoryObserver(addresses, "written", 2, **options) as observer:
            while not moved:
                for step in range(4):
                    observer({"n": np.int64(step)}, end_of_episode=step == 3)
                time.sleep(0.01)
                if observer.stats().lost_shards:
                    observer.flush()
                    moved.append(time.monotonic())

    threads = [threading.Thread(target=work) for work in (read, write)]
    for thread in threads:
        thread.start()
    _until(lambda: len(batches) > 10)
    time.sleep(0.5)
    pid = shard.child.pid
    assert pid is not None
    killed_at = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    _until(lambda: shard.child.pid not in (None, pid) and shard.serves())
    with rw.Client(addresses[0], timeout_s=_LONGEST_S) as client:
        next(iter(client.sample(TABLE, 1)))
    back_at = time.monotonic()
    _until(lambda: bool(moved))
    stop.set()
    for thread in threads:
        thread.join()
    gap_s = max(after - before for before, after in itertools.pairwise(batches) if after > killed_at)
    return gap_s, moved[0] - killed_at, back_at - killed_at


class _Shard:
    """A server with checkpoints in a folder; another one follows it until it is closed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.child = self._start(0)
        _until(self.serves)
        self.port = self.child.port

    def serves(self) -> bool:
        return self.child.port > 0

    def close(self) -> None:
        self.child.stop()
        _until(lambda: self.child.end is not None)

    def _start(self, port: int) -> ServerChild:
        tables = "".join(f"[tables.{name}]\nmax_size = 1_000_000\n" for name in (TABLE, "written"))
        configuration = f'[checkpoints]\ndirectory = "{self._folder}"\nevery_s = 0\n{tables}'
        return ServerChild(sys.executable, configuration, ["--port", str(port)], self._ended)

    def _ended(self, _: ServerChild, end: ChildEnd) -> None:
        if end.state != "stopped":
            self.child = self._start(self.port)


def _until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + _LONGEST_S
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"it has not come true within {_LONGEST_S:g} s")
        time.sleep(0.005)
