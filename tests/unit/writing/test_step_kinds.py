"""The kind of each row that an observer writes: from the caller, or from the step's own leaves."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest

import reverb_writer as rw
from reverb_writer.errors import SpecError, StructureError
from reverb_writer.rows import ACTION, FIRST, LAST, TERMINAL
from reverb_writer.steps import StepStructure
from reverb_writer.writing.step_kinds import START, StepKinds

PLAIN = {"observation": np.float32(0), "action": np.int64(0), "reward": np.float32(0)}
DISCOUNTED = {**PLAIN, "discount": np.float32(1)}
ONE = np.array([0])
WORDS = "end_of_episode", "terminated", "truncated", "final_observation"


def kinds_of(steps: Any, calls: Any = None, last_row: Any = None) -> list[list[int]]:
    """Return the kinds of the rows that each call writes; `calls` are the keywords of each call."""
    rule = StepKinds(StepStructure(steps[0]), last_row)
    structure, before, found = StepStructure(steps[0]), START, []
    for step, keywords in zip(steps, calls or [{}] * len(steps), strict=True):
        leaves = structure.flatten(step, 0)
        row = rule.row(leaves, before, ONE, tuple(keywords.get(word) for word in WORDS))
        before = row.state
        found.append([int(row.kind)])
        if row.boundary is not None:
            before = int(row.boundary.kind)
            found[-1].append(before)
        ends = row.boundary is not None or row.is_last
        assert ends == any(kind & LAST for kind in found[-1])
    return found


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        ({"terminated": True, "final_observation": np.float32(9)}, [ACTION, LAST | TERMINAL]),
        ({"terminated": True}, [ACTION, LAST | TERMINAL]),
        ({"terminated": True, "truncated": True, "final_observation": np.float32(9)}, [ACTION, LAST | TERMINAL]),
        ({"truncated": True, "final_observation": np.float32(9)}, [ACTION, LAST]),
        ({"truncated": True}, [ACTION | LAST]),
        ({"end_of_episode": True}, [ACTION | LAST]),
    ],
)
def test_end_that_the_caller_says_has_a_boundary_row_where_the_final_state_is_known(
    end: dict[str, Any], expected: list[int]
) -> None:
    calls = [{"terminated": False, "truncated": False}, end, {}]
    assert kinds_of([PLAIN] * 3, calls) == [[FIRST | ACTION], expected, [FIRST | ACTION]]


def trajectory(step_type: int, discount: float = 1.0) -> dict[str, Any]:
    following = {0: 1, 1: 1, 2: 0}[step_type]
    return {**DISCOUNTED, "discount": np.float32(discount), "step_type": step_type, "next_step_type": following}


def flags(*names: str, **others: Any) -> dict[str, Any]:
    every = ("is_first", "is_last", "is_terminal")
    return {**PLAIN, **{name: name in names for name in every}, **others}


def pairs(one: str, other: str, values: list[tuple[int, int]]) -> list[dict[str, bool]]:
    return [{one: bool(first), other: bool(second)} for first, second in values]


@pytest.mark.parametrize(
    ("steps", "last_row", "expected"),
    [
        # TF-Agents: the discount of the row before shows termination, also where the boundary row has one of its own.
        (
            [trajectory(0), trajectory(1, 0.0), trajectory(2, 1.0), trajectory(0), trajectory(1), trajectory(2, 0.0)],
            None,
            [3, 2, 12, 3, 2, 4],
        ),
        ([flags("is_first"), flags(), flags("is_last", "is_terminal")], None, [3, 2, 12]),
        ([flags("is_first"), flags(), flags("is_last")], None, [3, 2, 4]),
        ([flags("is_first"), flags("is_last", "is_terminal"), flags("is_first")], "action", [3, 14, 3]),
        (pairs("terminated", "truncated", [(0, 0), (0, 1)] * 2), "action", [3, 6] * 2),
        (pairs("terminated", "truncated", [(0, 0), (1, 0)]), "boundary", [3, 12]),
        (pairs("terminals", "timeouts", [(0, 0), (1, 0), (0, 1)]), None, [3, 14, 7]),
        (pairs("dones", "time_outs", [(1, 0), (1, 1)]), None, [15, 7]),
        ([{"next": {"done": np.array([b]), "terminated": np.array([b])}} for b in (False, True)], None, [3, 14]),
    ],
)
def test_leaves_of_each_layout_say_what_a_row_is(steps: Any, last_row: Any, expected: list[int]) -> None:
    assert kinds_of(steps, last_row=last_row) == [[kind] for kind in expected]
    structure = StepStructure(steps[0])
    columns = [np.stack(column) for column in zip(*(structure.flatten(step, 0) for step in steps), strict=True)]
    assert StepKinds(structure, last_row).block(columns, START).tolist() == expected


def test_environments_have_states_of_their_own() -> None:
    steps = [[trajectory(0), trajectory(0)], [trajectory(1, 0.0), trajectory(1)], [trajectory(2), trajectory(2)]]
    stacked = [{name: np.stack([one[name] for one in both]) for name in both[0]} for both in steps]
    structure = StepStructure(stacked[0], batch_size=2)
    rule, before, found = StepKinds(structure, None), np.full(2, START), []
    for step in stacked:
        leaves = structure.flatten(step, 0)
        row = rule.row(leaves, before, np.arange(2), (None, None, None, None))
        before = row.state
        found.append(row.kind.tolist())
    assert found == [[3, 3], [2, 2], [12, 4]]


def test_boundary_rows_of_some_environments_hold_their_final_observations() -> None:
    step = {"observation": np.array([[1.0], [2.0], [3.0]]), "reward": np.ones(3)}
    structure = StepStructure(step, batch_size=3)
    row = StepKinds(structure, None).row(
        structure.flatten(step, 0),
        np.full(3, START),
        np.array([0, 2]),
        (None, np.array([True, True, False]), np.array([False, False, True]), np.array([[7.0], [8.0], [9.0]])),
    )
    assert row.kind[[0, 2]].tolist() == [3, 3]
    assert row.boundary is not None
    assert row.boundary.env_ids is not None
    assert row.boundary.env_ids.tolist() == [0, 2]  # environment 1 has no row in this call
    assert row.boundary.kind[[0, 2]].tolist() == [12, 4]
    assert [leaf.tolist() for leaf in row.boundary.leaves] == [[[7.0], [8.0], [9.0]], [0, 0, 0]]


@pytest.mark.parametrize(
    ("step", "call", "last_row", "message"),
    [
        (flags("is_last"), {"terminated": True}, None, "mark their ends themselves, by `is_last`"),
        (flags("is_terminal"), {}, None, "`is_terminal` is set on a row that `is_last` does not show as a last row"),
        ({**DISCOUNTED, "discount": np.float32(0)}, {"end_of_episode": True}, None, r"observer\(step, terminated="),
        ({"terminated": False, "truncated": False}, {}, None, "`terminated`, `truncated` without `is_last`"),
        ({"is_terminal": False}, {}, None, "`is_terminal` without `is_last`"),
        ({"x": 0}, {"terminated": True}, None, "no leaf `observation`; found `x`"),
        (PLAIN, {"truncated": True, "final_observation": np.zeros(2)}, None, "`final_observation`: float64"),
        ({"step_type": "last", "x": 1}, {}, None, "leaf `step_type`: .* integer or a bool"),
        ({"is_last": np.zeros(2), "x": 1}, {}, None, "leaf `is_last`: .* integer or a bool"),
        (PLAIN, {"end_of_episode": True, "terminated": True}, None, "`end_of_episode` repeats"),
    ],
)
def test_row_that_contradicts_itself_is_refused(step: Any, call: Any, last_row: Any, message: str) -> None:
    with pytest.raises((StructureError, SpecError), match=message):
        kinds_of([step], [call], last_row)


@pytest.mark.parametrize(
    ("last_row", "discounts", "expected"),
    [("boundary", [1.0, 0.0, 0.0], 12), ("boundary", [1.0, 1.0, 0.0], 4), ("action", [1.0, 1.0, 0.0], 14)],
)
def test_argument_says_whose_row_a_stored_discount_stands_on(
    last_row: str, discounts: list[float], expected: int
) -> None:
    steps = [{**PLAIN, "discount": np.float32(discount)} for discount in discounts]
    calls = [{"end_of_episode": number == 2} for number in range(3)]
    assert kinds_of(steps, calls, last_row)[-1] == [expected]


@pytest.mark.parametrize("kind", [ACTION | 32, 64, 255])
@pytest.mark.parametrize("verb", ["write_row", "write_row of environments", "extend"])
def test_a_kind_with_bits_of_no_kind_is_refused(verb: str, kind: int) -> None:
    """The ring marks the ends of windows beside the kinds: such a bit would end an episode that was not counted."""
    num_envs = 2 if verb.endswith("environments") else None
    with (
        rw.LocalServer([rw.TableConfig("replay", 10)]) as server,
        rw.TrajectoryObserver(server.address, "replay", 1, num_envs=num_envs) as observer,
    ):
        step = {"n": np.arange(2)}
        for given in (ACTION, kind):
            kinds = np.array([ACTION, given], np.uint8)
            with contextlib.nullcontext() if given == ACTION else pytest.raises(StructureError, match=f"has {kind},"):
                if verb == "extend":
                    observer.extend(step, kinds)
                else:
                    observer.write_row(step, given if num_envs is None else kinds)
        assert observer.num_steps == (1 if verb == "write_row" else 2)
