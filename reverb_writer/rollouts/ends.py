"""The ends of a rollout's episodes: the arguments of `returns`, from columns [T, B, ...] in the order of time.

row                                              value of the next state
-----------------------------------------------  --------------------------------------------------------
done, not truncated; or masked                   0
truncated                                        final_values
last row of a window from `fill_from`            final_values: of the step after the window
newest row                                       last_values, unless it is done
any other row                                    values of the next row
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from reverb_writer.arrays import Array, concatenated
from reverb_writer.errors import SpecError
from reverb_writer.rollouts.array_nests import Arrays


def ends_of(
    arrays: Arrays, column: Callable[[str], Any], written: Collection[str], last_values: Array, *, approximate: bool
) -> dict[str, Array]:
    """Return `discounts`, `continues` and `next_values`, [T, B, ...], for the functions of `returns`.

    `written` are the names of columns that may differ from their defaults; other columns are not read.
    """
    xp, values = arrays.xp, column("values")
    dones = column("dones") != 0
    discounts = continues = ~dones
    next_values = concatenated(xp, [values[1:], last_values[None]], 0)
    if "truncated" in written or "cuts" in written:
        truncated, cuts = column("truncated") != 0, column("cuts") != 0
        cuts[-1] = False  # `last_values` follow
        goes_on = truncated | (cuts & ~dones)
        final_values = column("final_values")
        if approximate:
            final_values = xp.where(truncated | xp.isnan(final_values), values, final_values)
        if num_unknown := int((goes_on & xp.isnan(final_values)).sum()):
            raise SpecError(
                f"{num_unknown} values of final observations are not known, or NaN, where `truncated` is set or a "
                "window ends. Set `transition.final_values`, fill from windows of T + 1 steps with values, or pass "
                "`approximate_time_outs=True`."
            )
        discounts, continues = discounts | truncated, continues & ~goes_on
        next_values = xp.where(goes_on, final_values, next_values)
    if "mask" in written:
        is_real = column("mask") != 0
        is_next_real = concatenated(xp, [is_real[1:], is_real[-1:] | True], 0)
        continues = continues & (~is_real | is_next_real)
    return {"discounts": discounts, "continues": continues, "next_values": next_values}


def statistics(arrays: Arrays, rewards: Array, ends: Array, is_real: Array | None) -> tuple[float, float]:
    """Return the mean length of trajectories, including cut ones, and the mean reward; of real rows only.

    Rewards are [T, B, R]; ends [T, B, 1] are not 0 at the last row of a trajectory, and at rows that are not real.
    """
    if is_real is None:
        is_real = (ends == 0) | (ends != 0)
    goes_on = arrays.concatenate((ends[:-1] == 0) & is_real[1:], is_real[:1] & False)
    num_trajectories = int((is_real & ~goes_on).sum())
    return float(is_real.sum()) / max(num_trajectories, 1), float(rewards[is_real[:, :, 0]].mean())
