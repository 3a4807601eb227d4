"""Short pieces of work in one process, timed in turn: A B C A B C ...

A machine that others use changes its speed from one moment to the next. So what counts is the time on the CPU, and each
turn, a few milliseconds, is compared with those of the others beside it; of that the median.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from benchmarks.comparison import Effort

_TURN_S = 0.01


class Turns:
    """The measured times."""

    def __init__(self, seconds: Mapping[str, list[float]]) -> None:
        """Take the seconds of each turn."""
        self._seconds: dict[str, npt.NDArray[np.float64]] = {name: np.array(of) for name, of in seconds.items()}

    def micros(self, name: str) -> float:
        """Return how long a piece of work takes, in microseconds."""
        return float(np.median(self._seconds[name]) * 1e6)

    def times(self, name: str, other: str) -> float:
        """Return how many times as long as another it takes."""
        return float(np.median(self._seconds[name] / self._seconds[other]))


def in_turn(works: Mapping[str, Callable[[int], object]], effort: Effort) -> Turns:
    """Have each `work(n)` do something n times, in turn, for as long as the effort's rounds and seconds together."""
    counts = {name: _count(work) for name, work in works.items()}
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(max(3, int(effort.rounds * effort.seconds / _TURN_S / len(works)))):
        for name, work in works.items():
            start = time.thread_time()
            work(counts[name])
            seconds[name].append((time.thread_time() - start) / counts[name])
    return Turns(seconds)


def _count(work: Callable[[int], object]) -> int:
    """Return how often a piece of work can be done in a turn."""
    count = 1
    while True:
        start = time.thread_time()
        work(count)
        if (spent_s := time.thread_time() - start) > _TURN_S / 4:
            return max(1, int(count * _TURN_S / spent_s))
        count *= 2
