"""Trajectories taken apart and padded, worked by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from reverb_writer.errors import SpecError, StructureError
from reverb_writer.slices import (
    pad_trajectories,
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


def test_strings_are_padded_with_empty_ones() -> None:
    padded = pad_trajectories([np.array([b"ab", b"c"], object), np.array([b"d"], object)])
    assert padded.data.tolist() == [[b"ab", b"c"], [b"d", b""]]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: pad_trajectories([]), StructureError, "one trajectory or more, got none"),
        (lambda: pad_trajectories([np.zeros(3)], 2), SpecError, "`length` must be >= 3, got 2"),
        (lambda: pad_trajectories([np.zeros(3), np.zeros(3, int)]), StructureError, "of one structure"),
        (lambda: pad_trajectories([np.zeros(3), np.zeros((3, 2))]), StructureError, "of one structure"),
        (
            lambda: pad_trajectories([{"a": np.zeros(3), "b": np.zeros(2)}]),
            StructureError,
            "one T for all",
        ),
        (lambda: pad_trajectories([np.float64(1)]), StructureError, "one T for all"),
        (lambda: split_trajectories({"obs": np.zeros(3)}), StructureError, "do not say where trajectories end"),
    ],
)
def test_bad_trajectories_are_named(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
