"""Frames stacked when they are sampled, and windows split for a burn-in."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import numpy as np
import pytest
import tree
from hypothesis import assume, given
from hypothesis import strategies as st

import reverb_writer as rw
from reverb_writer.decoding.samples import BatchInfo
from reverb_writer.slices import SliceSampler, find_trajectories, gather, read_markers


def info_of(lengths: Any, mask: Any = None) -> BatchInfo:
    lengths = np.asarray(lengths, np.int64)
    ones = np.ones(len(lengths))
    return BatchInfo(lengths.astype(np.uint64), ones, ones, lengths, lengths.astype(np.int32), lengths, 0.0, "", mask)


def windows(frames: Any, is_first: Any = None, **leaves: Any) -> rw.Batch:
    frames = np.asarray(frames)
    data = {"observation": {"rgb": frames}, **leaves}
    if is_first is not None:
        data["is_first"] = np.asarray(is_first, bool)
    return rw.Batch(data, info_of([frames.shape[1]] * len(frames)))


@pytest.mark.parametrize(
    "flags",
    [
        {"is_first": [[0, 0, 1, 0, 0]]},
        {"is_last": [[0, 1, 0, 0, 0]]},
        {"done": [[0, 1, 0, 0, 0]]},
        {"terminated": [[0, 1, 0, 0, 0]], "truncated": [[0, 0, 0, 0, 0]]},
        {"truncated": [[0, 1, 0, 0, 0]]},
        {"next": {"done": np.array([[0, 1, 0, 0, 0]])}},
        {"episode": [[3, 3, 4, 4, 4]]},
        {"step_type": [[1, 2, 0, 1, 1]]},
    ],
)
def test_stack_does_not_cross_episodes_inside_a_window(flags: Any) -> None:
    leaves = {name: flag if isinstance(flag, dict) else np.array(flag) for name, flag in flags.items()}
    batch = rw.frame_stack(3, "observation/rgb")(windows([[10, 11, 30, 31, 32]], **leaves))
    (stacks,) = batch.data["observation"]["rgb"].tolist()
    assert stacks == [[10, 10, 10], [10, 10, 11], [30, 30, 30], [30, 30, 31], [30, 31, 32]]


def test_leaves_of_size_0_are_no_obstacle() -> None:
    batch = windows([[1, 2, 3]], nothing=np.zeros((1, 3, 0)), is_first=[[1, 0, 0]])
    found = rw.frame_stack(2, "observation/rgb")(batch)
    assert found.data["observation"]["rgb"].tolist() == [[[1, 1], [1, 2], [2, 3]]]
    assert found.data["nothing"].shape == (1, 3, 0)
    assert rw.frame_stack(2, "nothing")(batch).data["nothing"].shape == (1, 3, 2, 0)


@given(st.integers(1, 5), st.lists(st.booleans(), min_size=1, max_size=12), st.booleans(), st.booleans(), st.booleans())
def test_stacks_are_those_of_a_deque_over_each_episode(
    k: int, first: list[bool], drop: bool, are_images: bool, has_mask: bool
) -> None:
    assume(not drop or len(first) >= k)
    expected: list[list[int]] = []
    for t in range(len(first)):
        episode = [*range(max([0, *(s for s in range(t + 1) if first[s])]), t + 1)]
        expected.append(([episode[0]] * k + episode)[-k:])
    frames = np.arange(len(first), dtype=np.uint8)[None]
    made = windows(np.broadcast_to(frames[..., None, None], (1, len(first), 2, 3)) if are_images else frames, [first])
    mask = np.ones((1, len(first)), bool)
    given = dataclasses.replace(made, data=(made.data, mask)) if has_mask else made  # as observers with `mask=True`
    transform = pickle.loads(pickle.dumps(rw.frame_stack(k, drop=drop)))  # noqa: S301  # our own bytes
    batch = transform(given)
    steps = batch.data[0] if has_mask else batch.data
    stacks = steps["observation"]["rgb"]
    dropped = k - 1 if drop else 0
    assert stacks.dtype == np.uint8
    assert stacks.shape == (1, len(first) - dropped, k, *((2, 3) if are_images else ()))
    assert (stacks[..., 0, 0] if are_images else stacks)[0].tolist() == expected[dropped:]
    assert steps["is_first"].tolist() == [first[dropped:]]
    assert batch.info.lengths.tolist() == [len(first) - dropped]
    assert not has_mask or batch.data[1].shape == (1, len(first) - dropped)


@pytest.mark.parametrize("marker", ["is_init", "is_last"])
def test_frames_of_slices_are_stacked_by_their_markers(marker: str) -> None:
    flags = [1, 0, 0, 1, 0, 0] if marker == "is_init" else [0, 0, 1, 0, 0, 1]
    steps = {"observation": np.arange(6), marker: np.array(flags)}
    stored = read_markers(steps)
    trajectories = find_trajectories(stored)
    slices = SliceSampler(2, 3).each(trajectories, np.random.default_rng(0))
    gathered = gather(steps, slices, stored)
    batch = rw.frame_stack(2)(rw.Batch(gathered.data, info_of([3, 3]), gathered.markers))
    assert batch.data["observation"].tolist() == [[0, 0], [0, 1], [1, 2], [3, 3], [3, 4], [4, 5]]


def test_the_row_after_a_slice_continues_the_stack_of_its_last_row() -> None:
    steps = {"observation": {"a": np.arange(7), "b": np.arange(7) + 10}, "is_last": np.array([0, 0, 0, 1, 0, 0, 1])}
    stored = read_markers(steps)
    sampler, rng = SliceSampler(4, 3, by="row"), np.random.default_rng(0)
    slices = next(sampler.one_pass(find_trajectories(stored), rng, shuffle=False))
    gathered = gather(steps, slices, stored)
    after = tree.map_structure(lambda leaf: leaf[slices.next_rows], steps)
    batch = rw.frame_stack(2)(rw.Batch(gathered.data, info_of([3, 3]), gathered.markers, after))
    assert slices.cut_by_sampler.tolist() == [True, False, False]
    stacks = batch.data["observation"]["a"].tolist()
    assert stacks == [[0, 0], [0, 1], [1, 2], [1, 1], [1, 2], [2, 3], [4, 4], [4, 5], [5, 6]]
    assert batch.next["observation"]["a"].tolist() == [[2, 3], [2, 3], [5, 6]]
    assert batch.next["observation"]["b"].tolist() == [[12, 13], [12, 13], [15, 16]]


def test_stack_of_what_is_not_there_is_refused() -> None:
    with pytest.raises(rw.errors.StructureError, match="no leaf `observation/depth`: there are `observation/rgb`"):
        rw.frame_stack(2, "observation/depth")(windows([[1, 2]]))
    with pytest.raises(rw.errors.SpecError, match="`k` must be >= 1"):
        rw.frame_stack(0)
    with pytest.raises(rw.errors.StructureError, match=r"needs leaves \[B, T, \.\.\.\]"):
        rw.frame_stack(2)(rw.Batch([{"observation": np.zeros(3)}], info_of([3])))


def test_burn_in_splits_windows_masks_and_lengths() -> None:
    batch = windows(np.arange(10).reshape(2, 5))
    mask = np.array([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]], bool)
    batch = dataclasses.replace(batch, info=info_of([5, 2], mask))
    before, after = rw.burn_in(batch, 3)
    assert before.data["observation"]["rgb"].tolist() == [[0, 1, 2], [5, 6, 7]]
    assert after.data["observation"]["rgb"].tolist() == [[3, 4], [8, 9]]
    assert before.info.mask is not None
    assert after.info.mask is not None
    assert before.info.mask.tolist() == [[True, True, True], [True, True, False]]
    assert after.info.mask.tolist() == [[True, True], [False, False]]
    assert (before.info.lengths.tolist(), after.info.lengths.tolist()) == ([3, 2], [2, 0])
    assert after.info.keys.tolist() == batch.info.keys.tolist()
    nothing, everything = rw.burn_in(batch, 0)
    assert nothing.data["observation"]["rgb"].shape == (2, 0)
    assert everything.data["observation"]["rgb"].shape == (2, 5)
    with pytest.raises(rw.errors.SpecError, match=r"`n` must be <= 4, got 5\. The windows have 5 steps"):
        rw.burn_in(batch, 5)


def test_windows_are_split_into_shorter_ones_of_the_same_items() -> None:
    batch = windows([[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]])
    batch.info.keys[:] = 70, 80
    batch.info.lengths[:] = 5, 3  # the rest is padding
    split = rw.split_windows(2)(batch)
    assert split.data["observation"]["rgb"].tolist() == [[0, 1], [2, 3], [5, 6], [7, 8]]
    assert (split.info.lengths.tolist(), split.info.keys.tolist()) == ([2, 2, 2, 1], [70, 70, 80, 80])
    with pytest.raises(rw.errors.SpecError, match=r"`n` must be .* The windows have 2 steps"):
        rw.split_windows(3)(split)
