"""Priorities of sequences."""

from __future__ import annotations

from reverb_writer.arguments import check_fraction
from reverb_writer.errors import StructureError
from reverb_writer.returns.recursion import Array, array_namespace, as_array

__all__ = ["sequence_priorities"]


def sequence_priorities(td_errors: Array, mask: Array = None, *, max_weight: float = 0.9, axis: int = 0) -> Array:
    """Return the priority of each sequence: w max|e| + (1 - w) mean|e| of its TD errors e.

    Args:
        td_errors: [T, ...], or [B, T] with `axis=1`, as batches are.
        mask: None, or an array of the same shape: True, or not 0, for the steps that count. A sequence in which no step
            counts has priority 0.
        max_weight: w in [0, 1].
        axis: the axis of time.

    Returns:
        The shape of `td_errors` without `axis`.

    Raises:
        SpecError: `max_weight` out of range.
        StructureError: there are no steps, or the mask has another shape.

    Source: Kapturowski et al., R2D2, 2019, section 2.3; Reverb's `td_error` priorities.

    >>> sequence_priorities([[1.0, -3.0], [0.0, 5.0]], axis=1, max_weight=0.5).tolist()
    [2.5, 3.75]
    """
    max_weight = check_fraction("max_weight", max_weight)
    xp = array_namespace(td_errors, mask)
    errors = xp.abs(as_array(xp, td_errors) * 1.0)
    counted = xp.ones_like(errors) if mask is None else as_array(xp, mask)
    if tuple(counted.shape) != tuple(errors.shape) or not -errors.ndim <= axis < errors.ndim or not errors.shape[axis]:
        raise StructureError(
            f"`td_errors` {tuple(errors.shape)} must have steps along axis {axis}, and `mask` {tuple(counted.shape)} "
            "the same shape."
        )
    counted = counted != 0
    errors = xp.where(counted, errors, xp.zeros_like(errors))
    count = xp.sum(xp.where(counted, xp.ones_like(errors), xp.zeros_like(errors)), axis=axis)
    mean = xp.sum(errors, axis=axis) / xp.where(count == 0, xp.ones_like(count), count)
    return max_weight * xp.max(errors, axis=axis) + (1 - max_weight) * mean
