"""Trajectories taken apart and put together, worked by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from reverb_writer.errors import SpecError, StructureError
from reverb_writer.slices import (
    Markers,
    TrajectoryAssembler,
    concatenate_trajectories,
    find_trajectories,
    pad_trajectories,
    split_padded_trajectories,
    split_trajectories,
)


def chunk(ids: list[int], done: list[int], first: int = 0) -> dict[str, Any]:
    return {"traj_ids": np.array(ids), "done": np.array(done, bool), "obs": first + np.arange(len(ids))}


def observations(trajectories: list[Any]) -> list[list[int]]:
    return [trajectory["obs"].tolist() for trajectory in trajectories]


def test_split_and_padded_trajectories_have_zeros_and_a_mask() -> None:
    # Done at row 9 of 15.
    steps = {"done": np.isin(np.arange(15), [9]), "obs": np.arange(15)}
    padded = pad_trajectories(split_trajectories(steps))
    assert padded.data["obs"].shape == padded.mask.shape == (2, 10)
    assert padded.mask.tolist() == [[True] * 10, [True] * 5 + [False] * 5]
    assert padded.data["obs"][1].tolist() == [10, 11, 12, 13, 14, 0, 0, 0, 0, 0]


def test_an_id_that_comes_again_is_another_trajectory() -> None:
    steps = chunk([1, 1, 2, 1, 1, 2], [0] * 6)
    assert observations(split_trajectories(steps)) == [[0, 1], [2], [3, 4], [5]]


def test_a_wrapped_trajectory_comes_out_in_the_order_of_time() -> None:
    done = np.isin(np.arange(6), [1, 3])
    steps = {"obs": np.arange(6), "done": done}
    trajectories = find_trajectories(Markers(done=done), is_full=True)
    assert observations(split_trajectories(steps, trajectories)) == [[4, 5, 0, 1], [2, 3]]


def test_padding_of_lengths_four_and_two() -> None:
    trajectories = [np.arange(4.0), np.arange(2.0)]
    padded = pad_trajectories(trajectories)
    assert padded.mask.tolist() == [[True] * 4, [True, True, False, False]]
    assert concatenate_trajectories(trajectories).tolist() == [0, 1, 2, 3, 0, 1]
    assert [part.tolist() for part in split_padded_trajectories(*padded)] == [[0, 1, 2, 3], [0, 1]]
    assert pad_trajectories(trajectories, 6).data.shape == (2, 6)


def test_strings_are_padded_with_empty_ones() -> None:
    padded = pad_trajectories([np.array([b"ab", b"c"], object), np.array([b"d"], object)])
    assert padded.data.tolist() == [[b"ab", b"c"], [b"d", b""]]


@pytest.mark.parametrize(
    ("chunks", "complete", "still_open"),
    [
        ([([0, 0, 0, 1, 1, 2], [0, 0, 1, 0, 1, 1])], [[[0, 1, 2], [3, 4], [5]]], []),
        ([([0, 0, 0], [0, 0, 0]), ([0, 0, 1, 1], [0, 1, 0, 1])], [[], [[0, 1, 2, 3, 4], [5, 6]]], []),
        ([([0, 1, 0, 1], [0, 0, 1, 1])], [[[0, 2], [1, 3]]], []),
        ([([0, 0, 1, 1], [0, 1, 0, 0])], [[[0, 1]]], [1]),
        # An id that is used again, within one chunk and across two.
        ([([0, 0, 0, 0], [0, 1, 0, 0])], [[[0, 1]]], [0]),
        ([([0, 0, 0, 0], [0, 1, 0, 0]), ([0], [1])], [[[0, 1]], [[2, 3, 4]]], []),
        # In the order in which they end, and what is open in the order in which it began.
        ([([5, 3, 3, 5, 9, 2], [0, 0, 1, 1, 0, 0])], [[[1, 2], [0, 3]]], [9, 2]),
    ],
)
def test_complete_trajectories_are_assembled(
    chunks: list[tuple[list[int], list[int]]], complete: list[Any], still_open: list[int]
) -> None:
    assembler, first, found = TrajectoryAssembler(), 0, []
    for ids, done in chunks:
        found.append(observations(assembler.add(chunk(ids, done, first))))
        first += len(ids)
    assert found == complete
    assert assembler.open_ids == still_open


def test_any_of_the_ends_completes_a_trajectory() -> None:
    assembler = TrajectoryAssembler()
    steps = {"traj_ids": np.array([0, 1, 2]), "terminated": np.array([1, 0, 0]), "truncated": np.array([0, 1, 0])}
    assert len(assembler.add(steps)) == 2
    assert assembler.open_ids == [2]


def test_what_is_open_at_the_end_can_be_taken() -> None:
    assembler = TrajectoryAssembler()
    assembler.add(chunk([4, 4, 7], [0, 0, 0]))
    assembler.add(chunk([7], [0], first=3))
    taken = assembler.take_open()
    assert {traj_id: trajectory["obs"].tolist() for traj_id, trajectory in taken.items()} == {4: [0, 1], 7: [2, 3]}
    assert assembler.open_ids == []
    assert assembler.take_open() == {}


def test_a_refused_chunk_changes_nothing() -> None:
    assembler = TrajectoryAssembler()
    assembler.add(chunk([0], [0]))
    for bad, message in [
        ({"done": np.array([1]), "obs": np.array([1])}, "needs `traj_ids`"),
        ({"traj_ids": np.array([0]), "obs": np.array([1])}, "needs `traj_ids`, and `done`"),
        ({**chunk([0], [1]), "obs": np.array([1.5])}, "of the structure of earlier rows"),
        ({**chunk([0], [1]), "obs": np.array([1, 2])}, r"leaf `obs`: shape \(2,\), expected rows \(1,\)"),
    ]:
        with pytest.raises(StructureError, match=message):
            assembler.add(bad)
    assert observations(assembler.add(chunk([0], [1], first=1))) == [[0, 1]]


def test_a_refused_first_chunk_leaves_its_structure_open() -> None:
    assembler = TrajectoryAssembler()
    with pytest.raises(StructureError, match="expected rows"):
        assembler.add({**chunk([0], [1]), "obs": np.array([1.5, 2.5])})
    assert observations(assembler.add(chunk([0], [1]))) == [[0]]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: pad_trajectories([]), StructureError, "one trajectory or more, got none"),
        (lambda: concatenate_trajectories([]), StructureError, "one trajectory or more, got none"),
        (lambda: pad_trajectories([np.zeros(3)], 2), SpecError, "`length` must be >= 3, got 2"),
        (lambda: pad_trajectories([np.zeros(3), np.zeros(3, int)]), StructureError, "of one structure"),
        (lambda: concatenate_trajectories([np.zeros(3), np.zeros((3, 2))]), StructureError, "of one structure"),
        (
            lambda: concatenate_trajectories([{"a": np.zeros(3), "b": np.zeros(2)}]),
            StructureError,
            "one T for all",
        ),
        (lambda: concatenate_trajectories([np.float64(1)]), StructureError, "one T for all"),
        (lambda: split_trajectories({"obs": np.zeros(3)}), StructureError, "do not say where trajectories end"),
        (
            lambda: split_padded_trajectories(np.zeros((2, 3)), [[0, 1, 1], [1, 1, 1]]),
            StructureError,
            "with padding last",
        ),
        (lambda: split_padded_trajectories(np.zeros((2, 3)), [1, 1]), StructureError, r"must be \[n, T\]"),
        (
            lambda: split_padded_trajectories(np.zeros((2, 3)), np.ones((2, 2))),
            StructureError,
            r"expected rows \(2, 2\)",
        ),
    ],
)
def test_bad_trajectories_are_named(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
