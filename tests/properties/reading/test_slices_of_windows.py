"""Slices of windows that were written in every way: no slice has rows of two episodes, or padding."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from episodes import observed, specs
from hypothesis import given, settings
from hypothesis import strategies as st
from played import Pair, Played, as_one_row, check_targets, has_discounts, pairs_of, played, read_slices, write
from reading import Place

import reverb_writer as rw

# A client's threads draw keys by `random` while Hypothesis draws an example, which it takes for a part of the example.
pytestmark = [
    pytest.mark.filterwarnings("ignore::hypothesis.errors.HypothesisDeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`stride_length`"),
]


def check_slices(batch: rw.Batch, episodes: list[Played], layout: str, slice_len: int) -> None:
    """See that slices are runs of rows of one episode, and that their transitions are those of the episode."""
    steps = batch.data[0] if isinstance(batch.data, tuple) and not hasattr(batch.data, "_fields") else batch.data
    observation = steps.observation if layout == "trajectory" else steps["observation"]
    row_of = {one.first + t: (one, t) for one in episodes for t in range(one.num_rows)}
    markers, slices = batch.markers, batch.markers.slices
    with_next = batch.next is not None
    expected: list[list[Pair]] = []
    flags: dict[str, list[bool]] = {"is_init": [], "terminated": []}
    for number, rows in enumerate(np.split(observation, slices.first_rows[1:])):
        real = rows[: slices.lengths[number]].tolist()
        assert 0 < len(real) <= slice_len
        assert real == list(range(real[0], real[0] + len(real)))
        where = [row_of[row] for row in real]  # a row of padding is in no episode
        assert len({one.first for one, _ in where}) == 1
        one, t = where[-1]
        pairs = [one.pair(t, has_discounts(layout)) for _, t in where[:-1]]
        if with_next and slices.cut_by_sampler[number]:
            assert t < one.num_rows - 1
            pairs.append(one.pair(t, has_discounts(layout)))
        expected.append(pairs)
        padding = [False] * (len(rows) - len(real))
        flags["is_init"] += [n == 0 for n in range(len(where))] + padding  # a slice is of one episode
        ended = [t == one.size and one.end == "terminated" for _, t in where]
        if layout == "trajectory" and len(where) == 1 and not markers.terminated[slices.first_rows[number]]:
            ended = [False]  # the discount of the row before tells, and the item may begin with the boundary step
        flags["terminated"] += ended + padding
    assert np.asarray(markers.is_init).tolist() == flags["is_init"]
    assert markers.terminated.tolist() == flags["terminated"]
    found = rw.to_transitions(batch)
    assert len(found.mask) == len(observation) - (not with_next)
    assert pairs_of(as_one_row(found)) == [[*itertools.chain(*expected)]]
    check_targets(found, observation, expected)


LAYOUTS = st.sampled_from(["recorded", "rlds", "trajectory", "flags"])
SLICES = {
    "short": st.sampled_from(["keep", "pad"]),
    "spans": st.booleans(),
    "with_next": st.booleans(),
    "seed": st.integers(0, 99),
}
patient = settings(max_examples=40)


@patient
@given(
    episodes=played(),
    layout=LAYOUTS,
    spec=st.sampled_from(specs(range(2, 7), range(1, 5))),
    is_sequence=st.booleans(),
    slice_len=st.integers(1, 5),
    mask=st.booleans(),
    how=st.fixed_dictionaries({**SLICES, "by": st.sampled_from(["row", "trajectory"])}),
)
def test_slices_of_windows_are_runs_of_real_steps(
    uniform: Place,
    episodes: list[Played],
    layout: str,
    spec: rw.WindowSpec,
    is_sequence: bool,
    slice_len: int,
    mask: bool,
    how: dict[str, Any],
) -> None:
    uniform.client.reset("a")
    options: dict[str, Any] = {"mask": mask or layout == "flags", "timeout_s": 60}  # padding that no flag tells
    observer: Any = (
        rw.SequenceObserver(uniform.client, "a", spec.sequence_length or 0, spec.stride_length, **options)
        if is_sequence
        else observed(uniform, spec, **options)
    )
    with observer:
        write(observer, episodes, layout)
    if size := uniform.client.server_info()["a"].current_size:
        batch = read_slices(uniform, size, slice_len, **how)
        check_slices(batch, episodes, layout, slice_len)


@patient
@given(episodes=played(), layout=LAYOUTS, slice_len=st.integers(1, 5), how=st.fixed_dictionaries(SLICES))
def test_slices_of_whole_episodes_give_the_pairs_of_their_rows(
    uniform: Place, episodes: list[Played], layout: str, slice_len: int, how: dict[str, Any]
) -> None:
    uniform.client.reset("a")
    if whole := [episode for episode in episodes if episode.end != "cut"]:
        with rw.EpisodeObserver(uniform.client, "a", 100, timeout_s=60) as observer:
            write(observer, whole, layout)
        batch = read_slices(uniform, len(whole), slice_len, by="row", **how)
        check_slices(batch, whole, layout, slice_len)
