"""Random episodes, written in every layout and read back: their transitions and targets are those of the episodes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tree
from episodes import observed, specs
from hypothesis import given, settings
from hypothesis import strategies as st
from played import LAYOUTS, Pair, Played, check_targets, has_discounts, last_row_of, pairs_of, played, read, write
from reading import Place

import reverb_writer as rw

# A client's threads draw keys by `random` while Hypothesis draws an example, which it takes for a part of the example.
pytestmark = [
    pytest.mark.filterwarnings("ignore::hypothesis.errors.HypothesisDeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`stride_length`"),
]
patient = settings(max_examples=20)


def check(batch: rw.Batch | None, layout: str, expected: list[list[Pair]]) -> None:
    """Compare the transitions of a batch, and their targets, with those of the episodes."""
    if batch is None:
        assert not expected
        return
    observation = batch.data.observation if layout == "trajectory" else batch.data["observation"]
    if observation.shape[1] > 1:
        found = rw.to_transitions(batch)
        assert pairs_of(found) == expected
        check_targets(found, observation, expected)


@patient
@given(
    episodes=played(),
    layout=st.sampled_from([*LAYOUTS]),
    spec=st.sampled_from(specs(range(2, 6), range(1, 5))),
)
def test_windows_give_the_pairs_of_their_episodes(
    place: Place, episodes: list[Played], layout: str, spec: rw.WindowSpec
) -> None:
    place.client.reset("a")
    expected: list[list[Pair]] = []
    for episode in episodes:
        windows = spec.windows(episode.num_rows)
        if episode.end == "cut":  # only what is complete without an end
            windows = spec.spanning_windows(episode.num_rows)
        for start, stop in windows:
            rows = range(start, min(stop, episode.num_rows) - 1)
            expected.append([episode.pair(t, has_discounts(layout)) for t in rows])
    with observed(place, spec, last_row=last_row_of(layout), timeout_s=60) as observer:
        write(observer, episodes, layout)
        check(read(place, collate="pad"), layout, expected)


@patient
@given(episodes=played(), layout=st.sampled_from([*LAYOUTS]))
def test_whole_episodes_give_all_their_pairs(place: Place, episodes: list[Played], layout: str) -> None:
    place.client.reset("a")
    whole = [episode for episode in episodes if episode.end != "cut"]
    expected = [[one.pair(t, has_discounts(layout)) for t in range(one.size)] for one in whole]
    with rw.EpisodeObserver(place.client, "a", 100, last_row=last_row_of(layout), timeout_s=60) as observer:
        write(observer, whole, layout)
        check(read(place, collate="pad"), layout, expected)


@patient
@given(episodes=played(), layout=st.sampled_from([*LAYOUTS]), length=st.integers(2, 9))
def test_windows_that_span_episodes_have_no_pair_of_two(
    place: Place, episodes: list[Played], layout: str, length: int
) -> None:
    place.client.reset("a")
    rows = [(episode, t) for episode in episodes for t in range(episode.num_rows)]
    expected = []
    for start in range(0, len(rows) - length + 1, length):
        window = rows[start : start + length]
        pairs = [one.pair(t, has_discounts(layout)) for one, t in window[:-1] if t < one.size]
        expected.append(pairs)
    with rw.SequenceObserver(place.client, "a", length, length, last_row=last_row_of(layout), timeout_s=60) as observer:
        write(observer, episodes, layout)
        check(read(place), layout, expected)


@patient
@given(
    size=st.integers(1, 7), end=st.sampled_from(["terminated", "truncated", "cut"]), length=st.integers(2, 5), spans=...
)
def test_episodes_of_an_actors_memory_give_their_pairs(
    place: Place, size: int, end: str, length: int, spans: bool
) -> None:
    """A chunk that was cut has no flag on its last row, which has no action; padding or the next chunk follows."""
    place.client.reset("a")
    one = Played(1, size, end, 1.0)
    first = rw.Episode(
        observations=np.arange(1, size + 2),
        actions=np.array([1 + one.pair(t, True).action for t in range(size)]),  # 0 is the action of the last row
        rewards=np.array([one.pair(t, True).reward for t in range(size)]),
        terminated=end == "terminated",
        truncated=end == "truncated",
        len_lookback_buffer=0,
    )
    chunks = [first]
    if end == "cut":
        chunks.append(first.cut())
        chunks[1].add_env_step(observation=size + 2, action=9, reward=2.0, terminated=True)
    whole = [one.pair(t, True)._replace(action=1 + one.pair(t, True).action) for t in range(size)]
    pairs = [whole, [Pair(size + 1, 9, 2.0, 0.0, size + 2)]][: len(chunks)]  # of each chunk, in the order of its rows
    if spans:  # windows over all chunks, end to end
        observer: Any = rw.SequenceObserver(place.client, "a", length, length, end_of_episode="drop", timeout_s=60)
        rows = [pair for part in pairs for pair in (*part, None)]  # the last row of a chunk has no action
        windows = [(start, start + length) for start in range(0, len(rows) - length + 1, length)]
        expected = [[pair for pair in rows[a : b - 1] if pair is not None] for a, b in windows]
    else:
        observer = rw.TrajectoryObserver(place.client, "a", length, end_of_episode="tile", timeout_s=60)
        tiled = rw.WindowSpec(length, 1, "tile")
        expected = [part[a : b - 1] for part in pairs for a, b in tiled.windows(len(part) + 1)]
    with observer:
        for chunk in chunks:
            observer.write_episode(chunk)
        observer.flush()
        batch = read(place)
    if batch is None:
        assert not expected
        return
    assert pairs_of(rw.to_transitions(batch)) == expected
    steps = tree.map_structure(lambda leaf: leaf[None], first.steps())
    assert pairs_of(rw.to_transitions(steps, kinds=first.kinds()[None])) == [whole]
