"""Slices whose next rows are known, as rows in the order of time: integers only."""

from __future__ import annotations

from typing import Any

import numpy as np


def order_with_next(slices: Any) -> tuple[Any, Any, Any]:
    """Return slices with the rows after them in between: numbers of rows, where each row is now, which begin a slice.

    Row N + s is the one after slice s, which is left out where the trajectory ends.
    """
    num_rows, cut = len(slices.rows), np.asarray(slices.cut_by_sampler)
    num_before = np.cumsum(cut) - cut  # rows that are put in before each slice
    offset = np.arange(num_rows) - np.repeat(slices.first_rows, slices.widths)
    is_padding = offset >= np.repeat(slices.lengths, slices.widths)
    at = np.arange(num_rows) + np.repeat(num_before, slices.widths) + (is_padding & np.repeat(cut, slices.widths))
    order = np.full(num_rows + int(cut.sum()) + 1, num_rows - 1)
    order[at] = np.arange(num_rows)
    order[(slices.first_rows + num_before + slices.lengths)[cut]] = num_rows + np.flatnonzero(cut)
    starts = np.zeros(len(order), bool)
    starts[at[slices.first_rows]] = starts[-1] = True
    return order, at, starts
