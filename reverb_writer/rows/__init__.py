"""Kinds of rows: one byte per row says what the row is, and arithmetic on these bytes answers every other question.

    bit  name      the row
    ---  --------  -----------------------------------------------------------------------
      1  FIRST     is the first row of its episode
      2  ACTION    has an action, and the action's reward and discount
      4  LAST      is the last row of its episode
      8  TERMINAL  is a LAST row of an episode that the environment ended
     16  PADDING   is no step: an observer, `collate="pad"` or `short="pad"` made it

An episode is truncated if its LAST row is not TERMINAL. A LAST row without ACTION is a boundary row: it only holds the
final observation. A LAST row with ACTION is the last row of a program that kept no final observation. A real row is cut
if it is not LAST, and the item ends after it, or PADDING or FIRST follows. PADDING is set alone.

A transition is an ACTION row and the row after it in the same item, unless the first one is LAST, or the second one is
PADDING or FIRST. It leads to a terminal state if the second row is TERMINAL without ACTION. A TERMINAL row with ACTION
shows the last state on which an action was taken; the terminal state after this action was not kept.

Writers set the kind when they write a row. `kinds_of` is the only rule for rows that have no kind yet: items of other
writers, files of other programs, arrays in memory; `layouts` has its table.

Pure functions of arrays of NumPy, PyTorch, JAX and others; any thread may call them. Rows are [T], [N] or [B, T].

Source: RLDS, dm_env and TF-Agents (boundary rows); Gymnasium, TorchRL, D4RL and rsl_rl (flags beside the action).
"""

from __future__ import annotations

from reverb_writer.rows.inference import kinds_of
from reverb_writer.rows.kinds import (
    ACTION,
    FIRST,
    LAST,
    PADDING,
    TERMINAL,
    LastRow,
    first_rows,
    has,
    last_rows,
)

__all__ = [
    "ACTION",
    "FIRST",
    "LAST",
    "PADDING",
    "TERMINAL",
    "LastRow",
    "first_rows",
    "has",
    "kinds_of",
    "last_rows",
]
