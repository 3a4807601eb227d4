"""How the episodes of a rollout end, as `returns` wants to know it, of columns [T, B, ...] in the order of time.

row                                              what follows it is worth
-----------------------------------------------  --------------------------------------------------------
done, not truncated                              0
truncated                                        final_values
the last of a window that `fill_from` brought    final_values: of the step after the window
the newest                                       last_values, unless it is done
any other                                        values of the next row
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from reverb_writer.errors import SpecError
from reverb_writer.rollouts.arrays import Arrays

__all__ = ["ends_of"]


def ends_of(arrays: Arrays, column: Callable[[str], Any], *, approximate: bool) -> dict[str, Any]:
    """Return `terminated`, `truncated` and `final_values` as the functions of `returns` take them.

    Args:
        arrays: of the storage.
        column: returns the column of a name, in the order of time.
        approximate: take the values of truncated rows themselves for those of their final observations, and of the last
            rows of windows if what follows them is not known.

    Raises:
        SpecError: the value of what follows such a row is not known.
    """
    dones, truncated, cuts = (column(name) != 0 for name in ("dones", "truncated", "cuts"))
    cuts[-1] = False  # `last_values` are what follows
    final_values = column("final_values")
    if approximate:
        final_values = arrays.xp.where(truncated | arrays.xp.isnan(final_values), column("values"), final_values)
    goes_on = truncated | (cuts & ~dones)
    unknown = int((goes_on & arrays.xp.isnan(final_values)).sum())
    if unknown:
        raise SpecError(
            f"{unknown} values of final observations are not known, or NaN, where `truncated` is set or a window ends. "
            "Put them into `transition.final_values`, fill windows of T + 1 steps with their values, or pass "
            "`approximate_time_outs=True`."
        )
    return {"terminated": dones & ~truncated, "truncated": goes_on, "final_values": final_values}
