"""Whole items: sequences of tokens and wide rows, put by one process and got by another, beside other transports.

Items are put in batches: a batch is finished when the transport has confirmed it. Then the other process gets all of
them, each for the first time. At last both are busy at once.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from benchmarks.comparison import Effort, progress
from benchmarks.item_peers import Queue, Redis, TransferQueue
from benchmarks.item_transports import MAX_BATCH, Items, Ours, OursOnLocal, Place, RawStream, Transport
from benchmarks.processes import Remote
from benchmarks.report import Table

if TYPE_CHECKING:
    from typing_extensions import Self

_BATCHES = (16, MAX_BATCH)
_NUM_DISTINCT = MAX_BATCH
_ITEMS_PER_SECOND = 512  # of a turn, which counts items because all of them are in memory at once
_KINDS: tuple[type[Transport], ...] = (Ours, OursOnLocal, TransferQueue, Redis, Queue, RawStream)


class _Verb(NamedTuple):
    """What a turn has measured: items a second, and CPU time of all processes per item, in microseconds."""

    items_per_s: float
    cpu_us: float


def _sequences() -> Items:
    """Return sequences of 1,024 to 8,192 tokens with their log-probabilities: 37 kB on average, uncompressible."""
    rng = np.random.default_rng(0)
    return [
        {
            "tokens": rng.integers(0, 150_000, length).astype(np.int32),
            "log_probs": rng.standard_normal(length).astype(np.float32),
        }
        for length in rng.integers(1024, 8193, _NUM_DISTINCT)
    ]


def _fields() -> Items:
    """Return the items of TransferQueue's own performance test: nine fields of 8,192 values."""
    rng = np.random.default_rng(0)
    return [
        {f"field_{number}": rng.standard_normal(8192).astype(np.float32) for number in range(9)}
        for _ in range(_NUM_DISTINCT)
    ]


def items_sequences(effort: Effort) -> Table:
    """Sequences of tokens with log-probabilities, put and got, beside other transports."""
    return _measure("Sequences of 1,024 to 8,192 tokens with log-probabilities", _sequences, effort)


def items_fields(effort: Effort) -> Table:
    """Nine fields of 8,192 values, put and got, beside other transports."""
    return _measure("Nine fields of 8,192 float32", _fields, effort)


def _measure(title: str, make: Callable[[], Items], effort: Effort) -> Table:
    num_items = max(int(effort.seconds * _ITEMS_PER_SECOND) // MAX_BATCH, 1) * MAX_BATCH
    kinds = []
    for kind in _KINDS:
        if missing := kind.missing():
            print(f"  {kind.name} is left out: it needs {missing}", file=sys.stderr, flush=True)
        else:
            kinds.append(kind)
    turns: dict[tuple[str, int], list[dict[str, Any]]] = {(kind.name, b): [] for b in _BATCHES for kind in kinds}
    for i in range(effort.rounds):
        for kind in kinds:
            with kind.serve() as place, _Pair(kind, make, place) as pair:
                for batch in _BATCHES:
                    turns[kind.name, batch].append(pair.turn(num_items, batch))
            progress(f"round {i + 1} of {effort.rounds}: {kind.name}")
    rows = []
    for (name, batch), found in turns.items():
        cells = []
        for verb in ("put", "get", "both"):
            runs = [turn[verb] for turn in found if verb in turn]
            cells += [f"{median(of):,.0f}" for of in zip(*runs, strict=True)] or ["", ""]
        peaks = [f"{max(turn[who] for turn in found) >> 20:,}" for who in ("writer", "reader")]
        rows.append([name, str(batch), *cells, *peaks])
    columns = ["transport", "batch", "put/s", "us", "get/s", "us", "both/s", "us", "writer, MiB", "reader, MiB"]
    return Table(
        title,
        columns,
        rows,
        f"{num_items} items a turn. us is the CPU time of writer, reader and servers per item. MiB are the peaks of "
        "the client processes' memory. A multiprocessing.Queue has no server: writer and reader are busy together.",
    )


class _Pair:
    """A writer and a reader of one transport, each in its own process."""

    def __init__(self, kind: type[Transport], make: Callable[[], Items], place: Place) -> None:
        """Start both; the first items, which connect them, are not measured."""
        self._is_direct, self._place = kind.is_direct, place
        with contextlib.ExitStack() as processes:
            self._writer = processes.enter_context(Remote(kind, make, place.address))
            self._reader = processes.enter_context(Remote(kind, make, place.address))
            self.turn(MAX_BATCH, MAX_BATCH)
            self._processes = processes.pop_all()

    def turn(self, num_items: int, batch: int) -> dict[str, Any]:
        """Put, get, and do both at once; return what was measured, and the peaks of memory."""
        found: dict[str, Any] = {}
        if not self._is_direct:
            found["put"] = self._measured(self._put, num_items, batch)
            found["get"] = self._measured(self._get, num_items, batch)
        found["both"] = self._measured(self._both, num_items, batch)
        return {**found, "writer": self._writer.call("peak_bytes"), "reader": self._reader.call("peak_bytes")}

    def _measured(self, work: Callable[[int, int], float], num_items: int, batch: int) -> _Verb:
        before = self._cpu_s()
        seconds = work(num_items, batch)
        return _Verb(num_items / seconds, (self._cpu_s() - before) / num_items * 1e6)

    def _put(self, num_items: int, batch: int) -> float:
        start, end = self._writer.call("put", num_items, batch)
        return float(end - start)

    def _get(self, num_items: int, batch: int) -> float:
        self._reader.call("open_reader", batch)
        start, end = self._reader.call("get", num_items, batch)
        return float(end - start)

    def _both(self, num_items: int, batch: int) -> float:
        self._reader.call("open_reader", batch)
        self._reader.start("get", num_items, batch)
        start, _ = self._writer.call("put", num_items, batch)
        _, end = self._reader.result()
        return float(end - start)

    def _cpu_s(self) -> float:
        return sum((self._writer.cpu_s(), self._reader.cpu_s(), self._place.cpu_s()))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._processes.close()
