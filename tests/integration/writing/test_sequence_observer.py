"""`SequenceObserver` on a real server: windows go on over the ends of episodes."""

from __future__ import annotations

import numpy as np
import pytest
from episodes import cut, feed, windows_after_reset
from reading import Place
from waiting import eventually

import reverb_writer as rw

MODES = tuple(rw.EndOfEpisode)

pytestmark = pytest.mark.filterwarnings("ignore:`stride_length`")


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
