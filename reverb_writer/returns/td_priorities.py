"""Priorities of sequences."""

from __future__ import annotations

from reverb_writer.arguments import check_fraction
from reverb_writer.array_api import Array, array_namespace, as_array, as_bool
from reverb_writer.errors import StructureError
from reverb_writer.returns.recursion import check_time_axis
from reverb_writer.transitions import Transitions

__all__ = ["sequence_priorities"]


def sequence_priorities(
    td_errors: Array, mask: Array | Transitions = None, *, max_weight: float = 0.9, time_axis: int = 1
) -> Array:
    """Return the priority of each sequence: w max|e| + (1 - w) mean|e| of its TD errors e.

    Args:
        td_errors: [B, T]; [T] or [T, B] with `time_axis=0`.
        mask: None, or an array of the same shape [B, T]: True, or not 0, for the steps that count; or the `Transitions`
            whose mask it is. A sequence in which no step counts has priority 0.
        max_weight: w in [0, 1].
        time_axis: the axis of time, 1 or 0.

    Returns:
        The shape of `td_errors` without time: [B], one for each sequence.

    Raises:
        SpecError: `max_weight` out of range, or the axis is neither 0 nor 1.
        StructureError: there are no steps, or the mask has another shape.

    Source: Kapturowski et al., R2D2, 2019, section 2.3; Reverb's `td_error` priorities.

    >>> sequence_priorities([[1.0, -3.0], [0.0, 5.0]], max_weight=0.5).tolist()
    [2.5, 3.75]
    """
    max_weight, axis = check_fraction("max_weight", max_weight), check_time_axis(time_axis)
    mask = mask.mask if isinstance(mask, Transitions) else mask
    xp = array_namespace(td_errors, mask)
    errors = xp.abs(as_array(xp, td_errors) * 1.0)
    shape = tuple(errors.shape)
    if errors.ndim <= axis or not shape[axis]:
        raise StructureError(
            f"`td_errors` must be {('[T, ...]', '[B, T, ...]')[axis]} with T >= 1, got shape {shape}. Time is axis "
            f"{axis}: `time_axis` is 1 by default, and 0 for [T, ...]."
        )
    counted = xp.ones_like(errors) != 0 if mask is None else as_bool(xp, mask)
    if tuple(counted.shape) != shape:
        raise StructureError(f"`mask` must have the shape of `td_errors`, {shape}, got {tuple(counted.shape)}.")
    errors = xp.where(counted, errors, xp.zeros_like(errors))
    count = xp.sum(xp.where(counted, xp.ones_like(errors), xp.zeros_like(errors)), axis=axis)
    mean = xp.sum(errors, axis=axis) / xp.where(count == 0, xp.ones_like(count), count)
    return max_weight * xp.max(errors, axis=axis) + (1 - max_weight) * mean
