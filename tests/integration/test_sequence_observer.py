"""`SequenceObserver` on a real server: windows go on over the ends of episodes."""

from __future__ import annotations

import numpy as np
import pytest
from episodes import cut, feed, specs, windows_after_reset
from reading import Place
from waiting import eventually

import reverb_writer as rw

MODES = tuple(rw.EndOfEpisode)

pytestmark = pytest.mark.filterwarnings("ignore:`stride_length`")


@pytest.mark.parametrize("period", [None, 1, 3])
def test_spanning_windows_go_on_over_the_ends_of_episodes(place: Place, period: int | None) -> None:
    for spec in specs((1, 3, 4), (1, 2, 5)):
        if spec.end_of_episode is not rw.EndOfEpisode.DROP or (period and spec.sequence_length == 1):
            continue
        with rw.SequenceObserver(place.client, "a", spec.sequence_length, spec.stride_length) as observer:
            feed(observer, [4, 1, 3, 2], flush_every=period)
            observer.flush()
            assert observer.stats().episodes == 4
        assert place.column() == cut(range(1, 11), spec.spanning_windows(10)), spec


@pytest.mark.parametrize("mode", MODES)
def test_reset_ends_a_spanning_stream_by_its_mode(place: Place, mode: rw.EndOfEpisode) -> None:
    spec = rw.WindowSpec(3, 3, mode)
    with rw.SequenceObserver(place.client, "a", 3, 3, end_of_episode=mode) as observer:
        feed(observer, [2, 2, 3])
        observer.reset()
        feed(observer, [3], first=8)
        observer.reset(discard=True)
    assert place.column() == [
        *cut(range(1, 8), windows_after_reset(spec, 7)),
        [8, 9, 10],
    ]


def test_windows_are_sent_at_the_ends_of_episodes_of_a_spanning_stream(place: Place) -> None:
    with rw.SequenceObserver(place.client, "a", 2, chunk_length=1000, max_delay_s=1000) as observer:
        feed(observer, [3])
        eventually(lambda: place.client.server_info()["a"].current_size == 2)


@pytest.mark.parametrize("end", ["close", "reset"])
def test_episode_is_counted_once_that_a_boundary_step_and_then_the_end_of_the_stream_ends(
    place: Place, end: str
) -> None:
    with rw.SequenceObserver(place.client, "a", 2) as observer:
        for number in range(6):
            observer({"n": np.int64(number)}, end_of_episode=number in (2, 5))
        getattr(observer, end)()
        assert observer.stats().episodes == 2


def test_each_environment_of_a_vector_has_a_spanning_stream_of_its_own(place: Place) -> None:
    """Environment 0 has episodes of 2, 1 and 4 steps, environment 1 one of 3 and one that goes on."""
    ends = np.array([[0, 0], [1, 0], [1, 1], [0, 0], [0, 0], [0, 0], [1, 0]], bool)
    for length, stride in ((3, 1), (3, 2), (2, 3)):
        with rw.SequenceObserver(place.client, "a", length, stride, num_envs=2) as observer:
            for t, last in enumerate(ends):
                observer({"n": np.array([t, 100 + t])}, end_of_episode=last)
            observer.flush()
            assert observer.stats().episodes == 4
        windows = rw.WindowSpec(length, stride).spanning_windows(7)
        expected = [list(range(first + start, first + stop)) for first in (0, 100) for start, stop in windows]
        assert sorted(place.column()) == sorted(expected)
