"""The bits of a kind, and the arithmetic on them: transitions, first and last rows of trajectories."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from reverb_writer.arrays import Array, array_namespace, concatenated
from reverb_writer.errors import StructureError

FIRST: Final = 1
ACTION: Final = 2
LAST: Final = 4
TERMINAL: Final = 8
PADDING: Final = 16

LastRow = Literal["boundary", "action"]
"""Whose row the flags of an end stand on: the row of the final observation, or the row of the last action."""

FLAGS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "is_first": lambda kinds: (kinds & FIRST) != 0,
    "is_last": lambda kinds: (kinds & LAST) != 0,
    "terminated": lambda kinds: (kinds & TERMINAL) != 0,
    "truncated": lambda kinds: (kinds & (LAST | TERMINAL)) == LAST,
}
"""Leaves of flags for readers that do not know kinds, and their values by the kinds of the rows."""


class Pairs(NamedTuple):
    """Pairs of a row and the row after it: [B, T - 1] or [N - 1]; or [B, T] or [N], a pair for each row."""

    mask: Array  # the pair is a transition
    terminal: Array  # it is a transition to a terminal state
    continues: Array  # the next pair is also a transition of the same episode


def has(kinds: Array, bits: int) -> Array:
    """Return whether each row has one of these bits.

    Args:
        kinds: uint8 [T], [N] or [B, T].
        bits: bits, such as `FIRST | LAST`.

    Returns:
        bool, in the shape of the kinds.

    >>> has(np.array([FIRST | ACTION, LAST], np.uint8), FIRST).tolist()
    [True, False]
    """
    return (kinds & bits) != 0


def pairs(
    kinds: Array, starts: Array | None = None, *, following: Array | None = None, last_row: LastRow | None = None
) -> Pairs:
    """Return which pairs of a row and the row after it are transitions.

    Args:
        kinds: [B, T] or [N].
        starts: flags in the same shape: rows that do not follow the row before, because another slice begins; or None.
        following: kinds of the row after each row, in the same shape; None if these are the neighbours.
        last_row: "action" for pairs of all rows: a TERMINAL row with ACTION is also a transition.

    >>> pairs(np.array([FIRST | ACTION, ACTION, LAST | TERMINAL, PADDING], np.uint8)).mask.tolist()
    [True, True, False]
    >>> pairs(np.array([FIRST | ACTION, ACTION | LAST | TERMINAL], np.uint8), last_row="action").terminal.tolist()
    [False, True]
    """
    xp = array_namespace(kinds)
    breaks = None if starts is None else starts[..., 1:]
    if following is None and last_row != "action":
        own, after = kinds[..., :-1], kinds[..., 1:]
    else:
        own, after = kinds, following
        if after is None:
            after = concatenated(xp, [kinds[..., 1:], xp.full_like(kinds[..., :1], PADDING)], -1)
        if starts is not None:
            breaks = concatenated(xp, [starts[..., 1:], xp.zeros_like(starts[..., :1])], -1)
    mask = ((own & (ACTION | LAST)) == ACTION) & ((after & (PADDING | FIRST)) == 0)
    if breaks is not None and following is None:
        mask = mask & ~breaks
    terminal = mask & ((after & (ACTION | TERMINAL)) == TERMINAL)
    if last_row == "action":
        ends = (own & (ACTION | TERMINAL)) == ACTION | TERMINAL
        mask, terminal, breaks = mask | ends, terminal | ends, ends if breaks is None else breaks | ends
    continues = concatenated(xp, [mask[..., :-1] & mask[..., 1:], xp.zeros_like(mask[..., :1])], -1)
    return Pairs(mask, terminal, continues if breaks is None else continues & ~breaks)


def first_rows(kinds: Array, starts: Array | None = None) -> Array:
    """Return the real rows at which a trajectory begins: FIRST rows, and rows after LAST, PADDING or a start.

    A trajectory begins at the first row of an item.

    Args:
        kinds: uint8 [T], [N] or [B, T].
        starts: bool, in the shape of the kinds: rows with which another item begins; None if each row of [B, T] is one
            item.

    Returns:
        bool, in the shape of the kinds.

    >>> first_rows(np.array([ACTION, LAST, FIRST | ACTION, ACTION, PADDING], np.uint8)).tolist()
    [True, False, True, False, False]
    """
    begins = has(kinds, FIRST) | _after_start(kinds, has(kinds, LAST | PADDING))
    begins = begins if starts is None else begins | starts
    return begins & ~has(kinds, PADDING)


def last_rows(kinds: Array, starts: Array | None = None) -> Array:
    """Return the real rows at which a trajectory ends: LAST rows, and rows that are cut.

    Arguments and result: `kinds` [T], [N] or [B, T], and `starts` [T], [N] or [B, T], are those of `first_rows`.

    >>> last_rows(np.array([ACTION, LAST, FIRST | ACTION, ACTION, PADDING], np.uint8)).tolist()
    [False, True, False, True, False]
    """
    begins = first_rows(kinds, starts) | has(kinds, PADDING)
    xp = array_namespace(kinds)
    ends = concatenated(xp, [begins[..., 1:], xp.ones_like(begins[..., :1])], -1)
    return (ends | has(kinds, LAST)) & ~has(kinds, PADDING)


def _after_start(like: Array, flags: Array) -> Array:
    """Return, for each row, the flag of the row before; True for the first row."""
    xp = array_namespace(like)
    return concatenated(xp, [xp.ones_like(flags[..., :1]), flags[..., :-1]], -1)


def checked_kinds(kinds: Any, num_rows: int) -> Array:
    """Return given kinds as uint8 [num_rows], a copy; raises StructureError if they are no kinds.

    >>> checked_kinds([3, 12], 2)
    array([ 3, 12], dtype=uint8)
    """
    array = np.asarray(kinds)
    if array.dtype.kind not in "iu" or array.shape != (num_rows,):
        raise StructureError(f"`kinds` must be integers, shape ({num_rows},), got {array.dtype} {array.shape}.")
    is_wrong = (array < 0) | (array > PADDING) | (has(array, TERMINAL) & ~has(array, LAST))
    if is_wrong.any():
        row = int(is_wrong.argmax())
        raise StructureError(
            f"row {row} has kind {array[row]}, expected a sum of FIRST 1, ACTION 2, LAST 4 and TERMINAL 8, which needs "
            "LAST; or PADDING 16 alone."
        )
    return array.astype(np.uint8)
