"""Kinds of the rows of a trajectory that is given at once, or that a file has without kinds."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import tree

from reverb_writer import rows
from reverb_writer.errors import StructureError
from reverb_writer.files.manifest import End, Former, end_of
from reverb_writer.nests import join_paths, named_leaves
from reverb_writer.rows.layouts import layout_of

Kinds = npt.NDArray[np.uint8]


def kinds_of_episode(
    steps: Any, num_rows: int, terminated: bool | None, truncated: bool | None, last_row: rows.LastRow | None
) -> Kinds:
    """Return the kinds [T] of a whole trajectory that ends as the arguments say, or else as the leaves show.

    Raises:
        StructureError: the arguments differ from the leaves; or as for `rows.kinds_of`.
    """
    layout = layout_of(named_leaves(steps, "`steps`")[0], last_row)
    is_given, ended = (terminated, truncated) != (None, None), bool(terminated or truncated)
    if is_given and (layout is None or not layout.last):
        kinds = np.full(num_rows, rows.ACTION, np.uint8)
        if ended:
            kinds[-1] = rows.ACTION * (last_row != "boundary") | rows.LAST | rows.TERMINAL * bool(terminated)
    else:
        kinds = kinds_by_rule(steps, num_rows, None, last_row)
    if is_given and layout is not None and layout.last:
        if not layout.shows_outcome:
            _add_outcome(kinds, terminated)
        expected = End.TERMINATED if terminated else End.TRUNCATED if truncated else End.CUT
        if (found := end_of(kinds)) is not expected:
            raise StructureError(
                f"`terminated` and `truncated` say that the trajectory is {expected.value}, but "
                f"{join_paths(layout.last)} shows that it is {found.value}. Leave out these arguments."
            )
    if layout is None or layout.first is None:
        kinds[0] |= rows.FIRST
    return kinds


def kinds_by_rule(steps: Any, num_rows: int, former: Former | None, last_row: rows.LastRow | None) -> Kinds:
    """Return the kinds [T] that the leaves of a trajectory show, or else those that version 1 recorded.

    Leaves come first, because writers of version 1 took a flag that is False for a truncation.

    Raises:
        StructureError: as for `rows.kinds_of`.
    """
    steps = tree.map_structure(lambda leaf: leaf[:, 0] if np.shape(leaf) == (num_rows, 1) else leaf, steps)
    layout = layout_of(named_leaves(steps, "steps")[0], last_row)
    if layout is None:
        return _ended(np.full(num_rows, rows.ACTION, np.uint8), former)
    if not layout.last:
        kinds: Kinds = rows.kinds_of(steps, last_row=last_row, outcome=layout.discount is not None)
        return _ended(kinds, former)
    if layout.has_action is None and former is not None and former.boundary_step:
        last_row = "boundary"
    kinds = rows.kinds_of(steps, last_row=last_row, outcome=layout.shows_outcome)
    if not layout.shows_outcome and former is not None:
        _add_outcome(kinds, former.terminated)
    return kinds


def _ended(kinds: Kinds, former: Former | None) -> Kinds:
    """Mark the last row as version 1 recorded the end."""
    if former is None or not former.ended or kinds[-1] & rows.PADDING:
        return kinds
    if not former.boundary_step and former.terminated is None and former.truncated is None:
        return kinds  # such as an exported window
    action = 0 if former.boundary_step else rows.ACTION
    kinds[-1] = (kinds[-1] & rows.FIRST) | action | rows.LAST | rows.TERMINAL * bool(former.terminated)
    return kinds


def _add_outcome(kinds: Kinds, terminated: bool | None) -> None:
    """Mark the last row as terminal if it ends a terminated episode, in place."""
    if terminated and kinds[-1] & rows.LAST:
        kinds[-1] |= rows.TERMINAL
