"""One transition over n steps per window: which row it is of, and its sums, by hand."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import reverb_writer as rw
from reverb_writer.rows import ACTION, FIRST, LAST, PADDING, TERMINAL
from reverb_writer.transitions.n_step import one_per_window

BEGIN, END, TERMINATED = FIRST | ACTION, LAST, LAST | TERMINAL


def windows(kinds: list[int], count: int = 1, last_row: Any = None) -> rw.Batch:
    """Return equal windows, whose observations, actions and rewards are the numbers of their rows."""
    number = np.tile(np.arange(float(len(kinds))), (count, 1))
    data = {"observation": number, "action": number, "reward": number, "extras": {"log_prob": number}}
    return rw.Batch(data, None, row_kinds=np.tile(np.array(kinds, np.uint8), (count, 1)), last_row=last_row)


def chosen(kinds: list[int], n: int, **options: Any) -> dict[float, int]:
    """Return how often each row is chosen in 6,000 windows."""
    found = one_per_window(windows(kinds, 6_000, **options), n, 0.5, np.random.default_rng(0))
    assert found.mask.all()
    return dict(Counter(found.observation.tolist()))


@pytest.mark.parametrize(
    ("kinds", "n", "expected"),
    [
        ([BEGIN, ACTION, ACTION], 2, {0}),  # n + 1 rows: the first
        ([BEGIN, ACTION, TERMINATED], 2, {0}),
        ([BEGIN, ACTION, ACTION], 3, {0}),  # fewer rows
        ([ACTION, ACTION, ACTION, ACTION, ACTION], 2, {0, 1, 2}),  # row 3 has one step in the window
        ([BEGIN, ACTION, ACTION, TERMINATED, PADDING], 2, {0, 1, 2}),  # row 2 ends with the episode
        ([BEGIN, ACTION, ACTION, END, PADDING], 3, {0, 1, 2}),
        ([BEGIN, ACTION, ACTION, PADDING, PADDING], 2, {0}),  # cut: row 1 has one step
        ([ACTION, END, BEGIN, ACTION, ACTION], 2, {0, 2}),
        ([END, FIRST | END, BEGIN, ACTION], 2, {2}),  # no row has two steps
        ([BEGIN, ACTION, LAST | ACTION, PADDING], 2, {0, 1}),  # the last reward is unknown, its observation is known
    ],
)
def test_rows_are_drawn_whose_steps_are_in_the_window(kinds: list[int], n: int, expected: set[float]) -> None:
    assert {*chosen(kinds, n)} == expected


def test_rows_are_drawn_equally_often() -> None:
    counts = chosen([ACTION] * 8, 2)
    assert {*counts} == {0, 1, 2, 3, 4, 5}
    assert max(abs(count - 1_000) for count in counts.values()) < 5 * np.sqrt(1_000)


def test_the_last_row_counts_if_it_has_an_action() -> None:
    kinds = [BEGIN, ACTION, LAST | ACTION | TERMINAL]
    assert {*chosen(kinds, 1, last_row="action")} == {0, 1, 2}
    found = one_per_window(windows(kinds, 99, "action"), 1, 0.5, np.random.default_rng(0))
    assert {*zip(found.reward.tolist(), found.discount.tolist(), strict=True)} == {(0, 1), (1, 1), (2, 0)}


def test_the_sums_are_those_of_the_row() -> None:
    """Rewards 0 to 4, gamma 1/2: row 1 gives 1 + 2/2 and then row 3; row 3 gives 3, and ends."""
    found = one_per_window(
        windows([ACTION, ACTION, ACTION, ACTION, TERMINATED, PADDING], 200), 2, 0.5, np.random.default_rng(0)
    )
    columns = (found.observation, found.action, found.reward, found.discount, found.next_observation)
    assert {*zip(*(column.tolist() for column in columns), strict=True)} == {
        (0, 0, 0.5, 0.5, 2),
        (1, 1, 2, 0.5, 3),
        (2, 2, 3.5, 0, 4),
        (3, 3, 3, 0, 4),
    }
    assert found.extras["log_prob"].tolist() == found.action.tolist()
    assert not found.continues.any()


def test_a_window_without_transitions_is_masked() -> None:
    found = one_per_window(windows([END, PADDING, PADDING, PADDING]), 1, 0.5, np.random.default_rng(0))
    assert (found.mask.tolist(), found.reward.shape) == ([False], (1,))


def test_a_priority_belongs_to_a_window_of_one_transition() -> None:
    rng = np.random.default_rng(0)
    with pytest.raises(rw.errors.SpecError, match=r"windows of 4 rows .* windows of 3 rows \(`sequence_length=3`\)"):
        one_per_window(windows([ACTION] * 4), 2, 0.5, rng, is_prioritized=True)
    assert one_per_window(windows([ACTION] * 3), 2, 0.5, rng, is_prioritized=True).observation.tolist() == [0]
    of_action = windows([ACTION] * 3, last_row="action")
    assert one_per_window(of_action, 2, 0.5, rng, is_prioritized=True).observation.tolist() == [0]


def test_arguments_are_checked() -> None:
    rng = np.random.default_rng(0)
    with pytest.raises(rw.errors.SpecError, match="`n` must be >= 1"):
        one_per_window(windows([ACTION] * 3), 0, 0.5, rng)
    flat = rw.Batch({"observation": np.zeros(3), "action": np.zeros(3), "reward": np.zeros(3)}, None)
    flat = rw.Batch(flat.data, None, row_kinds=np.full(3, ACTION, np.uint8))
    with pytest.raises(rw.errors.StructureError, match="the batch has slices"):
        one_per_window(flat, 1, 0.5, rng)


def test_pinned_transitions_keep_their_batch() -> None:
    """`DataLoader(pin_memory=True)` calls `pin_memory` if there is one, and otherwise rebuilds a named tuple."""
    batch = windows([BEGIN, ACTION])
    found = one_per_window(batch, 1, 0.99, np.random.default_rng(0))._replace(
        observation=SimpleNamespace(pin_memory=lambda: "pinned"), extras={"name": np.array([b"a"], object)}
    )
    found.batch = batch
    pinned = found.pin_memory()
    assert pinned.batch is batch
    assert pinned.observation == "pinned"
    assert pinned.extras["name"].tolist() == [b"a"]  # strings cannot be pinned
