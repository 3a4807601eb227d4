"""Whole items: sequences of tokens and wide rows, put by one process and got by another, beside other transports.

Items are put in batches: a batch is finished when the transport has confirmed it. Then the other process gets all of
them, each for the first time.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import pickle
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from statistics import median
from typing import Any

import numpy as np

import reverb_writer as rw
from benchmarks.comparison import Effort, progress
from benchmarks.processes import TABLE, Remote, Server
from benchmarks.report import Table

_BATCHES = (16, 256)
_NUM_DISTINCT = 128
_ITEMS_PER_SECOND = 512  # of a turn, which counts items because all of them are in memory at once
_START_S = 30.0

_Items = list[dict[str, Any]]


def _sequences() -> _Items:
    """Return sequences of 1,024 to 8,192 tokens with their log-probabilities: 37 kB on average, uncompressible."""
    rng = np.random.default_rng(0)
    return [
        {
            "tokens": rng.integers(0, 150_000, length).astype(np.int32),
            "log_probs": rng.standard_normal(length).astype(np.float32),
        }
        for length in rng.integers(1024, 8193, _NUM_DISTINCT)
    ]


def _fields() -> _Items:
    """Return the items of TransferQueue's own performance test: nine fields of 8,192 values."""
    rng = np.random.default_rng(0)
    return [
        {f"field_{number}": rng.standard_normal(8192).astype(np.float32) for number in range(9)}
        for _ in range(_NUM_DISTINCT)
    ]


def items_sequences(effort: Effort) -> Table:
    """Sequences of tokens."""
    return _measure("Sequences of 1,024 to 8,192 tokens with log-probabilities", _sequences, effort)


def items_fields(effort: Effort) -> Table:
    """Nine fields of 8,192 values."""
    return _measure("Nine fields of 8,192 float32", _fields, effort)


def _measure(title: str, make: Callable[[], _Items], effort: Effort) -> Table:
    num_items = max(int(effort.seconds * _ITEMS_PER_SECOND) // max(_BATCHES), 1) * max(_BATCHES)
    rows = []
    kinds: list[type[_Transport]] = [_ItemWriter, _Insert, _Queue]
    if _has_redis():
        kinds.append(_Redis)
    for batch in _BATCHES:
        figures: dict[str, list[tuple[float, ...]]] = {kind.name: [] for kind in kinds}
        for i in range(effort.rounds):
            for kind in kinds:
                with kind.serve() as place, Remote(kind, make, place) as writer, Remote(kind, make, place) as reader:
                    figures[kind.name].append(_turn(kind, writer, reader, num_items, batch))
            progress(f"batches of {batch}: round {i + 1} of {effort.rounds}")
        for name, of in figures.items():
            put, put_us, get, get_us = map(median, zip(*of, strict=True))
            rows.append(
                [f"{name}, batches of {batch}", f"{put:,.0f}", f"{put_us:,.0f}", f"{get:,.0f}", f"{get_us:,.0f}"]
            )
    return Table(
        title,
        ["transport", "put/s", "CPU us", "get/s", "CPU us"],
        rows,
        f"{num_items} items a turn. CPU is the client process's alone, per item. A multiprocessing.Queue has no "
        "server: writer and reader run together, and both figures are of the same time.",
    )


def _turn(kind: type[_Transport], writer: Remote, reader: Remote, num_items: int, batch: int) -> tuple[float, ...]:
    """Return the speed and the CPU time of putting, and of getting."""
    cpu = writer.cpu_s(), reader.cpu_s()
    if kind.is_direct:
        reader.start("get", num_items, batch)
    put_s = writer.call("put", num_items, batch)
    if not kind.is_direct:
        reader.start("get", num_items, batch)
    get_s = reader.result()
    put_us, get_us = (
        (process.cpu_s() - before) / num_items * 1e6 for process, before in zip((writer, reader), cpu, strict=True)
    )
    return num_items / put_s, put_us, num_items / get_s, get_us


class _Transport:
    """A way from one process to another, as each of them uses it."""

    name = ""
    is_direct = False  # whether the reader must be there when the writer writes

    def __init__(self, make: Callable[[], _Items], place: Any) -> None:
        self._items, self._place = make(), place

    @classmethod
    @contextlib.contextmanager
    def serve(cls) -> Iterator[Any]:
        """Start the server; yield its place."""
        with Server(sampler="fifo", max_times_sampled=1) as server:
            yield server.address

    def put(self, num_items: int, batch: int) -> float:
        """Put items in batches; return the seconds until the last one is confirmed."""
        start = time.perf_counter()
        for at in range(0, num_items, batch):
            self.put_batch([self._items[number % _NUM_DISTINCT] for number in range(at, at + batch)])
        return time.perf_counter() - start

    def get(self, num_items: int, batch: int) -> float:
        """Get items in batches; return the seconds that it takes."""
        start = time.perf_counter()
        self.get_all(num_items, batch)
        return time.perf_counter() - start

    def put_batch(self, items: _Items) -> None:
        raise NotImplementedError

    def get_all(self, num_items: int, batch: int) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """Release what the process holds."""


class _ItemWriter(_Transport):
    name = "ItemWriter, ReplayDataset(collate='pad')"

    def __init__(self, make: Callable[[], _Items], place: Any) -> None:
        super().__init__(make, place)
        self._writer = rw.ItemWriter(place, TABLE)

    def put_batch(self, items: _Items) -> None:
        for item in items:
            self._writer.write(item)
        self._writer.flush()

    def get_all(self, num_items: int, batch: int) -> None:
        with rw.ReplayDataset(self._place, TABLE, batch, collate="pad") as dataset:
            for _ in range(num_items // batch):
                next(dataset)

    def close(self) -> None:
        self._writer.close()


class _Insert(_ItemWriter):
    name = "Client.insert, ReplayDataset(collate='pad')"

    def __init__(self, make: Callable[[], _Items], place: Any) -> None:
        super().__init__(make, place)
        self._client = rw.Client(place)

    def put_batch(self, items: _Items) -> None:
        for item in items:
            self._client.insert(item, {TABLE: 1.0})

    def close(self) -> None:
        self._client.close()
        super().close()


class _Queue(_Transport):
    name = "multiprocessing.Queue"
    is_direct = True

    @classmethod
    @contextlib.contextmanager
    def serve(cls) -> Iterator[Any]:
        yield multiprocessing.get_context("spawn").Queue(max(_BATCHES))

    def put_batch(self, items: _Items) -> None:
        for item in items:
            self._place.put(item)

    def get_all(self, num_items: int, batch: int) -> None:
        for _ in range(num_items // batch):
            _collate([self._place.get() for _ in range(batch)])


class _Redis(_Transport):
    name = "Redis and pickle"

    def __init__(self, make: Callable[[], _Items], place: Any) -> None:
        import redis

        super().__init__(make, place)
        self._redis = redis.Redis(port=place)

    @classmethod
    @contextlib.contextmanager
    def serve(cls) -> Iterator[Any]:
        with socket.create_server(("localhost", 0)) as free:
            port = free.getsockname()[1]
        with tempfile.TemporaryDirectory() as folder:
            line = ["redis-server", "--port", str(port), "--save", "", "--dir", folder]
            server = subprocess.Popen(line, stdout=subprocess.DEVNULL)
            try:
                end = time.monotonic() + _START_S
                while True:
                    with contextlib.suppress(OSError), socket.create_connection(("localhost", port)):
                        break
                    if time.monotonic() > end:
                        raise TimeoutError(f"redis-server did not listen within {_START_S:.0f} s")
                    time.sleep(0.05)
                yield port
            finally:
                server.terminate()
                server.wait(_START_S)

    def put_batch(self, items: _Items) -> None:
        self._redis.rpush(TABLE, *[pickle.dumps(item, pickle.HIGHEST_PROTOCOL) for item in items])

    def get_all(self, num_items: int, batch: int) -> None:
        for _ in range(num_items // batch):
            _collate([pickle.loads(data) for data in self._redis.lpop(TABLE, batch)])  # noqa: S301  # its own data


def _collate(items: _Items) -> dict[str, Any]:
    """Return items as a padded batch."""
    return {name: _padded([item[name] for item in items]) for name in items[0]}


def _padded(leaves: list[Any]) -> Any:
    """Return the leaves as one array, as a learner needs it."""
    padded = np.zeros((len(leaves), max(map(len, leaves))), leaves[0].dtype)
    for row, leaf in zip(padded, leaves, strict=True):
        row[: len(leaf)] = leaf
    return padded


def _has_redis() -> bool:
    if find_spec("redis") is not None and shutil.which("redis-server") is not None:
        return True
    print("  Redis is not installed: its rows are left out", file=sys.stderr, flush=True)
    return False
