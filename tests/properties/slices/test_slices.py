"""What holds for all boundaries and all slices."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import pytest
import tree
from hypothesis import given
from hypothesis import strategies as st

from reverb_writer.rows import ACTION, FIRST, LAST, PADDING
from reverb_writer.slices import (
    Slices,
    SliceSampler,
    Trajectories,
    find_trajectories,
    gather,
    pad_trajectories,
    split_trajectories,
)
from reverb_writer.slices.sampler import By, Start

# Slices may be longer than all trajectories.
pytestmark = pytest.mark.filterwarnings("ignore:No trajectory has `slice_len`")

lengths = st.lists(st.integers(1, 9), min_size=1, max_size=6)
seeds = st.integers(0, 2**32 - 1)


@st.composite
def samplers(draw: st.DrawFn) -> SliceSampler:
    slice_len = draw(st.integers(1, 8))
    by: Any = draw(st.sampled_from(get_args(By)))
    short: Any = draw(st.sampled_from(["keep", "pad"]))
    start: Any = draw(st.sampled_from(get_args(Start)))
    return SliceSampler(draw(st.integers(1, 6)), slice_len, by=by, short=short, start=start)


@st.composite
def rings(draw: st.DrawFn) -> tuple[Trajectories, dict[str, npt.NDArray[Any]]]:
    """Draw a full ring in which episodes follow each other, and its steps: number of the episode, time within it."""
    sizes = draw(lengths)
    number = np.repeat(np.arange(len(sizes)), sizes)
    time = np.concatenate([np.arange(size) for size in sizes])
    turn = draw(st.integers(0, len(number) - 1))
    done = np.append(number[1:] != number[:-1], True)
    steps = {name: np.roll(column, turn) for name, column in (("number", number), ("time", time), ("done", done))}
    return find_trajectories(of_done(steps["done"]), is_full=True), steps


def of_done(done: npt.NDArray[np.bool_]) -> npt.NDArray[np.uint8]:
    """Return the kinds of a full ring of whole episodes."""
    return (ACTION | LAST * done | FIRST * np.roll(done, 1)).astype(np.uint8)


@given(rings())
def test_each_trajectory_is_one_episode_from_its_first_row_to_its_last(
    ring: tuple[Trajectories, dict[str, npt.NDArray[Any]]],
) -> None:
    trajectories, steps = ring
    found = split_trajectories(steps, trajectories)
    assert sorted(int(part["number"][0]) for part in found) == list(range(len(np.unique(steps["number"]))))
    for part in found:
        assert len({*part["number"].tolist()}) == 1
        assert part["time"].tolist() == list(range(len(part["time"])))
        assert part["done"].tolist() == [False] * (len(part["time"]) - 1) + [True]


@given(st.integers(1, 30), st.integers(1, 3), st.booleans(), seeds)
def test_every_row_is_in_one_trajectory_and_every_boundary_is_kept(
    num_steps: int, num_envs: int, is_full: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    shape = (num_steps, num_envs)
    first, last = rng.random(shape) < 0.1, rng.random(shape) < 0.2
    padding = rng.random(shape) < 0.1
    padding[rng.integers(num_steps), 0] = False
    kinds = np.where(padding, PADDING, ACTION | FIRST * first | LAST * last).astype(np.uint8)
    kinds.flags.writeable = False
    cursor = int(rng.integers(num_steps)) if is_full else None
    trajectories = find_trajectories(kinds, is_full=is_full, cursor=cursor)
    rows = trajectories.rows()
    assert sorted(rows.tolist()) == np.flatnonzero(~padding).tolist()
    of_rows = kinds.ravel()[rows]
    stops = np.cumsum(trajectories.lengths)
    begins = stops - trajectories.lengths
    assert not (np.delete(of_rows, stops - 1) & LAST).any()
    assert not (np.delete(of_rows, begins) & FIRST).any()
    assert trajectories.begins_episode.tolist() == (of_rows[begins] & FIRST != 0).tolist()
    if cursor is not None:  # no trajectory runs across it
        assert not np.isin(np.delete(rows, stops - 1) // num_envs, [cursor]).any()


@given(rings(), samplers(), seeds)
def test_slices_are_runs_within_one_trajectory_and_know_their_ends(
    ring: tuple[Trajectories, dict[str, npt.NDArray[Any]]], sampler: SliceSampler, seed: int
) -> None:
    trajectories, steps = ring
    batch = gather(steps, sampler.sample(trajectories, np.random.default_rng(seed)), of_done(steps["done"]))
    slices = batch.slices
    edges = [*slices.first_rows.tolist(), len(slices.rows)]
    assert len(slices) == len(slices.lengths) == sampler.num_slices
    assert len(batch.data["time"]) == len(slices.rows) == len(batch.kinds)
    assert np.flatnonzero(slices.starts).tolist() == edges[:-1]
    ends, mask = [], []
    for number, (first, stop) in enumerate(itertools.pairwise(edges)):
        length = slices.lengths[number]
        time = batch.data["time"][first : first + length]
        size = np.sum(steps["number"] == batch.data["number"][first])
        assert len({*batch.data["number"][first:stop].tolist()}) == 1
        assert (np.diff(time) == 1).all()
        assert length == min(size, sampler.slice_len)
        assert sampler.start == "any" or time[0] == 0
        assert (batch.data["time"][first + length : stop] == time[-1]).all()
        assert slices.last_rows[number] == first + length - 1
        assert slices.cut_by_sampler[number] == (time[-1] < size - 1)
        assert stop - first == (sampler.slice_len if sampler.short == "pad" else length)
        mask += [True] * length + [False] * (stop - first - length)
        ends += [first + length - 1] if time[-1] == size - 1 else []
    assert batch.mask.tolist() == mask == (batch.kinds != PADDING).tolist()
    assert np.flatnonzero(batch.is_last).tolist() == ends
    assert batch.is_first[batch.mask].tolist() == (batch.data["time"][batch.mask] == 0).tolist()


def assert_drawn_in_proportion(counts: Mapping[tuple[int, ...], float], weights: dict[tuple[int, ...], float]) -> None:
    """Compare by a chi-square test; `weights` are of all slices that can be drawn."""
    assert counts.keys() == weights.keys()
    total, num_draws = sum(weights.values()), sum(counts.values())
    expected = {rows: weight / total * num_draws for rows, weight in weights.items()}
    statistic = sum((counts[rows] - expected[rows]) ** 2 / expected[rows] for rows in counts)
    freedom = len(counts) - 1
    # Wilson and Hilferty: the cube root of chi-square over its freedom is nearly normal; 3.7 deviations: 1 in 10,000.
    z = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / (2 / (9 * freedom)) ** 0.5
    assert z < 3.7, (statistic, freedom)


SIZES = [3, 7, 2, 12]
FIRSTS = [0, 3, 10, 12]


def runs(slice_len: int) -> list[tuple[int, ...]]:
    """List the slices of trajectories of `SIZES`."""
    return [
        tuple(range(first + at, first + min(at + slice_len, size)))
        for first, size in zip(FIRSTS, SIZES, strict=True)
        for at in range(max(1, size - slice_len + 1))
    ]


OF = np.repeat(np.arange(4), SIZES)  # the trajectory of each row
ROW_PRIORITIES = np.random.default_rng(0).random(24) + 0.1


@pytest.mark.parametrize(
    ("sampler", "priorities", "weight"),
    [
        pytest.param(SliceSampler(1, 1), None, lambda rows: 1 / SIZES[OF[rows[0]]], id="each trajectory, each row"),
        pytest.param(
            SliceSampler(1, 4), None, lambda rows: 1 / [1, 4, 1, 9][OF[rows[0]]], id="each trajectory, each start"
        ),
        pytest.param(SliceSampler(1, 1, by="row"), None, lambda _: 1, id="each row"),
        pytest.param(SliceSampler(1, 4, by="row"), None, lambda _: 1, id="each slice"),
        pytest.param(
            SliceSampler(1, 4, by="row"), ROW_PRIORITIES, lambda rows: ROW_PRIORITIES[rows[0]], id="priority of a row"
        ),
        pytest.param(SliceSampler(1, 12), [1, 2, 3, 4], lambda rows: OF[rows[0]] + 1.0, id="priority of a trajectory"),
    ],
)
def test_slices_are_drawn_in_proportion_and_know_it(
    sampler: SliceSampler, priorities: Any, weight: Callable[..., float]
) -> None:
    sampler = dataclasses.replace(sampler, num_slices=20_000)
    slices = sampler.sample(Trajectories.from_lengths(SIZES), np.random.default_rng(7), priorities)
    drawn = [tuple(rows.tolist()) for rows in np.split(slices.rows, slices.first_rows[1:])]
    weights = {rows: weight(rows) for rows in runs(sampler.slice_len)}
    assert_drawn_in_proportion(Counter(drawn), weights)
    np.testing.assert_allclose(slices.probabilities, [weights[rows] / sum(weights.values()) for rows in drawn])


def test_a_prioritized_pass_begins_with_each_in_proportion() -> None:
    trajectories, rng = Trajectories.from_lengths([1, 1, 1]), np.random.default_rng(3)
    sampler = SliceSampler(1, 1)
    counts: dict[tuple[int, ...], float] = {(0,): 0.0, (1,): 0.0, (2,): 0.0}
    for _ in range(2_000):
        counts[next(sampler.one_pass(trajectories, rng, [1, 2, 5])).rows[0],] += 1
    assert_drawn_in_proportion(counts, {(0,): 1, (1,): 2, (2,): 5})


@given(lengths, samplers(), seeds)
def test_a_pass_has_each_trajectory_or_each_slice_once(sizes: list[int], sampler: SliceSampler, seed: int) -> None:
    trajectories = Trajectories.from_lengths(sizes)
    batches = [*sampler.one_pass(trajectories, np.random.default_rng(seed))]
    assert all(len(slices.lengths) == sampler.num_slices for slices in batches[:-1])
    which = np.concatenate([slices.trajectories for slices in batches])
    num_slices = [max(1, size - sampler.slice_len + 1) for size in sizes]
    is_single = sampler.by == "trajectory" or sampler.start == "episode"
    assert np.bincount(which).tolist() == ([1] * len(sizes) if is_single else num_slices)


@st.composite
def flat_steps(draw: st.DrawFn) -> dict[str, Any]:
    """Draw flat steps whose ids change at random, and come again."""
    ids = np.repeat(draw(st.lists(st.integers(0, 2), min_size=1, max_size=8)), draw(st.integers(1, 3)))
    done = np.array(draw(st.lists(st.booleans(), min_size=len(ids), max_size=len(ids))))
    rows = np.arange(len(ids))
    nested = {"image": np.stack([rows, -rows], 1).astype(np.uint8), "row": rows}
    return {"traj_ids": ids, "done": done, "nested": nested}


assert_same = partial(tree.map_structure, partial(np.testing.assert_array_equal, strict=True))


@given(flat_steps())
def test_split_then_concatenated_are_the_same_steps(steps: dict[str, Any]) -> None:
    assert_same(tree.map_structure(lambda *parts: np.concatenate(parts), *split_trajectories(steps)), steps)


@given(flat_steps(), st.integers(0, 4))
def test_padded_then_unpadded_are_the_same_trajectories(steps: dict[str, Any], extra: int) -> None:
    trajectories = split_trajectories(steps)
    longest = max(len(part["done"]) for part in trajectories)
    padded = pad_trajectories(trajectories, longest + extra)
    assert not padded.data["nested"]["row"][~padded.mask].any()
    assert len(padded.mask) == len(trajectories)
    for number, other in enumerate(trajectories):
        real = padded.mask[number]
        assert not np.diff(real.astype(int)).max(initial=-1) > 0  # padding comes last
        assert_same(tree.map_structure(lambda leaf, at=number, rows=real: leaf[at][rows], padded.data), other)


@given(lengths, samplers(), seeds)
def test_a_batch_is_split_into_its_slices_by_its_own_starts(sizes: list[int], sampler: SliceSampler, seed: int) -> None:
    slices = sampler.each(Trajectories.from_lengths(sizes), np.random.default_rng(seed))
    batch = gather({"row": np.arange(sum(sizes))}, slices)
    steps = {"row": batch.data["row"][batch.mask], "is_first": slices.starts[batch.mask]}
    assert [len(part["row"]) for part in split_trajectories(steps)] == slices.lengths.tolist()


@given(lengths, samplers(), st.integers(0, 5), seeds)
def test_parts_of_slices_are_joined_again(sizes: list[int], sampler: SliceSampler, first: int, seed: int) -> None:
    slices = sampler.each(Trajectories.from_lengths(sizes), np.random.default_rng(seed))
    first = min(first, len(slices))
    found = Slices.concatenate([slices.part(0, first), slices.part(first, len(slices))])
    for name in set(vars(slices)) - {"storage_shape", "members"}:
        np.testing.assert_array_equal(getattr(found, name), getattr(slices, name))
