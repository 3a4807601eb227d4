"""Kinds of rows, by hand."""

from __future__ import annotations

import numpy as np

from reverb_writer.rows import ACTION, FIRST, LAST, PADDING, TERMINAL, kinds_of, pairs

BEGIN = FIRST | ACTION


def bits(*kinds: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
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
