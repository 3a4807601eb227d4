"""Slices of windows that were written in every way: no slice has rows of two episodes, or the windows' padding."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from episodes import observed, specs
from hypothesis import given, settings
from hypothesis import strategies as st
from played import LAYOUTS, Pair, Played, as_one_row, check_targets, has_discounts, pairs_of, played, read_slices, write
from reading import Place

import reverb_writer as rw
from reverb_writer.rows import ACTION, FIRST, LAST, PADDING, TERMINAL

# A client's threads draw keys by `random` while Hypothesis draws an example, which it takes for a part of the example.
pytestmark = [
    pytest.mark.filterwarnings("ignore::hypothesis.errors.HypothesisDeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`stride_length`"),
]


def kind_of(one: Played, t: int) -> int:
    """Return the kind of row t of an episode."""
    is_boundary = t == one.size and one.end != "cut"
    return FIRST * (t == 0) | (LAST | TERMINAL * (one.end == "terminated") if is_boundary else ACTION)


def check_slices(batch: rw.Batch, episodes: list[Played], layout: str, slice_len: int, how: dict[str, Any]) -> None:
    """See that slices are runs of rows of one episode, and that their kinds and transitions are the episode's."""
    observation = batch.data.observation if layout == "trajectory" else batch.data["observation"]
    row_of = {one.first + t: (one, t) for one in episodes for t in range(one.num_rows)}
    slices = batch.slices
    expected: list[list[Pair]] = []
    kinds: list[int] = []
    for number, rows in enumerate(np.split(observation, slices.first_rows[1:])):
        real = rows[: slices.lengths[number]].tolist()
        assert 0 < len(real) <= slice_len
        assert len(rows) == (slice_len if how["short"] == "pad" else len(real))
        assert real == list(range(real[0], real[0] + len(real)))
        where = [row_of[row] for row in real]  # a row of padding is in no episode
        assert len({one.first for one, _ in where}) == 1
        assert how["start"] == "any" or where[0][1] == 0
        one, t = where[-1]
        pairs = [one.pair(t, has_discounts(layout)) for _, t in where[:-1]]
        if how["with_next"]:
            is_cut = slices.cut_by_sampler[number]
            assert t < one.num_rows - 1 or not is_cut
            assert batch.next_kinds[number] == kind_of(one, t + is_cut)
            pairs += [one.pair(t, has_discounts(layout))] * bool(is_cut)
        expected.append(pairs)
        kinds += [kind_of(*each) for each in where] + [PADDING] * (len(rows) - len(real))
    assert batch.row_kinds.tolist() == kinds
    assert batch.mask.tolist() == [kind != PADDING for kind in kinds]
    found = rw.to_transitions(batch)
    assert len(found.mask) == len(observation) - (not how["with_next"])
    assert pairs_of(as_one_row(found)) == [[*itertools.chain(*expected)]]
    check_targets(found, observation, expected)


SLICES = {
    "short": st.sampled_from(["keep", "pad"]),
    "start": st.sampled_from(["any", "episode"]),
    "with_next": st.booleans(),
    "seed": st.integers(0, 99),
}
patient = settings(max_examples=40)


def observer_options(layout: str) -> dict[str, Any]:
    return {"last_row": "boundary" if layout in ("flags", "discount") else None, "timeout_s": 60}


@patient
@given(
    episodes=played(),
    layout=st.sampled_from([*LAYOUTS]),
    spec=st.sampled_from(specs(range(2, 7), range(1, 5))),
    is_sequence=st.booleans(),
    slice_len=st.integers(1, 5),
    how=st.fixed_dictionaries({**SLICES, "by": st.sampled_from(["row", "trajectory"])}),
)
def test_slices_of_windows_are_runs_of_real_steps(
    uniform: Place,
    episodes: list[Played],
    layout: str,
    spec: rw.WindowSpec,
    is_sequence: bool,
    slice_len: int,
    how: dict[str, Any],
) -> None:
    uniform.client.reset("a")
    options = observer_options(layout)
    observer: Any = (
        rw.SequenceObserver(uniform.client, "a", spec.sequence_length or 0, spec.stride_length, **options)
        if is_sequence
        else observed(uniform, spec, **options)
    )
    with observer:
        write(observer, episodes, layout)
    if size := uniform.client.server_info()["a"].current_size:
        if how["start"] == "episode" and not any(row in first_rows(episodes) for row in rows_of(uniform, size)):
            return  # the first row of each episode is in no window
        batch = read_slices(uniform, size, slice_len, **how)
        check_slices(batch, episodes, layout, slice_len, how)


def first_rows(episodes: list[Played]) -> set[int]:
    return {one.first for one in episodes}


def rows_of(place: Place, size: int) -> list[int]:
    """Return the observations of all items of a uniform table."""
    found: dict[int, list[int]] = {}
    while len(found) < size:
        for sample in place.client.sample("a", size):
            data = sample.data
            found[sample.info.key] = (data.observation if hasattr(data, "_fields") else data["observation"]).tolist()
    return [*itertools.chain(*found.values())]


@patient
@given(
    episodes=played(),
    layout=st.sampled_from([*LAYOUTS]),
    slice_len=st.integers(1, 5),
    how=st.fixed_dictionaries(SLICES),
)
def test_slices_of_whole_episodes_give_the_pairs_of_their_rows(
    uniform: Place, episodes: list[Played], layout: str, slice_len: int, how: dict[str, Any]
) -> None:
    uniform.client.reset("a")
    if whole := [episode for episode in episodes if episode.end != "cut"]:
        with rw.EpisodeObserver(uniform.client, "a", 100, **observer_options(layout)) as observer:
            write(observer, whole, layout)
        batch = read_slices(uniform, len(whole), slice_len, by="row", **how)
        check_slices(batch, whole, layout, slice_len, how)
