"""Random datasets on one to three servers whose connections are cut and muted: items come once, whole, or are counted.

A test prints its seed. REVERB_WRITER_SEED=N repeats the programs of that seed, though not the moments of their faults.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import random
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from server_process import StartServer
from weather import Weather, first_seed, lines_to

import reverb_writer as rw

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.only_server("reverb", "local", "connections inside a process are not cut"),
]

READS_S, ENDS_WITHIN_S = 4.0, 120.0
NUM_KEPT = 30
ROW_BYTES = {8: 2000, 3000: 600, 70_000: 120, 400_000: 30}
"""Sizes of rows, and how many items a test has of them: small messages, views, and samples in several messages."""


@functools.lru_cache(maxsize=1000)
def noise(number: int, size: int) -> npt.NDArray[np.uint8]:
    """Return the leaf of the row of this number."""
    return np.random.default_rng(number).integers(0, 256, size, np.uint8)


class Program:
    """A random table and dataset, the items of the table, and the batches that were read."""

    def __init__(self, chance: random.Random, *, is_queue: bool) -> None:
        self._chance, self.is_queue = chance, is_queue
        self._row_bytes = chance.choice([*ROW_BYTES])
        self._length, self._chunk_length = chance.randint(1, 4), chance.choice([1, 2, 8])
        samplers: list[Any] = ["uniform", rw.Prioritized(0.7), "fifo"]
        sampler = chance.choice(samplers if is_queue else samplers[:2])
        self.table = rw.TableConfig("t", 10_000, sampler, "fifo", max_times_sampled=int(is_queue))
        self.num_items = ROW_BYTES[self._row_bytes]
        self.options: dict[str, Any] = {
            "batch_size": chance.choice([1, 4, 16]),
            "max_in_flight_batches": chance.choice([1, 2, 8]),
            "max_cache_bytes": chance.choice([1 << 20, 1 << 28]),
        }
        self.seen: collections.Counter[int] = collections.Counter()  # first rows of items
        self.keys: dict[int, int] = {}  # first row of the item of each key that was read
        self._kept: list[tuple[rw.Batch, npt.NDArray[np.int64]]] = []  # last batches, and their numbers

    def write(self, addresses: Sequence[str]) -> None:
        """Write the items, about as many to each server; all rows have different numbers."""
        row = 0
        for number, address in enumerate(addresses):
            num_items = len(range(number, self.num_items, len(addresses)))
            with rw.TrajectoryObserver(
                address, "t", self._length, self._length, chunk_length=self._chunk_length, timeout_s=60
            ) as observer:
                for _ in range(num_items * self._length):
                    observer({"n": np.int64(row), "noise": noise(row, self._row_bytes)}, end_of_episode=False)
                    row += 1

    def take(self, batch: rw.Batch) -> None:
        """Note the items of a batch, and check their rows."""
        numbers = batch.data["n"].copy()
        assert numbers.shape == (len(batch.info), self._length)
        assert (numbers[:, 0] % self._length == 0).all()
        assert (numbers == numbers[:, :1] + np.arange(self._length)).all()
        self.seen.update(numbers[:, 0].tolist())
        for key, first in zip(batch.info.keys.tolist(), numbers[:, 0].tolist(), strict=True):
            assert self.keys.setdefault(key, first) == first
        self._kept.append((batch, numbers))
        if len(self._kept) > NUM_KEPT:
            # A batch is the user's: nothing that is read later changes it.
            self._check(*self._kept.pop(self._chance.randrange(NUM_KEPT)))

    def check_kept(self) -> None:
        """Check the last batches."""
        for kept in self._kept:
            self._check(*kept)

    def _check(self, batch: rw.Batch, numbers: npt.NDArray[np.int64]) -> None:
        assert np.array_equal(batch.data["n"], numbers)
        for rows, leaf in zip(numbers.tolist(), batch.data["noise"], strict=True):
            for row, found in zip(rows, leaf, strict=True):
                assert np.array_equal(found, noise(row, self._row_bytes))


def sizes_at(addresses: Sequence[str]) -> int:
    """Return the number of items at all servers."""
    total = 0
    for address in addresses:
        with rw.Client(address, timeout_s=60) as client:
            total += client.server_info()["t"].current_size
    return total


@contextlib.contextmanager
def reading(start: StartServer, number: int, *, is_queue: bool) -> Iterator[tuple[Program, Any, list[str]]]:
    """Write a program's items; yield it, its dataset after the weather, and the servers' addresses."""
    first = first_seed()
    chance = random.Random(f"{first} {number} {is_queue}")  # noqa: S311  # no secrets
    program = Program(chance, is_queue=is_queue)
    with lines_to(start, [program.table], chance.randint(1, 3)) as (addresses, lines):
        program.write(addresses)
        assert sizes_at(addresses) == program.num_items
        replay: Any = [line.address for line in lines] if len(lines) > 1 else lines[0].address
        with rw.ReplayDataset(replay, "t", timeout_s=60, **program.options) as dataset:
            with contextlib.closing(Weather(lines, random.Random(first))):  # noqa: S311
                end = time.monotonic() + READS_S
                while time.monotonic() < end:
                    batch = dataset.poll(chance.choice([0.0, 0.01, 0.3]))
                    if batch is not None:
                        program.take(batch)
                        if not is_queue:
                            dataset.update_priorities(batch, 1.0 + batch.info.keys % 3)
                    if is_queue or chance.random() < 0.1:
                        time.sleep(chance.uniform(0, 0.05))
            yield program, dataset, addresses
        program.check_kept()
        print(program.table, program.options, program.num_items, f"{len(lines)} servers", vars(dataset.stats()))


@pytest.mark.parametrize("number", range(8))
def test_an_item_of_a_queue_is_given_once_or_counted_as_lost(replay_server: StartServer, number: int) -> None:
    with reading(replay_server, number, is_queue=True) as (program, dataset, addresses):
        end, quiet = time.monotonic() + ENDS_WITHIN_S, 0
        while quiet < 3:
            assert time.monotonic() < end, (sizes_at(addresses), str(vars(dataset.stats())))
            batch = dataset.poll(0.5)
            if batch is not None:
                program.take(batch)
            stats = dataset.stats()
            is_quiet = batch is None and not (stats.in_flight_samples or sizes_at(addresses))
            quiet = quiet + 1 if is_quiet else 0
    stats = dataset.stats()
    assert max(program.seen.values()) == 1
    assert program.seen.total() == stats.samples
    assert (stats.ready_samples, stats.dropped_samples, stats.skipped_samples, stats.foreign_items) == (0, 0, 0, 0)
    assert stats.received_samples == stats.samples
    assert stats.samples <= program.num_items <= stats.samples + stats.lost_samples


@pytest.mark.parametrize("number", range(8))
def test_samples_of_lasting_items_are_whole_and_have_their_keys(replay_server: StartServer, number: int) -> None:
    with reading(replay_server, number, is_queue=False) as (program, dataset, addresses):
        for _ in range(20):
            batch = next(dataset)
            program.take(batch)
            assert len(batch.info) == program.options["batch_size"]
        dataset.update_priorities(batch, np.full(len(batch.info), 7.0))
        dataset.flush_priorities(60)
    stats = dataset.stats()
    assert (stats.skipped_samples, stats.foreign_items) == (0, 0)
    assert stats.samples == program.seen.total()
    found: dict[int, int] = {}
    for address in addresses:
        with rw.Client(address, timeout_s=60) as client:
            size = client.server_info()["t"].current_size
            for sample in client.sample("t", 20 * size):
                found[sample.info.key] = int(sample.data["n"][0])
    assert len(found) > program.num_items / 2
    both = found.keys() & program.keys.keys()
    assert both
    assert {key: found[key] for key in both} == {key: program.keys[key] for key in both}
