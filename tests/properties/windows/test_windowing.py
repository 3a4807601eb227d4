"""What holds for every window: streaming, the closed form and an oracle agree, and every step is accounted for."""

from __future__ import annotations

import itertools
from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pytest
from episodes import NEEDS_OVERLAP, specs
from hypothesis import given
from hypothesis import strategies as st

from reverb_writer.windows import EndOfEpisode, WindowSpec

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

DROP, PAD, TILE, COVER, TRUNCATE, ALIGN_END = EndOfEpisode
Window = tuple[int, int]

pytestmark = pytest.mark.filterwarnings("ignore:`stride_length`")


def oracle(mode: EndOfEpisode, n: int, length: int, stride: int, starts: Sequence[int]) -> list[Window]:
    """List the windows from their meaning alone; `starts` are the multiples of `stride` below `n`."""
    full = [(start, start + length) for start in starts if start + length <= n]
    if mode is DROP:
        return full
    if mode is PAD:  # the first window is there even if the episode does not fill it
        return [(start, start + length) for start in starts if start == 0 or start + length <= n]
    if mode is TILE:
        return [(start, start + length) for start in starts]
    if mode is ALIGN_END:
        return sorted({*full, *([(n - length, n)] if n >= length else [])})
    # A start is used if the window before it does not reach the end.
    needed = [start for start in starts if start == 0 or start - stride + length < n]
    return [(start, start + length if mode is COVER else min(start + length, n)) for start in needed]


def streamed(spec: WindowSpec, n: int, counts: Iterable[int]) -> list[Window]:
    """Write an `n`-step episode as a writer does, which looks for windows at these step counts, padding included."""
    length, total = spec.sequence_length, n + spec.num_padding(n)
    assert length is not None
    looks = sorted({0, n, total, *(count for count in counts if count < total)})
    numbers = [number for after, upto in pairwise(map(spec.num_windows, looks)) for number in range(after, upto)]
    starts = [number * spec.stride_length for number in numbers]
    closing = spec.closing_window(n)
    return [(start, start + length) for start in starts] + ([closing] if closing else [])


def small_cases(mode: EndOfEpisode) -> Iterator[tuple[WindowSpec, int, list[Window]]]:
    """Yield every small spec and episode with the windows that the oracle finds by looking at each step."""
    for spec, n in itertools.product(specs(range(1, 7), range(1, 9)), range(15)):
        if spec.end_of_episode is mode and spec.sequence_length is not None:
            starts = [step for step in range(n) if step % spec.stride_length == 0]
            yield spec, n, oracle(mode, n, spec.sequence_length, spec.stride_length, starts)


@st.composite
def large_cases(draw: st.DrawFn) -> tuple[WindowSpec, int, list[Window]]:
    """Draw specs and episodes of up to 10**11 steps in at most a hundred windows."""
    mode = draw(st.sampled_from(EndOfEpisode))
    stride = draw(st.integers(1, 10**9))
    length = draw(st.integers(stride if mode in NEEDS_OVERLAP else 1, 50 * stride))
    n = draw(st.integers(0, length + 40 * stride))
    return WindowSpec(length, stride, mode), n, oracle(mode, n, length, stride, range(0, n, stride))


@pytest.mark.parametrize("mode", EndOfEpisode)
def test_streaming_equals_closed_form_equals_oracle_for_all_small_cases(mode: EndOfEpisode) -> None:
    for spec, n, expected in small_cases(mode):
        assert spec.windows(n) == expected, (spec, n)
        assert streamed(spec, n, range(1, n + 10)) == expected, (spec, n)


@given(large_cases(), st.data())
def test_streaming_in_any_portions_equals_closed_form_equals_oracle(
    case: tuple[WindowSpec, int, list[Window]], data: st.DataObject
) -> None:
    spec, n, expected = case
    counts = data.draw(st.lists(st.integers(1, 2 * n + 1), max_size=10))
    assert spec.windows(n) == expected
    assert streamed(spec, n, counts) == expected
    covered = reach = 0
    for start, stop in expected:
        covered += max(0, min(stop, n) - max(start, reach))
        reach = max(reach, stop)
    assert covered + sum(spec.num_dropped(n).values()) == n


@given(st.integers(1, 40), st.integers(1, 40), st.lists(st.integers(0, 120)))
def test_windows_are_counted_by_the_rule(length: int, stride: int, counts: list[int]) -> None:
    expected = [sum(c >= length and (c - length) % stride == 0 for c in range(1, count + 1)) for count in counts]
    spec = WindowSpec(length, stride)
    assert list(map(spec.num_windows, counts)) == spec.num_windows(np.array(counts, np.int64)).tolist() == expected


@pytest.mark.parametrize("mode", EndOfEpisode)
def test_every_step_is_covered_or_dropped_for_its_reason_for_all_small_cases(mode: EndOfEpisode) -> None:
    for spec, n, windows in small_cases(mode):
        last_stop = max((stop for _, stop in windows), default=0)
        reasons: Counter[str] = Counter()
        for step in range(n):
            if not any(start <= step < stop for start, stop in windows):
                tail_or_gap = "unaligned_tail" if step >= last_stop else "stride_gap"
                reasons[tail_or_gap if windows else "short_episode"] += 1
        assert spec.num_dropped(n) == dict(reasons), (spec, n)


@given(st.integers(1, 12), st.integers(1, 12), st.lists(st.integers(1, 15), max_size=6))
def test_spanning_windows_are_all_full_strides_of_the_joined_episodes(
    length: int, stride: int, episodes: list[int]
) -> None:
    stream = [(number, step) for number, n in enumerate(episodes) for step in range(n)]
    expected = [stream[start : start + length] for start in range(0, len(stream), stride)]
    spanning = WindowSpec(length, stride).spanning_windows(len(stream))
    assert [stream[start:stop] for start, stop in spanning] == [window for window in expected if len(window) == length]


@pytest.mark.parametrize("mode", EndOfEpisode)
def test_windows_can_be_read_back_from_their_drawing(mode: EndOfEpisode) -> None:
    for spec, n, expected in small_cases(mode):
        if n > 10:  # so that every column is one character wide
            continue
        _, *rows, summary = spec.preview(n).splitlines()
        marked = {row.split()[0]: [i for i, label in enumerate(row[9::2]) if label != " "] for row in rows}
        dropped = marked.pop("dropped", [])
        assert list(marked) == [f"{start}:{stop}" for start, stop in expected]
        assert list(marked.values()) == [list(range(*window)) for window in expected]
        assert dropped == [step for step in range(n) if not any(start <= step < stop for start, stop in expected)]
        assert summary.startswith(f"covered {n - len(dropped)} of {n} steps")
