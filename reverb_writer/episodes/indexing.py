"""Convert indices and slices to rows: integers only, no arrays.

Positions have no limits. Position 0 is the oldest row of the look-back, `lookback` is ts 0, and `total` is the first
position after the data. All positions outside the data have the fill value:

    position   ... -2 -1 | 0  1 | 2  3  4 |  5  6 ...       total 5, lookback 2
                  fill   | look- | ts 0..2 |  fill
                         | back  |         |

An index >= 0 counts from ts 0. A negative index counts from the end, as in Python, including the look-back; with
`neg_index_as_lookback`, from ts 0 to the left.

Source: RLlib 2.35 `InfiniteLookbackBuffer.get`, without its faults; see docs/how-to/from-rllib.md.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from reverb_writer.errors import SpecError

Indices = int | slice | Sequence[int] | None

Span = tuple[int, slice, int, int]
"""The parts of a slice, in its order: number of fill values, rows, number of rows, number of later fill values."""


def is_single(indices: Any) -> bool:
    """Return whether `indices` is one index, such as an int or an array without dimensions."""
    return not (indices is None or isinstance(indices, slice | list | tuple) or getattr(indices, "ndim", 0) > 0)


def position(index: Any, total: int, lookback: int, neg_index_as_lookback: bool = False) -> int:
    """Return the position of an index, possibly outside the data.

    >>> position(-1, 5, 2), position(-1, 5, 2, neg_index_as_lookback=True)
    (4, 1)
    """
    if type(index) is not int:
        try:
            index = operator.index(index)
        except TypeError:
            raise SpecError(f"an index must be an integer, a slice or a list of integers, got {index!r}.") from None
    return int(index + (lookback if index >= 0 or neg_index_as_lookback else total))


def span(wanted: slice, total: int, lookback: int, neg_index_as_lookback: bool = False, fill: bool = False) -> Span:
    """Return the parts of a slice.

    Without `fill`, a slice is clamped to the data, as in Python. With `fill`, its positions are
    `range(start, stop, step)`; positions outside the data have the fill value. As in RLlib, start and stop are swapped
    if start > stop and both are left or both are right of the data; RLlib's users rely on this.

    A missing start or stop means the first or last row without the look-back, in the direction of the step.

    >>> span(slice(-4, 6), 5, 2, neg_index_as_lookback=True, fill=True)
    (2, slice(0, 5, None), 5, 3)
    """
    start, stop, step = wanted.start, wanted.stop, wanted.step
    if step is None:
        step = 1
    elif (step := position(step, 0, 0)) == 0:
        raise SpecError("the step of a slice must not be 0.")
    if start is None:
        start = lookback if step > 0 else total - 1
    else:
        start = position(start, total, lookback, neg_index_as_lookback)
    if stop is None:
        stop = total if step > 0 else lookback - 1
    else:
        stop = position(stop, total, lookback, neg_index_as_lookback)
    if step == 1 and 0 <= start <= stop <= total:
        return 0, slice(start, stop), stop - start, 0
    if not fill:
        first, last = (max(start, 0), min(stop, total)) if step > 0 else (min(start, total - 1), max(stop, -1))
        return _rows(range(first, last, step))
    if step > 0 and start > stop and (start < 0 or stop >= total):
        start, stop = stop, start
    if step == 1 and start <= stop:  # the same as below, for the common case
        before = min(-start, stop - start) if start < 0 else 0
        after = min(stop - total, stop - start) if stop > total else 0
        return before, slice(start + before, stop - after), stop - after - start - before, after
    line = range(start, stop, step)
    # The number of positions before the data, and before the end of the data, in the order of the slice.
    clip, first, last = (min, 0, total) if step > 0 else (max, total - 1, -1)
    before = len(range(start, clip(stop, first), step))
    upto = len(range(start, clip(stop, last), step))
    _, rows, num_rows, _ = _rows(line[before:upto])
    return before, rows, num_rows, len(line) - upto


def _rows(line: range) -> Span:
    """Return the span of a range within the data."""
    if not line:
        return 0, slice(0, 0), 0, 0
    stop = line.stop if line.stop >= 0 else None
    return 0, slice(line.start, stop, line.step), len(line), 0
