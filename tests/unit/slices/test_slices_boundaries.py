"""Boundaries worked by hand, what steps of each library tell about them, and trajectories taken apart and padded."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from reverb_writer.errors import IncompleteError, SpecError, StructureError
from reverb_writer.slices import (
    Markers,
    Trajectories,
    find_trajectories,
    pad_trajectories,
    read_markers,
    split_trajectories,
)
from reverb_writer.steps import FIRST, LAST, MID, Trajectory


def flags(size: int, *rows: int) -> Any:
    return np.isin(np.arange(size), rows)


WRAPPED = ([8, 3, 5], [2, 4, 7], [5, 2, 3])
IDS = np.array([5, 5, 5, 0, 0, 1, 1, 1, 5, 5])


@pytest.mark.parametrize(
    ("markers", "ring", "expected"),
    [
        (Markers(done=flags(10, 2, 7)), {"is_full": True, "cursor": 4}, WRAPPED),
        (Markers(traj_ids=IDS), {"is_full": True}, WRAPPED),
        (Markers(traj_ids=IDS), {"is_full": True, "cursor": 4}, WRAPPED),
        (Markers(traj_ids=IDS), {}, ([0, 3, 5, 8], [2, 4, 7, 9], [3, 2, 3, 2])),
        (Markers(done=flags(6, 2)), {}, ([0, 3], [2, 5], [3, 3])),
        (Markers(done=flags(4)), {"is_full": True}, ([0], [3], [4])),
        (Markers(done=flags(1)), {}, ([0], [0], [1])),
        (Markers(done=flags(1)), {"is_full": True}, ([0], [0], [1])),
        # A cursor in the middle of a trajectory cuts it in two.
        (Markers(done=flags(6, 5)), {"is_full": True, "cursor": 2}, ([0, 3], [2, 5], [3, 3])),
        (Markers(done=flags(6)), {"is_full": True, "cursor": 2}, ([3], [2], [6])),
        # The end may be marked as any of the three.
        (Markers(done=flags(10), truncated=flags(10, 4, 9)), {}, ([0, 5], [4, 9], [5, 5])),
        (Markers(done=flags(10)), {}, ([0], [9], [10])),
        (Markers(terminated=flags(6, 1), truncated=flags(6, 3)), {}, ([0, 2, 4], [1, 3, 5], [2, 2, 2])),
        # Starts alone are enough, also across the edge of a full ring.
        (Markers(is_init=flags(6, 0, 4)), {}, ([0, 4], [3, 5], [4, 2])),
        (Markers(is_init=flags(6, 1, 4)), {"is_full": True}, ([4, 1], [0, 3], [3, 3])),
        # An end that nobody marked is known by the next start; ids of two writers that are alike, by the end.
        (Markers(done=flags(6, 1, 5), is_init=flags(6, 0, 2, 4)), {}, ([0, 2, 4], [1, 3, 5], [2, 2, 2])),
        (Markers(traj_ids=np.zeros(6, int), done=flags(6, 1)), {}, ([0, 2], [1, 5], [2, 4])),
        # Of two environments, the second has no end, and gets one at its last row.
        (Markers(done=np.array([[0, 0], [1, 0], [0, 0]])), {"is_full": True}, ([2, 0], [1, 2], [3, 3])),
    ],
)
def test_boundaries_are_recovered(
    markers: Markers, ring: dict[str, Any], expected: tuple[list[int], list[int], list[int]]
) -> None:
    found = find_trajectories(markers, **ring)
    assert (found.starts.tolist(), found.stops.tolist(), found.lengths.tolist()) == expected


def test_markers_are_not_changed() -> None:
    ends = flags(4)
    ends.flags.writeable = False
    find_trajectories(Markers(done=ends), is_full=True, cursor=1)
    find_trajectories(Markers(done=ends))


@pytest.mark.parametrize(
    ("markers", "ring", "error", "message"),
    [
        (Markers(), {}, StructureError, "the steps do not show the ends of trajectories"),
        (Markers(done=flags(0)), {}, IncompleteError, "no rows yet"),
        (Markers(done=np.True_), {}, IncompleteError, "no rows yet"),  # type: ignore[arg-type]
        (Markers(done=flags(3)), {"cursor": 1}, SpecError, "`cursor` needs a ring that is full, got 1"),
        (Markers(done=flags(3)), {"is_full": True, "cursor": 3}, SpecError, "`cursor` must be <= 2, got 3"),
    ],
)
def test_nothing_to_go_by_is_refused(
    markers: Markers, ring: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        find_trajectories(markers, **ring)


@pytest.mark.parametrize("lengths", [[], [0], [[1]], [1.5], [2, -1]])
def test_lengths_of_trajectories_are_integers_of_one_or_more(lengths: Any) -> None:
    with pytest.raises(StructureError, match="one or more integers >= 1"):
        Trajectories.from_lengths(lengths)


def test_markers_must_be_of_the_same_rows() -> None:
    with pytest.raises(StructureError, match=r"shape of the rows, got {'is_init': \(3,\), 'done': \(4,\)}"):
        Markers(is_init=flags(3), done=flags(4))
    with pytest.raises(StructureError, match="`traj_ids` must be integers, got float64"):
        Markers(traj_ids=np.zeros(3))  # type: ignore[arg-type]


def tf_agents_rows(types: list[int], discounts: list[float]) -> Trajectory:
    nothing = np.zeros(len(types))
    return Trajectory(np.array(types), nothing, nothing, (), np.roll(types, -1), nothing, np.array(discounts))


NONE, LAST_OF_3 = np.zeros((3, 1), bool), np.array([[0], [0], [1]], bool)


@pytest.mark.parametrize(
    ("steps", "options", "expected"),
    [
        pytest.param(
            {
                "done": NONE,  # of the step before
                "terminated": NONE,
                "is_init": LAST_OF_3[::-1],
                "next": {"done": LAST_OF_3, "terminated": NONE, "truncated": LAST_OF_3},
                "collector": {"traj_ids": np.array([7, 7, 7])},
            },
            {},
            {
                "is_init": [True, False, False],
                "truncated": [False, False, True],
                "terminated": [False] * 3,
                "traj_ids": [7, 7, 7],
            },
            id="TorchRL has the flags of a step beside `next`",
        ),
        pytest.param(
            {"next": np.zeros((2, 4)), "terminated": np.array([0, 1]), "truncated": np.array([0, 0])},
            {},
            {"ends": [False, True]},
            id="an observation of Gymnasium may be named next",
        ),
        pytest.param(
            {"is_first": [1, 0], "is_last": [0, 1], "is_terminal": [0, 1], "reward": [0, 0]},
            {},
            {"is_init": [True, False], "done": [False, True], "terminated": [False, True]},
            id="RLDS",
        ),
        pytest.param(
            # Two episodes of two transitions and a boundary step; the second one is cut by a time limit.
            tf_agents_rows([FIRST, MID, LAST] * 2, [1, 0, 1, 1, 1, 1]),
            {},
            {"done": [False, False, True] * 2, "terminated": [False, False, True, False, False, False]},
            id="TF-Agents terminates with a discount of 0 into the boundary step",
        ),
        pytest.param(
            # Three items end to end: the second and the third begin with the boundary step of a truncated episode.
            tf_agents_rows([MID, MID, LAST, LAST, FIRST, LAST], [1, 0, 1, 1, 0, 1]),
            {"starts": [0, 2, 3]},
            {"terminated": [False] * 5 + [True]},
            id="a boundary step at the start of an item does not look at the item before it",
        ),
        pytest.param(
            tf_agents_rows([LAST, FIRST, MID], [1, 1, 0]),
            {},
            {"terminated": [False] * 3},
            id="a boundary step at the start does not look at the end",
        ),
        pytest.param(
            tf_agents_rows([LAST, FIRST, MID], [1, 1, 0]),
            {"starts": []},
            {"terminated": [True, False, False]},
            id="a boundary step at the start of a ring looks at the end",
        ),
        pytest.param(
            {"step_type": np.array([LAST, MID, LAST, LAST]), "discount": np.array([1.0, 0.0, 1.0, 1.0])},
            # Rows 0, 2 and 3 begin slices: after a step into a terminal state, after a truncated one, and after none.
            {
                "starts": [0, 2, 3],
                "before": lambda: {"step_type": np.array([MID, MID, LAST]), "discount": np.array([0.0, 1.0, 0.0])},
            },
            {"terminated": [True, False, False, False]},
            id="a boundary step at the start of a slice looks at the row before it",
        ),
        pytest.param(
            tf_agents_rows([FIRST, LAST, LAST, LAST], [1, 1, 0, 0]),
            {},
            {"terminated": [False] * 4},
            id="padding after a boundary step is not terminated",
        ),
        pytest.param(
            {"done": np.zeros((2, 2, 1)), "reward": np.zeros((2, 2))},
            {"ndim": 2},
            {"done": [[False, False]] * 2},
            id="markers of a storage of environments have its dimensions",
        ),
    ],
)
def test_flags_of_steps_are_read(steps: Any, options: dict[str, Any], expected: dict[str, list[Any]]) -> None:
    markers = read_markers(steps, **options)
    assert {name: getattr(markers, name).tolist() for name in expected} == expected


# Trajectories.


def test_an_id_that_comes_again_is_another_trajectory() -> None:
    steps = {"traj_ids": np.array([1, 1, 2, 1, 1, 2]), "done": np.zeros(6, bool), "obs": np.arange(6)}
    assert [one["obs"].tolist() for one in split_trajectories(steps)] == [[0, 1], [2], [3, 4], [5]]


def test_strings_are_padded_with_empty_ones() -> None:
    padded = pad_trajectories([np.array([b"ab", b"c"], object), np.array([b"d"], object)])
    assert padded.data.tolist() == [[b"ab", b"c"], [b"d", b""]]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: pad_trajectories([]), StructureError, "one trajectory or more, got none"),
        (lambda: pad_trajectories([np.zeros(3)], 2), SpecError, "`length` must be >= 3, got 2"),
        (lambda: pad_trajectories([np.zeros(3), np.zeros(3, int)]), StructureError, "equal structure"),
        (lambda: pad_trajectories([np.zeros(3), np.zeros((3, 2))]), StructureError, "equal structure"),
        (
            lambda: pad_trajectories([{"a": np.zeros(3), "b": np.zeros(2)}]),
            StructureError,
            "one T for all",
        ),
        (lambda: pad_trajectories([np.float64(1)]), StructureError, "one T for all"),
        (lambda: split_trajectories({"obs": np.zeros(3)}), StructureError, "do not show the ends of trajectories"),
    ],
)
def test_bad_trajectories_are_named(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
