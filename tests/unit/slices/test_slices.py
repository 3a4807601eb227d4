"""Boundaries and slices worked by hand, kinds from flags of other libraries, trajectories taken apart and padded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import reverb_writer as rw
from reverb_writer.errors import IncompleteError, SpecError, StructureError
from reverb_writer.rows import ACTION, FIRST, LAST, PADDING, TERMINAL, kinds_of
from reverb_writer.slices import (
    SliceSampler,
    Trajectories,
    find_trajectories,
    gather,
    pad_trajectories,
    split_trajectories,
)


def flags(size: int, *rows: int) -> Any:
    return np.isin(np.arange(size), rows)


def kinds(size: int, *, first: Sequence[int] = (), last: Sequence[int] = (), padding: Sequence[int] = ()) -> Any:
    """Return kinds [size] of rows with actions, except for padding."""
    found = FIRST * flags(size, *first) + LAST * flags(size, *last) + ACTION
    return np.where(flags(size, *padding), PADDING, found).astype(np.uint8)


def shows(found: Trajectories) -> tuple[list[int], list[int], list[int]]:
    return found.starts.tolist(), found.stops.tolist(), found.lengths.tolist()


@pytest.mark.parametrize(
    ("of_rows", "ring", "expected"),
    [
        (kinds(10, first=[3, 5, 8]), {}, ([0, 3, 5, 8], [2, 4, 7, 9], [3, 2, 3, 2])),
        (kinds(1), {"is_full": True}, ([0], [0], [1])),
        # A cursor in the middle of a trajectory cuts it in two.
        (kinds(6), {"is_full": True, "cursor": 2}, ([3], [2], [6])),
        (kinds(6, last=[1, 3]), {}, ([0, 2, 4], [1, 3, 5], [2, 2, 2])),
        # Starts alone are enough, also across the edge of a full ring.
        (kinds(6, first=[1, 4]), {"is_full": True}, ([4, 1], [0, 3], [3, 3])),
        # The next start shows an end without a mark.
        (kinds(6, first=[0, 2, 4], last=[1, 5]), {}, ([0, 2, 4], [1, 3, 5], [2, 2, 2])),
        # Rows of padding separate trajectories, and belong to none: row 2 of one environment, row 1 of the other.
        (np.stack([kinds(3, padding=[2]), kinds(3, padding=[1])], 1), {}, ([0, 0, 2], [1, 0, 2], [2, 1, 1])),
        # Of two environments, the second has no end, and gets one at its last row.
        (np.stack([kinds(3, last=[1]), kinds(3)], 1), {"is_full": True}, ([2, 0], [1, 2], [3, 3])),
    ],
)
def test_boundaries_are_recovered(
    of_rows: Any, ring: dict[str, Any], expected: tuple[list[int], list[int], list[int]]
) -> None:
    assert shows(find_trajectories(of_rows, **ring)) == expected


@pytest.mark.parametrize(
    ("of_rows", "ring", "error", "message"),
    [
        (flags(3), {}, StructureError, "`kinds` must be a NumPy array of uint8, got bool. `reverb_writer.rows"),
        ([2, 6], {}, StructureError, "`kinds` must be a NumPy array of uint8, got list"),
        (kinds(0), {}, IncompleteError, "no rows yet"),
        (np.array(2, np.uint8), {}, IncompleteError, "no rows yet"),
        (kinds(3, padding=range(3)), {}, IncompleteError, "all 3 rows are padding"),
        (kinds(3), {"cursor": 1}, SpecError, "`cursor` needs a ring that is full, got 1"),
        (kinds(3), {"is_full": True, "cursor": 3}, SpecError, "`cursor` must be <= 2, got 3"),
    ],
)
def test_kinds_without_a_trajectory_are_refused(
    of_rows: Any, ring: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        find_trajectories(of_rows, **ring)


@pytest.mark.parametrize("lengths", [[], [0], [[1]], [1.5], [2, -1]])
def test_lengths_of_trajectories_are_integers_of_one_or_more(lengths: Any) -> None:
    with pytest.raises(StructureError, match="one or more integers >= 1"):
        Trajectories.from_lengths(lengths)


# Kinds of rows in memory, from the flags and ids of other libraries.


IDS = np.array([5, 5, 5, 0, 0, 1, 1, 1, 5, 5])


@pytest.mark.parametrize(
    ("steps", "ring", "expected"),
    [
        ({"traj_ids": IDS}, {}, ([0, 3, 5, 8], [2, 4, 7, 9], [3, 2, 3, 2])),
        ({"traj_ids": IDS}, {"is_full": True}, ([8, 3, 5], [2, 4, 7], [5, 2, 3])),
        # The last row and the first row are of two trajectories.
        ({"collector": {"traj_ids": np.array([3, 3, 4, 4])}}, {"is_full": True}, ([0, 2], [1, 3], [2, 2])),
        # An end separates two trajectories with the same id, and ids separate trajectories without an end.
        ({"traj_ids": np.array([7, 7, 7, 8]), "done": flags(4, 0)}, {}, ([0, 1, 3], [0, 2, 3], [1, 2, 1])),
        ({"terminated": flags(4, 1), "truncated": flags(4, 2)}, {}, ([0, 2, 3], [1, 2, 3], [2, 1, 1])),
        # `done` beside `next` belongs to the step before.
        ({"done": flags(3, 1), "next": {"done": flags(3, 0)[:, None]}}, {}, ([0, 1], [0, 2], [1, 2])),
        # A boundary row of TF-Agents at the start of a ring belongs to the trajectory at its end.
        (
            {"step_type": np.array([2, 0, 1]), "discount": np.array([1.0, 1.0, 0.0])},
            {"is_full": True},
            ([1], [0], [3]),
        ),
    ],
)
def test_trajectories_of_rows_in_memory_are_found(
    steps: Any, ring: dict[str, Any], expected: tuple[list[int], list[int], list[int]]
) -> None:
    found = kinds_of(steps, is_ring=bool(ring), outcome=False)
    assert shows(find_trajectories(found, **ring)) == expected


def test_ring_knows_that_the_row_before_its_first_row_terminated() -> None:
    steps = {"step_type": np.array([2, 0, 1]), "discount": np.array([1.0, 1.0, 0.0])}
    assert kinds_of(steps, is_ring=True).tolist() == [LAST | TERMINAL, FIRST | ACTION, ACTION]
    assert kinds_of(steps).tolist() == [LAST, FIRST | ACTION, ACTION]


def test_rows_after_an_end_in_items_end_to_end_are_refused_if_they_may_be_padding() -> None:
    steps = {"is_last": flags(6, 1, 5), "is_terminal": flags(6, 1)}  # two items of three rows
    assert kinds_of(steps).tolist() == [2, 12, 3, 2, 2, 4]  # one storage: row 2 begins another episode
    with pytest.raises(StructureError, match="no leaf shows whether these rows are padding or another episode"):
        kinds_of(steps, starts=flags(6, 0, 3))


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
        (lambda: split_trajectories({"obs": np.zeros(3)}), StructureError, "no leaf shows where episodes end"),
        (lambda: split_trajectories({"done": np.zeros((3, 2))}), StructureError, "Pass `trajectories` of several env"),
    ],
)
def test_bad_trajectories_are_named(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


# Slices.


THREE = Trajectories.from_lengths([3, 6, 2])


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


def test_padding_repeats_the_last_row_and_has_a_kind_of_its_own() -> None:
    of_rows = kinds(3, first=[0, 2], last=[1, 2])
    slices = SliceSampler(2, 4, short="pad").each(find_trajectories(of_rows), rng())
    batch = gather({"reward": np.arange(3)}, slices, of_rows)
    assert batch.data["reward"].tolist() == [0, 1, 1, 1, 2, 2, 2, 2]
    assert batch.row_kinds.tolist() == [3, 6, 16, 16, 7, 16, 16, 16]
    assert batch.mask.tolist() == [True, True, False, False, True, False, False, False]
    assert batch.slices.first_rows.tolist() == true_rows(batch.slices.starts) == [0, 4]
    assert batch.slices.last_rows.tolist() == [1, 4]


def test_kinds_that_the_leaves_show_do_not_depend_on_padding_or_on_other_slices() -> None:
    steps = {"done": flags(3, 1, 2), "terminated": flags(3, 2), "reward": np.arange(3)}
    slices = SliceSampler(2, 3, short="pad").each(Trajectories.from_lengths([2, 1]), rng())
    batch = gather(steps, slices)
    assert batch.row_kinds is None
    assert batch.kinds.tolist() == [2, 6, 16, 14, 16, 16]
    assert true_rows(batch.is_last) == [1, 3]
    assert true_rows(batch.is_terminal) == [3]


def test_mask_of_slices_needs_no_flags() -> None:
    slices = SliceSampler(1, 3, short="pad").each(Trajectories.from_lengths([2]), rng())
    batch = gather({"reward": np.arange(2)}, slices)
    assert batch.mask.tolist() == [True, True, False]
    with pytest.raises(StructureError, match="no leaf shows where episodes end; found `reward`"):
        batch.kinds  # noqa: B018  # it raises


def test_slices_of_environments_stay_in_their_environment() -> None:
    ids = np.array([[0, 3], [0, 3], [1, 3], [1, 4], [1, 4]])
    steps = {"time": np.repeat(np.arange(5), 2).reshape(5, 2), "env": np.tile([0, 1], (5, 1)), "traj_ids": ids}
    of_rows = kinds_of({"traj_ids": ids.T}, outcome=False).T
    batch = gather(steps, SliceSampler(4, 3).each(find_trajectories(of_rows), rng()))
    assert batch.data["time"].tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4]
    assert batch.data["env"].tolist() == [0] * 5 + [1] * 5
    assert batch.slices.trajectories.tolist() == [0, 1, 3, 4]


# Slices that begin at beginnings of episodes.


@pytest.mark.parametrize("by", ["trajectory", "row"])
def test_slices_that_start_with_an_episode(by: Any) -> None:
    # Rows 0 to 2 are the end of an episode whose beginning is not stored; the last episode is short.
    found = find_trajectories(kinds(10, first=[3, 8], last=[2, 7]))
    assert found.begins_episode.tolist() == [False, True, True]
    assert drawn(SliceSampler(3, 3, by=by, start="episode"), found) == {(3, 4, 5), (8, 9)}
    assert drawn(SliceSampler(3, 3, by=by, start="episode", short="skip"), found) == {(3, 4, 5)}
    passes = SliceSampler(1, 3, by=by, start="episode").one_pass(found, rng(), shuffle=False)
    assert [slices.trajectories.tolist() for slices in passes] == [[1], [2]]
    with pytest.raises(IncompleteError, match="none of 1 trajectories begins with a row that is known to be the first"):
        SliceSampler(3, 3, by=by, start="episode").sample(find_trajectories(kinds(4)), rng())


def test_trajectories_that_are_all_shorter_than_a_slice_are_warned_of() -> None:
    """Rows [B, T] in place of [T, B], or ids that alternate, make many trajectories of one row."""
    of_rows = kinds_of({"traj_ids": np.array([0, 1, 0, 1])}, outcome=False)
    for draw in (SliceSampler(2, 2).sample, SliceSampler(2, 2, short="pad").one_pass):
        with pytest.warns(UserWarning, match="No trajectory has `slice_len` = 2 rows.*must not alternate"):
            draw(find_trajectories(of_rows), rng())
    SliceSampler(2, 1).sample(find_trajectories(of_rows), rng())
    SliceSampler(2, 9).sample(find_trajectories(kinds(4)), rng())  # all rows are one trajectory


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


# Batches.


def test_batches_own_their_data_and_keep_structure_and_dtypes() -> None:
    steps = {"pair": (np.arange(11, dtype=np.int8), np.array([b"x"] * 11, object)), "none": ()}
    slices = SliceSampler(1, 11).each(Trajectories.from_lengths([11]), rng())
    batch = gather(steps, slices)
    assert batch.data["pair"][0].dtype == np.int8
    assert batch.data["pair"][1].dtype == object
    assert batch.data["none"] == ()
    assert not np.shares_memory(batch.data["pair"][0], steps["pair"][0])


# Members.


def test_slices_of_several_storages_are_one_batch() -> None:
    def member(first: int, lengths: list[int], number: int) -> rw.Batch:
        slices = SliceSampler(number, 3).sample(Trajectories.from_lengths(lengths), rng())
        return gather({"reward": first + np.arange(sum(lengths))}, slices)

    batch = rw.Batch.concatenate([member(0, [4, 4], 1), member(100, [5], 2)], numbers=[3, 7])
    assert batch.slices.members.tolist() == [3, 7, 7]
    assert batch.slices.first_rows.tolist() == true_rows(batch.slices.starts) == [0, 3, 6]
    assert batch.slices.last_rows.tolist() == [2, 5, 8]
    np.testing.assert_array_equal(batch.data["reward"] % 100, batch.slices.rows)
    assert (batch.data["reward"] // 100).tolist() == [0] * 3 + [1] * 6
    for first, stop in ((0, 1), (1, 3)):
        part = batch.slices.part(first, stop)
        assert part.members.tolist() == [[3], [7, 7]][first]
        assert part.first_rows.tolist() == true_rows(part.starts) == [[0], [0, 3]][first]


def test_batch_has_the_kinds_of_all_members_or_of_none() -> None:
    def member(of_rows: Any, **leaves: Any) -> rw.Batch:
        return gather(
            {"row": np.arange(2), **leaves}, SliceSampler(1, 2).each(Trajectories.from_lengths([2]), rng()), of_rows
        )

    shown = {"done": flags(2, 1), "terminated": flags(2)}
    stored, by_leaves = member(kinds(2, first=[0]), **shown), member(None, **shown)
    assert rw.Batch.concatenate([stored, by_leaves]).row_kinds.tolist() == [3, 2, 2, 6]
    both = rw.Batch.concatenate([by_leaves, by_leaves])
    assert both.row_kinds is None
    assert both.kinds.tolist() == [2, 6, 2, 6]
    unknown = rw.Batch.concatenate([member(kinds(2, first=[0])), member(None)])
    assert unknown.row_kinds is None
    with pytest.raises(StructureError, match="no leaf shows where episodes end"):
        unknown.kinds  # noqa: B018  # it raises


# Refusals.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_slices": 0}, "`num_slices` must be >= 1, got 0."),
        ({"slice_len": 2.5}, "`slice_len` must be an integer, got 2.5"),
        ({"by": "step"}, "`by` must be one of 'trajectory', 'row', got 'step'."),
        ({"short": "strict"}, "`short` must be one of 'keep', 'skip', 'pad', got 'strict'."),
        ({"start": "is_first"}, "`start` must be one of 'any', 'episode', got 'is_first'."),
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
    with pytest.raises(StructureError, match=r"leaf `kinds`: shape \(12,\), expected \(11,\) as in all leaves"):
        gather({"reward": np.zeros(11)}, slices, kinds(12))
    with pytest.raises(StructureError, match="`kinds` must be a NumPy array of uint8, got bool"):
        gather({"reward": np.zeros(11)}, slices, flags(11))


def test_members_that_differ_are_named() -> None:
    def member(steps: Any) -> rw.Batch:
        return gather(steps, SliceSampler(1, 2).each(Trajectories.from_lengths([2]), rng()))

    one = member({"reward": np.zeros(2, np.float32)})
    with pytest.raises(StructureError, match="steps of equal structure"):
        rw.Batch.concatenate([one, member({"rewards": np.zeros(2)})])
    with pytest.raises(StructureError, match=r"leaf `reward` float64 \[2\], expected `reward` float32 \[2\]"):
        rw.Batch.concatenate([one, member({"reward": np.zeros(2)})])
    with pytest.raises(StructureError, match="all members must be windows, or slices with or without `next`"):
        rw.Batch.concatenate([one, rw.Batch(one.data, None)])
