"""Episodes of numbered steps, and the windows that should become of them.

Steps are numbered from 1 on, so that zeros are padding.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from reading import Place

import reverb_writer as rw

NEEDS_OVERLAP = (rw.EndOfEpisode.COVER, rw.EndOfEpisode.TRUNCATE, rw.EndOfEpisode.ALIGN_END)


def specs(lengths: Iterable[int], strides: Iterable[int]) -> list[rw.WindowSpec]:
    """Return every spec that there is of these lengths and strides."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # S > L warns once per process and pair
        return [
            rw.WindowSpec(length, stride, mode)
            for mode, length, stride in itertools.product(rw.EndOfEpisode, lengths, strides)
            if stride <= length or mode not in NEEDS_OVERLAP
        ]


SMALL_GRID = specs((1, 3, 4), (1, 2, 3, 5))
SMALL_EPISODES = (3, 1, 6, 4, 9, 2)


def observed(place: Place, spec: rw.WindowSpec, tables: Any = "a", /, **options: Any) -> rw.TrajectoryObserver:
    assert spec.sequence_length is not None
    return rw.TrajectoryObserver(
        place.client, tables, spec.sequence_length, spec.stride_length, end_of_episode=spec.end_of_episode, **options
    )


def cut(steps: Sequence[int], windows: Iterable[tuple[int, int]]) -> list[list[int]]:
    """Return the windows of an episode's steps, with zeros for padding."""
    padded = [*steps, *itertools.repeat(0, 100)]
    return [padded[start:stop] for start, stop in windows]


def expected(spec: rw.WindowSpec, lengths: Iterable[int], first: int = 1) -> list[list[int]]:
    """Return the windows of episodes of these lengths, whose steps are numbered through from `first` on."""
    found = []
    for n in lengths:
        found += cut(range(first, first + n), spec.windows(n))
        first += n
    return found


def feed(observer: Any, lengths: Iterable[int], first: int = 1, flush_every: int | None = None) -> None:
    """Pass episodes of these lengths, their steps numbered through from `first` on."""
    numbers = itertools.count(first)
    for n in lengths:
        for i in range(n):
            number = next(numbers)
            observer({"n": np.int64(number)}, end_of_episode=i == n - 1)
            if flush_every and number % flush_every == 0:
                observer.flush()


def windows_after_reset(spec: rw.WindowSpec, n: int) -> list[tuple[int, int]]:
    """Return what an episode of `n` steps leaves that `reset()` ends: without padding, the last L steps, once."""
    windows = spec.windows(n)
    length = spec.sequence_length or 0
    if spec.end_of_episode is rw.EndOfEpisode.DROP and n >= length and (n - length, n) not in windows:
        windows = [*windows, (n - length, n)]
    return windows
