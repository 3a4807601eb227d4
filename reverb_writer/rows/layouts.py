"""The layouts of rows that have no kind yet: which leaves say what a row is.

    layout        first row            last rows                           terminal                     last rows
    ------------  -------------------  ----------------------------------  ---------------------------  ---------
    TorchRL       is_init              next/done, /terminated, /truncated  next/terminated              action
    TF-Agents     step_type 0          step_type 2                         discount 0, the row before   boundary
    RLDS, record  is_first             is_last                             is_terminal, terminated      boundary
    rsl_rl        -                    done, dones, time_outs              not time_outs, timeouts,     action
                                                                           truncated
    D4RL          -                    terminals, timeouts                 terminals                    action
    Gymnasium     -                    terminated, truncated               terminated                   `last_row`
    discount      start_of_episode     after a row of discount 0           each last row                boundary
    ids           the id changes       -                                   -                            -

The first line whose `last rows` the steps have counts, and `first row` may have the name of any line. The ids are
`traj_ids` (also in `collector`) and `episode`. Without a flag of termination, the discount shows it: of the row before
a boundary row, or of the row of the last action.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Final, NamedTuple

import tree

from reverb_writer.errors import DOCS, SpecError, StructureError
from reverb_writer.nests import join_paths, named_leaves
from reverb_writer.rows.kinds import LastRow

FLAG_NAMES: Final = frozenset(
    {
        *("is_first", "is_init", "start_of_episode", "is_last", "step_type", "next_step_type", "terminated"),
        *("is_terminal", "truncated", "terminals", "timeouts", "done", "dones", "time_outs"),
    }
)
"""All names of leaves that only say what a row is; a `discount` and the id of a trajectory also have a value."""

_ID_NAMES: Final = ("collector/traj_ids", "traj_ids", "episode")

STEP_FIRST, STEP_LAST = 0, 2
"""Values of `step_type`, as in dm_env and TF-Agents."""

_TERMINAL = "terminated", "is_terminal"
_ENDS: Sequence[tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...], bool | None]] = (
    # flags of last rows, of terminal rows, of truncated rows; whether last rows have an action
    (("next/done", "next/terminated", "next/truncated"), ("next/terminated",), ("next/truncated",), True),
    (("step_type",), _TERMINAL, ("truncated",), False),
    (("is_last",), _TERMINAL, ("truncated",), False),
    (("done", "dones", "time_outs"), ("terminated",), ("time_outs", "timeouts", "truncated"), True),
    (("terminals", "timeouts"), ("terminals",), ("timeouts",), True),
    ((*_TERMINAL, "truncated"), _TERMINAL, ("truncated",), None),
)
ADVICE = f"{DOCS}/explanation/steps.html has the table of layouts."
"""The end of messages about rows."""


class Layout(NamedTuple):
    """The leaves that show the kinds of rows, by path."""

    first: str | None  # flag of first rows, or `step_type`
    ids: str | None  # the id of the row's trajectory
    last: tuple[str, ...]  # flags of last rows, or `step_type`
    terminal: str | None
    truncated: str | None
    discount: str | None
    has_action: bool | None  # whether last rows have an action; None if the names do not show it
    needs_next_type: bool = False  # TF-Agents: padding rows have `step_type` LAST

    @property
    def shows_outcome(self) -> bool:
        """Whether the leaves show if the environment ended an episode."""
        return bool(self.terminal or self.truncated or self.discount)


def checked_last_row(last_row: Any) -> LastRow | None:
    """Return the argument, or raise SpecError if it is out of range."""
    if last_row not in (None, "boundary", "action"):
        raise SpecError(f"`last_row` must be 'boundary', 'action' or None, got {last_row!r}.")
    found: LastRow | None = last_row
    return found


def layout_of(paths: Collection[str], last_row: LastRow | None = None) -> Layout | None:
    """Return the layout of steps with these leaves; None if no leaf says what a row is.

    >>> layout_of(["observation", "is_first", "is_last", "is_terminal"]).last
    ('is_last',)
    """
    checked_last_row(last_row)

    def present(*names: str) -> tuple[str, ...]:
        return tuple(name for name in names if name in paths)

    def one_of(*names: str) -> str | None:
        return next(iter(present(*names)), None)

    first = one_of("is_init", "is_first", "start_of_episode", "step_type")
    ids = one_of(*_ID_NAMES)
    ends = next((ends for ends in _ENDS if present(*ends[0])), ((), (), (), False))
    last, has_action = present(*ends[0]), ends[3]
    if not (last or first or ids or "discount" in paths):
        return None
    if last_row is not None:
        has_action = last_row == "action"
    if last == ("step_type",):
        first = "step_type"
    needs_next_type = last == ("step_type",) and "next_step_type" in paths
    shown_by = one_of(*ends[1]), one_of(*ends[2]), one_of("discount")
    return Layout(first, ids, last, *shown_by, has_action, needs_next_type)


def ambiguous(layout: Layout) -> StructureError:
    """Return the error of flags of ends whose names do not show whose row they stand on."""
    names = join_paths(layout.last)
    return StructureError(
        f"{names} without `is_last` or `step_type`: the names do not show whether these flags stand on the row of the "
        "last action or on a row of its own for the final observation. Pass `last_row='action'` if they stand beside "
        "the last action, as Gymnasium's `step` returns them, or `last_row='boundary'` if one more row holds the "
        f"final observation. {ADVICE}"
    )


def leaves_of_kinds(steps: Any) -> list[Any]:
    """Return the leaves that `kinds_of` looks at if `outcome` is False; none if no leaf says what a row is."""
    found = dict(zip(*named_leaves(steps, "steps"), strict=True))
    layout = layout_of([path for path, leaf in found.items() if leaf is not None])
    if layout is None:
        return []
    named = {*layout.last, layout.first, layout.ids, layout.terminal, layout.truncated, layout.discount}
    named |= {"next_step_type"} if layout.needs_next_type else set()
    return [leaf for path, leaf in found.items() if path in named]


def ids_of(steps: Any) -> Any:
    """Return the leaf that has the id of each row's trajectory; None if the steps have no such leaf.

    >>> import numpy as np
    >>> ids_of({"observation": np.zeros(2), "traj_ids": np.array([7, 7])}).tolist()
    [7, 7]
    """
    found = dict(zip(*named_leaves(steps_and_mask(steps)[0], "steps"), strict=True))
    return next((found[name] for name in _ID_NAMES if name in found), None)


def steps_and_mask(data: Any) -> tuple[Any, Any]:
    """Return steps and their mask, or None: tables of older observers have pairs (steps, mask)."""
    if type(data) is tuple and len(data) == 2 and tree.is_nested(data[0]) and not tree.is_nested(data[1]):  # noqa: PLR2004
        steps, mask = data
        if str(getattr(mask, "dtype", "")).endswith("bool"):
            return steps, mask
    return data, None
