"""Boundaries and slices worked by hand, what steps of each library tell, and trajectories taken apart and padded."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import reverb_writer as rw
from reverb_writer.errors import IncompleteError, SpecError, StructureError
from reverb_writer.slices import (
    Markers,
    SliceSampler,
    Trajectories,
    find_trajectories,
    gather,
    pad_trajectories,
    read_markers,
    sample_members,
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
        (Markers(traj_ids=IDS), {"is_full": True}, WRAPPED),
        (Markers(traj_ids=IDS), {}, ([0, 3, 5, 8], [2, 4, 7, 9], [3, 2, 3, 2])),
        (Markers(done=flags(1)), {"is_full": True}, ([0], [0], [1])),
        # A cursor in the middle of a trajectory cuts it in two.
        (Markers(done=flags(6)), {"is_full": True, "cursor": 2}, ([3], [2], [6])),
        # The end may be marked as any of the three.
        (Markers(terminated=flags(6, 1), truncated=flags(6, 3)), {}, ([0, 2, 4], [1, 3, 5], [2, 2, 2])),
        # Starts alone are enough, also across the edge of a full ring.
        (Markers(is_init=flags(6, 1, 4)), {"is_full": True}, ([4, 1], [0, 3], [3, 3])),
        # An end that nobody marked is known by the next start; ids of two writers that are alike, by the end.
        (Markers(done=flags(6, 1, 5), is_init=flags(6, 0, 2, 4)), {}, ([0, 2, 4], [1, 3, 5], [2, 2, 2])),
        (Markers(traj_ids=np.zeros(6, int), done=flags(6, 1)), {}, ([0, 2], [1, 5], [2, 4])),
        # Rows of padding separate trajectories, and belong to none: row 2 of one environment, row 1 of the other.
        (Markers(mask=np.array([[1, 1], [1, 0], [0, 1]], bool)), {}, ([0, 0, 2], [1, 0, 2], [2, 1, 1])),
        # Of two environments, the second has no end, and gets one at its last row.
        (Markers(done=np.array([[0, 0], [1, 0], [0, 0]])), {"is_full": True}, ([2, 0], [1, 2], [3, 3])),
    ],
)
def test_boundaries_are_recovered(
    markers: Markers, ring: dict[str, Any], expected: tuple[list[int], list[int], list[int]]
) -> None:
    found = find_trajectories(markers, **ring)
    assert (found.starts.tolist(), found.stops.tolist(), found.lengths.tolist()) == expected


@pytest.mark.parametrize(
    ("markers", "ring", "error", "message"),
    [
        (Markers(), {}, StructureError, "the steps do not show the ends of trajectories"),
        (Markers(done=flags(0)), {}, IncompleteError, "no rows yet"),
        (Markers(done=np.True_), {}, IncompleteError, "no rows yet"),  # type: ignore[arg-type]
        (Markers(mask=flags(3)), {}, IncompleteError, "all 3 rows are padding"),
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
                "done": NONE,
                "terminated": NONE,
                "is_init": LAST_OF_3[::-1],  # `done` of the step before
                "next": {"done": LAST_OF_3, "terminated": NONE, "truncated": LAST_OF_3},
                "collector": {"traj_ids": np.array([7, 7, 7])},
            },
            {},
            {"is_init": [True, False, False], "truncated": [False, False, True], "traj_ids": [7, 7, 7]},
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
        (lambda: pad_trajectories([{"a": np.zeros(3), "b": np.zeros(2)}]), StructureError, "one T for all"),
        (lambda: pad_trajectories([np.float64(1)]), StructureError, "one T for all"),
        (lambda: split_trajectories({"obs": np.zeros(3)}), StructureError, "do not show the ends of trajectories"),
    ],
)
def test_bad_trajectories_are_named(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


# Slices.


THREE = Trajectories.from_lengths([3, 6, 2])
FALSE = np.zeros(11, bool)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def true_rows(flags: Any) -> list[int]:
    found: list[int] = np.flatnonzero(flags).tolist()
    return found


def drawn(sampler: SliceSampler, trajectories: Trajectories, times: int = 200, **kwargs: Any) -> set[tuple[int, ...]]:
    """Draw many slices, and return which there were, each as its rows."""
    random, found = rng(), set()
    for _ in range(times):
        slices = sampler.sample(trajectories, random, **kwargs)
        found |= {tuple(rows.tolist()) for rows in np.split(slices.rows, slices.first_rows[1:])}
    return found


# Lengths 3, 6 and 2, slices of 5 rows.


def test_short_trajectories_are_skipped_if_so_asked() -> None:
    assert drawn(SliceSampler(3, 5, short="skip"), THREE) == {(3, 4, 5, 6, 7), (4, 5, 6, 7, 8)}
    (slices,) = SliceSampler(3, 3, short="skip").one_pass(THREE, rng())
    assert sorted(slices.trajectories.tolist()) == [0, 1]
    with pytest.raises(IncompleteError, match="expected 7 rows, got 3 of 2 to 6"):
        SliceSampler(2, 7, short="skip").sample(THREE, rng())


def test_markers_are_not_repeated_on_padding() -> None:
    steps = {"is_init": np.array([1, 0, 1]), "terminated": np.array([0, 1, 1]), "reward": np.arange(3)}
    batch = gather(steps, SliceSampler(2, 4, short="pad").each(Trajectories.from_lengths([2, 1]), rng()))
    assert true_rows(batch.markers.is_init) == [0, 4]
    for name in ("terminated", "done", "truncated"):
        assert true_rows(getattr(batch.markers, name)) == [1, 4]
    assert batch.data["is_init"].tolist() == [1, 0, 0, 0, 1, 1, 1, 1]  # as stored


def test_slices_of_environments_stay_in_their_environment() -> None:
    ids = np.array([[0, 3], [0, 3], [1, 3], [1, 4], [1, 4]])
    steps = {"time": np.repeat(np.arange(5), 2).reshape(5, 2), "env": np.tile([0, 1], (5, 1)), "traj_ids": ids}
    batch = gather(steps, SliceSampler(4, 3).each(find_trajectories(Markers(traj_ids=ids)), rng()))
    assert batch.data["time"].tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4]
    assert batch.data["env"].tolist() == [0] * 5 + [1] * 5
    assert batch.markers.traj_ids.tolist() == [0, 0, 1, 1, 1, 3, 3, 3, 4, 4]


# Spans.


@pytest.mark.parametrize(
    ("span", "expected"),
    [
        ((2, 0), {(0,), (0, 1), (0, 1, 2), (1, 2, 3)}),
        ((0, 2), {(0, 1, 2), (1, 2, 3), (2, 3), (3,)}),
        (2, {(0,), (0, 1), (0, 1, 2), (1, 2, 3), (2, 3), (3,)}),
    ],
)
def test_slices_hang_over_the_edges_as_far_as_the_span(span: Any, expected: set[tuple[int, ...]]) -> None:
    assert drawn(SliceSampler(4, 3, span=span), Trajectories.from_lengths([4])) == expected


# By trajectory, by row, by priority; with and without replacement.


def test_priority_zero_is_never_drawn() -> None:
    assert drawn(SliceSampler(2, 5, by="row"), THREE, priorities=flags(11, 4, 5, 9)) == {(4, 5, 6, 7, 8), (9, 10)}
    assert drawn(SliceSampler(2, 5), THREE, priorities=[1, 0, 0]) == {(0, 1, 2)}
    passes = [*SliceSampler(2, 5).one_pass(THREE, rng(), priorities=[1, 0, 1])]
    assert [sorted(slices.trajectories.tolist()) for slices in passes] == [[0, 2]]


def test_a_pass_by_trajectory_is_shuffled_and_may_drop_its_last_batch() -> None:
    many = Trajectories.from_lengths([4] * 10)
    order = np.concatenate([slices.trajectories for slices in SliceSampler(4, 3).one_pass(many, rng())]).tolist()
    assert sorted(order) == list(range(10)) != order
    assert [len(slices.lengths) for slices in SliceSampler(4, 3).one_pass(many, rng(), drop_last=True)] == [4, 4]
    in_order = np.concatenate([s.trajectories for s in SliceSampler(4, 3).one_pass(many, rng(), shuffle=False)])
    assert in_order.tolist() == list(range(10))


# Markers of batches.


def gathered(**markers: Any) -> rw.Batch:
    steps = {"reward": np.arange(11)}
    return gather(steps, SliceSampler(3, 5).each(THREE, rng()), Markers(**markers))


def test_stored_starts_are_kept_and_done_is_the_union_of_what_is_stored_and_the_ends_of_slices() -> None:
    # Row 5 is the third or second one of the slice of trajectory 1.
    batch = gathered(is_init=flags(11, 0, 5), terminated=flags(11, 2), truncated=flags(11, 5), done=FALSE)
    row_of_5 = batch.data["reward"].tolist().index(5)
    assert true_rows(batch.markers.is_init) == [0, 3, row_of_5, 8]
    assert true_rows(batch.markers.terminated) == [2]
    assert true_rows(batch.markers.truncated) == [2, 7, 9]
    assert true_rows(batch.markers.done) == [2, row_of_5, 7, 9]


def test_batches_own_their_data_and_keep_structure_and_dtypes() -> None:
    steps = {"pair": (np.arange(11, dtype=np.int8), np.array([b"x"] * 11, object)), "none": ()}
    slices = SliceSampler(1, 11).each(Trajectories.from_lengths([11]), rng())
    batch = gather(steps, slices)
    assert batch.data["pair"][0].dtype == np.int8
    assert batch.data["pair"][1].dtype == object
    assert batch.data["none"] == ()
    assert not np.shares_memory(batch.data["pair"][0], steps["pair"][0])


# Members.


def member(first: int, lengths: list[int]) -> tuple[Any, Trajectories]:
    trajectories = Trajectories.from_lengths(lengths)
    return {"reward": first + np.arange(sum(lengths)), "traj_ids": np.zeros(sum(lengths), int)}, trajectories


def test_members_have_their_share_of_a_batch() -> None:
    members = [member(0, [4, 4]), member(100, [5]), member(200, [9])]
    batch = sample_members(members, SliceSampler(12, 3), rng())
    assert batch.markers.members is not None
    assert batch.markers.members.tolist() == [0] * 12 + [1] * 12 + [2] * 12
    np.testing.assert_array_equal(batch.data["reward"] // 100, batch.markers.members)
    assert true_rows(batch.markers.is_init) == list(range(0, 36, 3))
    assert true_rows(batch.markers.truncated) == list(range(2, 36, 3))
    np.testing.assert_array_equal(batch.markers.slices.rows, batch.data["reward"] % 100)


def test_shares_of_members_are_rounded_at_random_and_exact_on_average() -> None:
    members = [member(0, [4]), member(100, [5]), member(200, [9])]
    found = [sample_members(members, SliceSampler(16, 1), rng(seed), [0, 0.9, 0.1]) for seed in range(200)]
    counts = np.array([np.bincount(np.asarray(batch.markers.members), minlength=3) for batch in found])
    assert {tuple(row) for row in counts.tolist()} == {(0, 14, 2), (0, 15, 1)}
    np.testing.assert_allclose(counts.mean(0), [0, 14.4, 1.6], atol=0.1)


# Refusals.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_slices": 0}, "`num_slices` must be >= 1, got 0."),
        ({"slice_len": 2.5}, "`slice_len` must be an integer, got 2.5"),
        ({"by": "step"}, "`by` must be one of 'trajectory', 'row', got 'step'."),
        ({"short": "strict"}, "`short` must be one of 'keep', 'skip', 'pad', got 'strict'."),
        ({"span": 5}, "`span` must be <= 4, got 5."),
        ({"span": (0, -1)}, "`span` must be >= 0, got -1."),
        ({"span": (1, 1, 1)}, "`span` must be a number or a pair of numbers"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        SliceSampler(**{"num_slices": 2, "slice_len": 5, **arguments})


@pytest.mark.parametrize(
    ("by", "priorities", "error", "message"),
    [
        ("row", np.ones(3), SpecError, r"one for each row, \(11,\), got shape \(3,\)"),
        ("trajectory", np.ones(11), SpecError, r"one for each trajectory, \(3,\), got shape \(11,\)"),
        ("trajectory", [1, -1, 1], SpecError, "finite numbers >= 0"),
        ("trajectory", [1, np.nan, 1], SpecError, "finite numbers >= 0"),
        ("trajectory", [0, 0, 0], IncompleteError, "priorities of all 3 candidates are 0"),
    ],
)
def test_bad_priorities_are_named(by: Any, priorities: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        SliceSampler(2, 5, by=by).sample(THREE, rng(), priorities)


def test_leaves_of_other_rows_are_named() -> None:
    slices = SliceSampler(2, 5).sample(THREE, rng())
    with pytest.raises(StructureError, match=r"leaf `a/b`: shape \(10, 2\), expected \(11,\) as in all leaves"):
        gather({"a": {"b": np.zeros((10, 2))}}, slices)
    with pytest.raises(StructureError, match=r"leaf `done`: shape \(12,\), expected \(11,\) as in all leaves"):
        gather({"reward": np.zeros(11)}, slices, Markers(done=np.zeros(12, bool)))


def test_bad_members_are_named() -> None:
    with pytest.raises(SpecError, match="got 0 weights and 0 members"):
        sample_members([], SliceSampler(2, 2), rng())
    with pytest.raises(SpecError, match="got 2 weights and 1 members"):
        sample_members([member(0, [4])], SliceSampler(2, 2), rng(), [1, 1])
    with pytest.raises(SpecError, match="not all 0, got"):
        sample_members([member(0, [4])] * 2, SliceSampler(2, 2), rng(), [0, 0])
    no_numbers: Any = ["a", "b"]
    with pytest.raises(SpecError, match="`weights` must be a finite number"):
        sample_members([member(0, [4])] * 2, SliceSampler(2, 2), rng(), no_numbers)
    other = {"reward": np.zeros(4)}, Trajectories.from_lengths([4])
    with pytest.raises(StructureError, match="steps of equal structure"):
        sample_members([member(0, [4]), other], SliceSampler(2, 2), rng())
    members = [({"reward": np.zeros(4, dtype)}, Trajectories.from_lengths([4])) for dtype in (np.float32, np.float64)]
    with pytest.raises(StructureError, match=r"leaf `reward` float64 \[2\], expected `reward` float32 \[2\]"):
        sample_members(members, SliceSampler(2, 2), rng())
