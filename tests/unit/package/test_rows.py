"""Kinds of rows: the rule for each layout, by hand, and its contradictions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from reverb_writer.errors import SpecError, StructureError
from reverb_writer.rows import ACTION, FIRST, LAST, PADDING, TERMINAL, first_rows, kinds_of, last_rows
from reverb_writer.rows.kinds import checked_kinds, pairs


def rows(**columns: list[Any]) -> dict[str, Any]:
    return {name: np.array(values) for name, values in columns.items()}


def nested(name: str, **columns: list[Any]) -> dict[str, Any]:
    return {name: rows(**columns)}


# Two episodes: three rows, the last of which is terminal; and three rows, of which a limit ended the last.
FIRSTS, LASTS = [1, 0, 0, 1, 0, 0], [0, 0, 1, 0, 0, 1]
BOUNDARY = [3, 2, 12, 3, 2, 4]
ACTIONS = [3, 2, 14, 3, 2, 6]


@pytest.mark.parametrize(
    ("steps", "last_row", "expected"),
    [
        (rows(is_first=FIRSTS, is_last=LASTS, is_terminal=[0, 0, 1, 0, 0, 0]), None, BOUNDARY),
        (rows(is_first=FIRSTS, is_last=LASTS, terminated=[0, 0, 1, 0, 0, 0]), None, BOUNDARY),
        (rows(is_first=FIRSTS, is_last=LASTS, truncated=[0, 0, 0, 0, 0, 1]), None, BOUNDARY),
        (rows(is_first=FIRSTS, is_last=LASTS, discount=[1, 0, 0, 1, 1, 0]), None, BOUNDARY),
        (rows(is_first=FIRSTS, is_last=LASTS, is_terminal=[0, 0, 1, 0, 0, 0]), "action", ACTIONS),
        (rows(is_first=FIRSTS, is_last=LASTS, discount=[1, 1, 0, 1, 1, 1]), "action", ACTIONS),
        (
            rows(step_type=[0, 1, 2, 0, 1, 2], next_step_type=[1, 2, 0, 1, 2, 0], discount=[1, 0, 1, 1, 1, 1]),
            None,
            BOUNDARY,
        ),
        (rows(step_type=[0, 1, 2, 0, 1, 2], discount=[1, 0, 0, 1, 1, 0]), None, BOUNDARY),
        (rows(terminated=[0, 0, 1, 0, 0, 0], truncated=[0, 0, 0, 0, 0, 1]), "boundary", [2, 2, 12, 3, 2, 4]),
        (rows(terminated=[0, 0, 1, 0, 0, 0], truncated=[0, 0, 0, 0, 0, 1]), "action", [2, 2, 14, 3, 2, 6]),
        (rows(terminals=[0, 0, 1, 0, 0, 0], timeouts=[0, 0, 0, 0, 0, 1]), None, [2, 2, 14, 3, 2, 6]),
        (rows(dones=LASTS, time_outs=[0, 0, 0, 0, 0, 1]), None, [2, 2, 14, 3, 2, 6]),
        (rows(dones=LASTS, timeouts=[0, 0, 0, 0, 0, 1]), None, [2, 2, 14, 3, 2, 6]),
        (rows(discount=[1.0, 1.0, 0.0]), "action", [2, 2, 14]),
        (rows(is_first=FIRSTS, discount=[1, 1, 0, 1, 1, 1]), "action", [3, 2, 14, 3, 2, 2]),
        (
            {
                **rows(is_init=FIRSTS, done=[0, 1, 0, 0, 1, 0]),  # the root's `done` is of the row before
                "next": rows(done=LASTS, terminated=[0, 0, 1, 0, 0, 0], truncated=[0, 0, 0, 0, 0, 1]),
            },
            None,
            ACTIONS,
        ),
        (rows(start_of_episode=FIRSTS, discount=[1, 0, 0, 1, 1, 1]), None, [3, 2, 12, 3, 2, 2]),
        (rows(discount=[1.0, 1.0, 0.0, 0.0, 0.0]), None, [2, 2, 2, 12, 16]),
        (rows(is_first=[1, 0, 0, 0], is_last=[0, 1, 0, 0], is_terminal=[0, 1, 0, 0]), None, [3, 12, 16, 16]),
        # Padding of TF-Agents has `step_type` LAST: after a boundary row, and after an episode that was cut.
        (
            rows(step_type=[0, 2, 2, 2], next_step_type=[2, 0, 0, 0], discount=[0, 1, 0, 0]),
            None,
            [3, 12, 16, 16],
        ),
        (rows(step_type=[0, 1, 2, 2], next_step_type=[1, 1, 0, 0], discount=[1, 1, 0, 0]), None, [3, 2, 16, 16]),
    ],
)
def test_rows_of_each_layout(steps: Any, last_row: Any, expected: list[int]) -> None:
    assert kinds_of(steps, last_row=last_row).tolist() == expected
    windows = {name: leaf[None] if hasattr(leaf, "shape") else rows_of_nest(leaf) for name, leaf in steps.items()}
    if "is_first" in steps or "step_type" in steps or "is_init" in steps:
        assert kinds_of(windows, last_row=last_row).tolist() == [expected]


def rows_of_nest(nest: Any) -> Any:
    return {name: leaf[None] for name, leaf in nest.items()}


def test_ids_of_trajectories_show_first_rows_and_no_outcome() -> None:
    steps = rows(traj_ids=[7, 7, 5, 7])
    assert kinds_of(steps, outcome=False).tolist() == [2, 2, 3, 3]
    with pytest.raises(StructureError, match="no leaf shows where episodes end"):
        kinds_of(steps)


def test_items_that_lie_end_to_end_do_not_see_each_other() -> None:
    steps = rows(step_type=[0, 1, 2, 1], next_step_type=[1, 1, 0, 1], discount=[1, 0, 1, 1])
    assert kinds_of(steps, starts=np.array([1, 0, 0, 0])).tolist()[2] == PADDING  # no row of type LAST was due
    assert kinds_of(steps, starts=np.array([1, 0, 1, 1])).tolist() == [3, 2, LAST, ACTION | 0]


@pytest.mark.parametrize(
    ("steps", "arguments", "error", "message"),
    [
        (rows(reward=[1]), {}, StructureError, "no leaf shows where episodes end; found `reward`"),
        (rows(is_last=[0, 1]), {}, StructureError, "no leaf shows whether the environment ended it"),
        (rows(terminated=[0, 1], truncated=[0, 0]), {}, StructureError, r"Pass `last_row='action'`"),
        (rows(is_last=[0, 1], is_terminal=[1, 0]), {}, StructureError, "`is_terminal` is set on 1 rows"),
        (
            rows(is_last=[0, 1], is_terminal=[0, 1], reward=[1.0, 2.0]),
            {},
            StructureError,
            "1 last rows .* have a reward",
        ),
        (rows(discount=[1, 0, 1, 1]), {}, StructureError, "1 rows with another discount follow|have a reward"),
        (nested("x", is_last=[0]), {}, StructureError, "found `x/is_last`"),
        (
            {"is_last": np.array([[1, 0]]), "is_terminal": np.array([[1, 0]])},
            {},
            StructureError,
            "whether these rows are padding",
        ),
        (rows(is_last=[0], is_terminal=[0]), {"last_row": "end"}, SpecError, "'boundary', 'action' or None, got 'end'"),
        (rows(is_last=[0], is_terminal=[0]), {"mask": [[1]]}, StructureError, "mask has shape"),
        (
            {"is_last": np.zeros(2), "is_terminal": np.zeros(3)},
            {},
            StructureError,
            "flags must all be",
        ),
    ],
)
def test_rows_that_do_not_say_what_they_are_or_contradict_themselves(
    steps: Any, arguments: Any, error: Any, message: str
) -> None:
    with pytest.raises(error, match=message):
        kinds_of(steps, **arguments)


@pytest.mark.parametrize("last_row", ["boundary", "action"])
def test_argument_settles_a_reward_on_a_last_row(last_row: Any) -> None:
    steps = rows(is_last=[0, 1], is_terminal=[0, 1], reward=[1.0, 2.0])
    expected = LAST | TERMINAL | (ACTION if last_row == "action" else 0)
    assert kinds_of(steps, last_row=last_row).tolist() == [ACTION, expected]


def test_mask_is_padding_and_begins_no_episode() -> None:
    steps = {"is_last": np.array([[0, 1, 0, 0]]), "is_terminal": np.array([[0, 1, 0, 0]])}
    assert kinds_of(steps, mask=np.array([[1, 1, 0, 0]])).tolist() == [[ACTION, LAST | TERMINAL, PADDING, PADDING]]
    assert kinds_of((steps, np.array([[True, True, False, False]]))).tolist()[0][2:] == [PADDING, PADDING]
    assert kinds_of(steps, mask=np.ones((1, 4))).tolist() == [[ACTION, LAST | TERMINAL, FIRST | ACTION, ACTION]]


def test_arithmetic_of_a_window_with_two_episodes_a_cut_and_padding() -> None:
    kinds = np.array([2, 4, 3, 2, 3, 6, 3, 16], np.uint8)
    found = pairs(kinds)
    assert found.mask.tolist() == [True, False, True, False, True, False, False]
    assert found.continues.tolist() == [False] * 7
    assert not found.terminal.any()
    assert first_rows(kinds).nonzero()[0].tolist() == [0, 2, 4, 6]
    assert last_rows(kinds).nonzero()[0].tolist() == [1, 3, 5, 6]
    starts = np.arange(8) == 1  # another slice
    assert not pairs(kinds, starts).mask[0]


BEGIN = FIRST | ACTION


def bits(*kinds: int) -> Any:
    return np.array(kinds, np.uint8)


def test_a_transition_to_a_terminal_row_with_an_action_does_not_terminate() -> None:
    """The last row shows the state before the last action; the state after it is the terminal one."""
    kinds = bits(BEGIN, ACTION, LAST | ACTION | TERMINAL)
    found = pairs(kinds)
    assert (found.mask.tolist(), found.terminal.tolist()) == ([True, True], [False, False])
    whole = pairs(kinds, last_row="action")
    assert (whole.mask.tolist(), whole.terminal.tolist()) == ([True] * 3, [False, False, True])


def test_a_terminal_row_with_an_action_continues_into_no_other_episode() -> None:
    kinds = bits(BEGIN, LAST | ACTION | TERMINAL, BEGIN, ACTION)
    assert pairs(kinds, last_row="action").continues.tolist() == [True, False, False, False]


def test_pairs_of_slices_do_not_cross_them() -> None:
    kinds, starts = bits(BEGIN, ACTION, ACTION, ACTION), np.array([True, False, True, False])
    assert pairs(kinds, starts).mask.tolist() == [True, False, True]
    assert pairs(kinds, starts).continues.tolist() == [False, False, False]
    known = pairs(kinds, starts, following=bits(ACTION, ACTION, ACTION, PADDING))
    assert (known.mask.tolist(), known.continues.tolist()) == ([True, True, True, False], [True, False, False, False])


def test_a_discount_of_0_beside_the_last_action_ends_its_own_row() -> None:
    discount = np.array([[1.0, 1.0, 0.0, 0.0]])
    assert kinds_of({"discount": discount}).tolist() == [[ACTION, ACTION, ACTION, LAST | TERMINAL]]
    beside = kinds_of({"discount": discount}, last_row="action")
    assert beside.tolist() == [[ACTION, ACTION, ACTION | LAST | TERMINAL, PADDING]]
    first = np.array([[True, False, False, True]])
    begins = kinds_of({"discount": discount, "is_first": first}, last_row="action")
    assert begins.tolist() == [[BEGIN, ACTION, ACTION | LAST | TERMINAL, BEGIN | LAST | TERMINAL]]


@pytest.mark.parametrize(
    ("kinds", "text"),
    [
        ([2], r"integers, shape \(2,\), got int64 \(1,\)"),
        ([2.0, 2.0], "got float64"),
        ([2, 18], "row 1 has kind 18"),
        ([-1, 2], "row 0 has kind -1"),
        ([2, 8], "TERMINAL 8, which needs LAST"),
    ],
)
def test_numbers_that_are_no_kinds_are_refused(kinds: list[Any], text: str) -> None:
    with pytest.raises(StructureError, match=text):
        checked_kinds(kinds, 2)


def test_checked_kinds_are_a_copy() -> None:
    given = np.array([FIRST | ACTION, PADDING], np.uint8)
    found = checked_kinds(given, 2)
    given[:] = 0
    assert found.tolist() == [3, 16]
