"""Kinds of the rows of a file that has none: items of other writers, and files of version 1."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from reverb_writer import rows
from reverb_writer.files.manifest import Former
from reverb_writer.nests import named_leaves

Kinds = npt.NDArray[np.uint8]


def kinds_by_rule(steps: Any, num_steps: int, former: Former | None, last_row: rows.LastRow | None) -> Kinds:
    """Return the kinds [T] that the leaves of a trajectory show, or else those that version 1 recorded.

    Leaves come first, because writers of version 1 took a flag that is False for a truncation.

    Raises:
        StructureError: as for `rows.kinds_of`.
    """
    layout = rows.layout_of(named_leaves(steps, "steps")[0], last_row)
    if layout is None:
        return _ended(np.full(num_steps, rows.ACTION, np.uint8), former)
    if not layout.last:
        return _ended(rows.kinds_of(steps, outcome=layout.discount is not None), former)
    if layout.has_action is None and former is not None and former.boundary_step:
        last_row = "boundary"
    kinds: Kinds = rows.kinds_of(steps, last_row=last_row, outcome=layout.shows_outcome)
    if not layout.shows_outcome and former is not None and former.terminated and kinds[-1] & rows.LAST:
        kinds[-1] |= rows.TERMINAL
    return kinds


def _ended(kinds: Kinds, former: Former | None) -> Kinds:
    """Mark the last row as version 1 recorded the end."""
    if former is None or not former.ended or kinds[-1] & rows.PADDING:
        return kinds
    if not former.boundary_step and former.terminated is None and former.truncated is None:
        return kinds  # such as an exported window
    action = 0 if former.boundary_step else rows.ACTION
    kinds[-1] = (kinds[-1] & rows.FIRST) | action | rows.LAST | (rows.TERMINAL if former.terminated else 0)
    return kinds
