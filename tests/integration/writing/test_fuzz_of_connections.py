"""Random observers on one to three servers whose connections are cut and muted: no window twice, none lost uncounted.

A test prints its seed. REVERB_WRITER_SEED=N repeats the programs of that seed, though not the moments of their faults.
"""

from __future__ import annotations

import collections
import contextlib
import random
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from reading import column_at, fifo
from server_process import StartServer
from weather import Weather, first_seed, lines_to

import reverb_writer as rw
from reverb_writer.rows import PADDING
from reverb_writer.windows import EndOfEpisode, WindowSpec

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:`stride_length`"),
    pytest.mark.only_server("reverb", "local", "connections inside a process are not cut"),
]

ENV = 1_000_000  # steps are numbered from this on times the environment's number, so that zeros are padding
Window = tuple[int, ...]
WRITES_S = 4.0


class Lost(Exception):  # noqa: N818  # no error of the test
    """Of a priority function."""


def priority_of(window: Any, kinds: npt.NDArray[np.uint8]) -> float:
    """Return the mean of the real steps; fail if it is a multiple of seven."""
    mean = float(window["n"][kinds != PADDING].mean())
    if mean % 7 == 0:
        raise Lost
    return mean


class Program:
    """A random observer, what it writes, and what should come of it."""

    def __init__(self, chance: random.Random, tables: Sequence[str]) -> None:
        self._chance, self._tables = chance, tables
        self.kind = chance.choice(
            [rw.TrajectoryObserver, rw.TrajectoryObserver, rw.SequenceObserver, rw.EpisodeObserver]
        )
        self.num_envs = chance.choice([None, 1, 2, 4])
        length, stride = chance.randint(1, 5), chance.randint(1, 6)
        modes = [mode for mode in EndOfEpisode if mode.value in ("drop", "pad", "tile") or stride <= length]
        self.spec = WindowSpec(length, stride, chance.choice(modes))
        if self.kind is rw.EpisodeObserver:
            self.spec = WindowSpec.whole_episode()
        self.priority: Any = priority_of if chance.random() < 1 / 2 else 1.5
        self.options = {
            "max_in_flight_items": chance.choice([None, 1, 7, 100]),
            "max_delay_s": chance.choice([0.02, 0.5]),
            "chunk_length": chance.choice([None, 1, 4]),
            "patience_s": 1.5,
            "timeout_s": 60.0,
        }
        self.episodes: list[list[int]] = []
        self._open: list[list[int]] = [[] for _ in range(self.num_envs or 1)]
        self._next = [ENV * (env + 1) for env in range(self.num_envs or 1)]

    def open(self, replay: Any) -> Any:
        options = {**self.options, "num_envs": self.num_envs, "priority": self.priority}
        if self.kind is rw.EpisodeObserver:
            return rw.EpisodeObserver(replay, self._tables, 1000, **options)
        length, stride = self.spec.sequence_length or 0, self.spec.stride_length
        end = self.spec.end_of_episode
        return self.kind(replay, self._tables, length, stride, end_of_episode=end, **options)

    def step(self, observer: Any, *, is_last: bool | None = None) -> None:
        """Write a step of each environment; `is_last` for all, or at random."""
        lasts = [self._chance.random() < 0.15 if is_last is None else is_last for _ in self._open]
        numbers = list(self._next)
        if self.num_envs is None:
            observer({"n": np.int64(numbers[0])}, end_of_episode=lasts[0])
        else:
            observer({"n": np.array(numbers)}, end_of_episode=np.array(lasts))
        for env, is_end in enumerate(lasts):
            self._next[env] += 1
            self._open[env].append(numbers[env])
            if is_end and self.kind is not rw.SequenceObserver:
                self._end(env)

    def end(self, observer: Any) -> None:
        """End all episodes, or the streams of a `SequenceObserver`."""
        if self.kind is not rw.SequenceObserver:
            self.step(observer, is_last=True)
            return
        observer.reset(discard=True)
        for env in range(len(self._open)):
            self._end(env)

    def _end(self, env: int) -> None:
        self.episodes.append(self._open[env])
        self._open[env] = []

    def windows(self) -> collections.Counter[Window]:
        """Return the windows that should be stored, without those whose priority function fails."""
        found: collections.Counter[Window] = collections.Counter()
        for episode in self.episodes:
            n = len(episode)
            spanning = self.kind is rw.SequenceObserver
            for start, stop in self.spec.spanning_windows(n) if spanning else self.spec.windows(n):
                real = episode[start:stop]
                if self.priority is priority_of and sum(real) / len(real) % 7 == 0:
                    continue
                found[(*real, *[0] * (stop - max(start, n)))] += 1
        return found

    def is_window_of_a_cut_episode(self, window: Window) -> bool:
        """Return whether a window has the form that windows have if their episode may be cut anywhere."""
        real = [number for number in window if number]
        episode = next(episode for episode in self.episodes if real[0] in episode)
        start = episode.index(real[0])
        length = self.spec.sequence_length
        has_length = length is None or len(window) == length or self.spec.end_of_episode is EndOfEpisode.TRUNCATE
        return has_length and real == episode[start : start + len(real)] and not any(window[len(real) :])


@pytest.mark.parametrize("number", range(8))
def test_no_window_is_stored_twice_or_lost_uncounted(replay_server: StartServer, number: int) -> None:
    first = first_seed()
    chance = random.Random(f"{first} {number}")  # noqa: S311  # no secrets
    tables = ["a", "b"][: chance.randint(1, 2)]
    program = Program(chance, tables)
    with lines_to(replay_server, [*map(fifo, tables)], chance.randint(1, 3)) as (addresses, lines):
        replay = [line.address for line in lines] if len(lines) > 1 else lines[0].address
        with program.open(replay) as observer:
            with contextlib.closing(Weather(lines, random.Random(first))):  # noqa: S311
                end = time.monotonic() + WRITES_S
                while time.monotonic() < end:
                    program.step(observer)
                    if chance.random() < 0.1:
                        time.sleep(chance.uniform(0, 0.05))
            program.end(observer)
            observer.flush()
        stats = observer.stats()
        stored = {
            table: collections.Counter(tuple(window) for address in addresses for window in column_at(address, table))
            for table in tables
        }
    expected = program.windows()
    print(program.kind.__name__, program.spec, program.num_envs, program.options, f"{len(lines)} servers", vars(stats))

    assert stats.pending_items == 0
    assert stats.items == stats.acknowledged_items + stats.dropped_items
    num_stored = sum(found.total() for found in stored.values())
    assert stats.acknowledged_items <= num_stored <= stats.items - stats.failed_priorities
    for found in stored.values():
        assert max(found.values(), default=1) == 1
    # A stream that spans episodes has no end: after a thousand items it is cut, so that another server gets the next.
    is_cut = program.kind is rw.SequenceObserver and len(lines) > 1 and stats.items >= 1000
    if stats.lost_shards or is_cut:
        assert len(lines) > 1
        assert all(program.is_window_of_a_cut_episode(window) for found in stored.values() for window in found)
        assert num_stored <= stats.acknowledged_items + stats.unconfirmed_items
    else:
        assert all(found == expected for found in stored.values())
        assert stats.dropped_items == stats.failed_priorities
