"""How the episodes of a rollout end: the arguments of `returns`, from columns [T, B, ...] in the order of time.

row                                              value of what follows it
-----------------------------------------------  --------------------------------------------------------
done, not truncated; or masked                   0
truncated                                        final_values
the last of a window from `fill_from`            final_values: of the step after the window
the newest                                       last_values, unless it is done
any other                                        values of the next row
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from reverb_writer.array_api import Array, concatenated
from reverb_writer.errors import SpecError
from reverb_writer.rollouts.arrays import Arrays


def ends_of(
    arrays: Arrays, column: Callable[[str], Any], flags: Callable[[str], Any], last_values: Array, *, approximate: bool
) -> dict[str, Array]:
    """Return `discounts`, `continues` and `next_values` as the functions of `returns` take them, [T, B, ...].

    `flags` returns a column as booleans, or None if it was never written.
    """
    xp = arrays.xp
    dones, truncated, cuts, is_real = flags("dones"), flags("truncated"), flags("cuts"), flags("mask")
    discounts = continues = ~dones
    next_values = concatenated(xp, [column("values")[1:], last_values[None]], 0)
    goes_on = truncated
    if cuts is not None:
        cuts[-1] = False  # `last_values` are what follows
        goes_on = cuts & ~dones if truncated is None else truncated | (cuts & ~dones)
    if goes_on is not None:
        final_values = column("final_values")
        if approximate:
            unknown = xp.isnan(final_values)
            unknown = unknown if truncated is None else unknown | truncated
            final_values = xp.where(unknown, column("values"), final_values)
        _check_known(int((goes_on & xp.isnan(final_values)).sum()))
        next_values = xp.where(goes_on, final_values, next_values)
        continues = continues & ~goes_on
        discounts = discounts if truncated is None else discounts | truncated
    if is_real is not None:
        continues = continues & (~is_real | concatenated(xp, [is_real[1:], is_real[-1:] | True], 0))
    return {"discounts": discounts, "continues": continues, "next_values": next_values}


def _check_known(num_unknown: int) -> None:
    if num_unknown:
        raise SpecError(
            f"{num_unknown} values of final observations are not known, or NaN, where `truncated` is set or a window "
            "ends. Set `transition.final_values`, fill from windows of T + 1 steps with values, or pass "
            "`approximate_time_outs=True`."
        )


def statistics(arrays: Arrays, rewards: Array, ends: Array, is_real: Array | None) -> tuple[float, float]:
    """Return the mean length of trajectories, those that are cut off included, and the mean reward, of real rows.

    Rewards are [T, B, R]; ends [T, B, 1] are not 0 at the last row of a trajectory, and at rows that are not real.
    """
    if is_real is None:
        is_real = (ends == 0) | (ends != 0)
    goes_on = arrays.concatenate((ends[:-1] == 0) & is_real[1:], is_real[:1] & False)
    num_trajectories = int((is_real & ~goes_on).sum())
    return float(is_real.sum()) / max(num_trajectories, 1), float(rewards[is_real[:, :, 0]].mean())
