"""Kinds of rows: one byte per row says what the row is, and arithmetic on these bytes answers every other question.

    bit  name      the row
    ---  --------  -----------------------------------------------------------------------
      1  FIRST     is the first row of its episode
      2  ACTION    has an action, and the action's reward and discount
      4  LAST      is the last row of its episode
      8  TERMINAL  is a LAST row of an episode that the environment ended
     16  PADDING   is no step: an observer, `collate="pad"` or `short="pad"` made it

An episode is truncated if its LAST row is not TERMINAL. A LAST row without ACTION is a boundary row: it only holds the
final observation. A LAST row with ACTION is the last row of a program that kept no final observation. A real row is cut
if it is not LAST, and the item ends after it, or PADDING or FIRST follows. PADDING is set alone.

A transition is an ACTION row and the row after it in the same item, unless the first one is LAST, or the second one is
PADDING or FIRST. It leads to a terminal state if the second row is TERMINAL without ACTION. A TERMINAL row with ACTION
shows the last state on which an action was taken; the terminal state after this action was not kept.

Writers set the kind when they write a row. `kinds_of` is the only rule for rows that have no kind yet: items of other
writers, files of other programs, arrays in memory.

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

Pure functions of arrays of NumPy, PyTorch, JAX and others; any thread may call them. Rows are [T], [N] or [B, T].

Source: RLDS, dm_env and TF-Agents (boundary rows); Gymnasium, TorchRL, D4RL and rsl_rl (flags beside the action).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import tree

from reverb_writer.arrays import Array, any_true, array_like, array_namespace, as_array, as_bool, concatenated
from reverb_writer.errors import DOCS, SpecError, StructureError
from reverb_writer.nests import join_paths, named_leaves

__all__ = ["ACTION", "FIRST", "LAST", "PADDING", "TERMINAL", "LastRow", "first_rows", "has", "kinds_of", "last_rows"]

FIRST: Final = 1
ACTION: Final = 2
LAST: Final = 4
TERMINAL: Final = 8
PADDING: Final = 16

LastRow = Literal["boundary", "action"]
"""Whose row the flags of an end stand on: the row of the final observation, or the row of the last action."""

FLAG_NAMES: Final = frozenset(
    {
        *("is_first", "is_init", "start_of_episode", "is_last", "step_type", "next_step_type", "terminated"),
        *("is_terminal", "truncated", "terminals", "timeouts", "done", "dones", "time_outs"),
    }
)
"""All names of leaves that only say what a row is; a `discount` and the id of a trajectory also have a value."""

_ID_NAMES: Final = ("collector/traj_ids", "traj_ids", "episode")
FLAGS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "is_first": lambda kinds: (kinds & FIRST) != 0,
    "is_last": lambda kinds: (kinds & LAST) != 0,
    "terminated": lambda kinds: (kinds & TERMINAL) != 0,
    "truncated": lambda kinds: (kinds & (LAST | TERMINAL)) == LAST,
}
"""Leaves of flags for readers that do not know kinds, and their values by the kinds of the rows."""

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
_ADVICE = f"{DOCS}/explanation/steps.html has the table of layouts."


# ------------------------------------------------------------------------------------------------------- arithmetic


class Pairs(NamedTuple):
    """Pairs of a row and the row after it: [B, T - 1] or [N - 1]; or [B, T] or [N], a pair for each row."""

    mask: Array  # the pair is a transition
    terminal: Array  # it is a transition to a terminal state
    continues: Array  # the next pair is also a transition of the same episode


def has(kinds: Array, bits: int) -> Array:
    """Return whether each row has one of these bits.

    Args:
        kinds: uint8 [T], [N] or [B, T].
        bits: bits, such as `FIRST | LAST`.

    Returns:
        bool, in the shape of the kinds.

    >>> has(np.array([FIRST | ACTION, LAST], np.uint8), FIRST).tolist()
    [True, False]
    """
    return (kinds & bits) != 0


def pairs(
    kinds: Array, starts: Array | None = None, *, following: Array | None = None, last_row: LastRow | None = None
) -> Pairs:
    """Return which pairs of a row and the row after it are transitions.

    Args:
        kinds: [B, T] or [N].
        starts: flags in the same shape: rows that do not follow the row before, because another slice begins; or None.
        following: kinds of the row after each row, in the same shape; None if these are the neighbours.
        last_row: "action" for pairs of all rows: a TERMINAL row with ACTION is also a transition.

    >>> pairs(np.array([FIRST | ACTION, ACTION, LAST | TERMINAL, PADDING], np.uint8)).mask.tolist()
    [True, True, False]
    >>> pairs(np.array([FIRST | ACTION, ACTION | LAST | TERMINAL], np.uint8), last_row="action").terminal.tolist()
    [False, True]
    """
    xp = array_namespace(kinds)
    no = xp.zeros_like(has(kinds, LAST))
    breaks = no if starts is None else concatenated(xp, [starts[..., 1:], no[..., :1]], -1)
    are_all = following is not None or last_row == "action"
    if following is None:
        following = concatenated(xp, [kinds[..., 1:], xp.full_like(kinds[..., :1], PADDING)], -1)
        following = xp.where(breaks, following | FIRST, following)
    mask = ((kinds & (ACTION | LAST)) == ACTION) & ~has(following, PADDING | FIRST)
    terminal = mask & ((following & (ACTION | TERMINAL)) == TERMINAL)
    if last_row == "action":
        ends = (kinds & (ACTION | TERMINAL)) == ACTION | TERMINAL
        mask, terminal, breaks = mask | ends, terminal | ends, breaks | ends
    if not are_all:
        mask, terminal, no, breaks = (flags[..., :-1] for flags in (mask, terminal, no, breaks))
    continues = concatenated(xp, [mask[..., :-1] & mask[..., 1:], no[..., :1]], -1)
    return Pairs(mask, terminal, continues & ~breaks)


def first_rows(kinds: Array, starts: Array | None = None) -> Array:
    """Return the real rows at which a trajectory begins: FIRST rows, and rows after LAST, PADDING or a start.

    A trajectory begins at the first row of an item.

    Args:
        kinds: uint8 [T], [N] or [B, T].
        starts: bool, in the shape of the kinds: rows with which another item begins; None if each row of [B, T] is one
            item.

    Returns:
        bool, in the shape of the kinds.

    >>> first_rows(np.array([ACTION, LAST, FIRST | ACTION, ACTION, PADDING], np.uint8)).tolist()
    [True, False, True, False, False]
    """
    begins = has(kinds, FIRST) | _after_start(kinds, has(kinds, LAST | PADDING))
    begins = begins if starts is None else begins | starts
    return begins & ~has(kinds, PADDING)


def last_rows(kinds: Array, starts: Array | None = None) -> Array:
    """Return the real rows at which a trajectory ends: LAST rows, and rows that are cut.

    Arguments and result: `kinds` [T], [N] or [B, T], and `starts` [T], [N] or [B, T], are those of `first_rows`.

    >>> last_rows(np.array([ACTION, LAST, FIRST | ACTION, ACTION, PADDING], np.uint8)).tolist()
    [False, True, False, True, False]
    """
    begins = first_rows(kinds, starts) | has(kinds, PADDING)
    xp = array_namespace(kinds)
    ends = concatenated(xp, [begins[..., 1:], xp.ones_like(begins[..., :1])], -1)
    return (ends | has(kinds, LAST)) & ~has(kinds, PADDING)


def _after_start(like: Array, flags: Array) -> Array:
    """Return, for each row, the flag of the row before; True for the first row."""
    xp = array_namespace(like)
    return concatenated(xp, [xp.ones_like(flags[..., :1]), flags[..., :-1]], -1)


def checked_kinds(kinds: Any, num_rows: int) -> Array:
    """Return given kinds as uint8 [num_rows], a copy; raises StructureError if they are no kinds.

    >>> checked_kinds([3, 12], 2)
    array([ 3, 12], dtype=uint8)
    """
    array = np.asarray(kinds)
    if array.dtype.kind not in "iu" or array.shape != (num_rows,):
        raise StructureError(f"`kinds` must be integers, shape ({num_rows},), got {array.dtype} {array.shape}.")
    is_wrong = (array < 0) | (array > PADDING) | (has(array, TERMINAL) & ~has(array, LAST))
    if is_wrong.any():
        row = int(is_wrong.argmax())
        raise StructureError(
            f"row {row} has kind {array[row]}, expected a sum of FIRST 1, ACTION 2, LAST 4 and TERMINAL 8, which needs "
            "LAST; or PADDING 16 alone."
        )
    return array.astype(np.uint8)


# ------------------------------------------------------------------------------------------------ the rule of layouts


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
        f"final observation. {_ADVICE}"
    )


def kinds_of(
    steps: Any,
    *,
    mask: Any = None,
    last_row: LastRow | None = None,
    starts: Any = None,
    is_ring: bool = False,
    outcome: bool = True,
) -> Array:
    """Return the kinds of rows that have none yet, from the leaves in the table above. Pure.

    Args:
        steps: nest with leaves [T, ...], [N, ...] or [B, T, ...], of NumPy or another library. Flags may have a last
            axis of size 1. A pair (steps, mask), as older observers wrote it, has a mask of its own.
        mask: False for padding, in the shape of the flags; None if rows after a last row are padding until the next
            first row.
        last_row: whose row the flags of an end stand on, where the names do not show it or show the wrong one.
        starts: flags: rows that do not follow the row before, because another item begins; None for [B, T] and for
            rows of one item.
        is_ring: whether the first row follows the last row, as in a full ring of rows [T].
        outcome: whether rows must show if the environment ended an episode. False is enough to find trajectories.

    Returns:
        uint8, [T], [N] or [B, T]; a new array.

    Raises:
        StructureError: no leaf says what a row is; or rows contradict themselves, for example by a reward on a row that
            only holds the final observation. The error names the argument that settles it.

    >>> number = np.arange(3)
    >>> steps = {"reward": np.ones(3), "is_first": number == 0, "is_last": number == 2, "is_terminal": number == 2}
    >>> kinds_of(steps, last_row="action").tolist()
    [3, 2, 14]
    """
    steps, column = steps_and_mask(steps)
    paths, leaves = named_leaves(steps, "steps")
    found = {path: leaf for path, leaf in zip(paths, leaves, strict=True) if leaf is not None}
    layout = layout_of(found, last_row)
    if layout is None or (outcome and not (layout.last or layout.discount)):
        raise StructureError(
            f"no leaf shows where episodes end; found {join_paths(paths)}. Steps need `is_last`, `step_type`, "
            "`terminated` and `truncated`, or `discount`; or write them with an observer, which stores kinds. "
            f"{_ADVICE}"
        )
    if outcome and not layout.shows_outcome:
        raise StructureError(
            f"{join_paths(layout.last)} shows where an episode ended, but no leaf shows whether the environment ended "
            f"it. Steps need `terminated`, `is_terminal`, `truncated` or `discount`. {_ADVICE}"
        )
    if outcome and layout.has_action is None:
        raise ambiguous(layout)
    masks = [one for one in (mask, column) if one is not None]
    return _Rows(layout, found, masks, starts, is_ring=is_ring).kinds(checks=outcome and last_row is None)


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

    >>> ids_of({"observation": np.zeros(2), "traj_ids": np.array([7, 7])}).tolist()
    [7, 7]
    """
    found = dict(zip(*named_leaves(steps_and_mask(steps)[0], "steps"), strict=True))
    return next((found[name] for name in _ID_NAMES if name in found), None)


class _Rows:
    """The flags of rows in one layout."""

    def __init__(
        self, layout: Layout, found: Mapping[str, Any], masks: Sequence[Any], starts: Any, *, is_ring: bool
    ) -> None:
        named = [*layout.last, layout.first, layout.ids, layout.terminal, layout.truncated]
        told = {path: found[path] for path in named if path is not None}
        if not layout.last and layout.discount:
            told[layout.discount] = found[layout.discount]
        self.xp = xp = array_namespace(*told.values())
        arrays = {path: as_array(xp, leaf) for path, leaf in told.items()}
        self.shape = _shape_of(arrays)
        self.layout, self._found = layout, found
        self._told = {path: array.reshape(self.shape) for path, array in arrays.items()}
        self._like = as_bool(xp, next(iter(self._told.values())))
        self.real = xp.ones_like(self._like)
        for mask in masks:
            self.real = self.real & self._flags_like(mask, "the mask")
        self.is_masked, self.is_of_items = bool(masks), starts is not None or len(self.shape) > 1
        begins = np.zeros(self.shape, bool)
        begins[..., 0] = not is_ring
        self.starts = array_like(xp, begins, self._like)
        if starts is not None:
            self.starts = self.starts | self._flags_like(starts, "`starts`")

    def kinds(self, *, checks: bool) -> Array:
        """Return the bits; `checks` refuses rewards on rows that should only hold an observation."""
        first, last = self._first(), self._last()
        if last is None:
            last = self._zero_discount() if self.layout.discount else self.xp.zeros_like(self._like)
            last = last if self.layout.has_action else self._previous(last)
            last = last if first is None or self.layout.has_action else last & ~first
            self._check_one_episode(first, last)
        padding = self._padding(first, last)
        real = self.real & ~padding
        last = last & real
        terminal = self._terminal(last, real)
        if checks and not self.layout.has_action and not self.layout.needs_next_type:
            self._check_rewards(last)
        if first is None:
            first = self._previous(last)
        if self.layout.ids is not None:
            first = first | self._changes(self._told[self.layout.ids])
        action = real if self.layout.has_action or self.layout.has_action is None else real & ~last
        kinds = self._byte(PADDING) * ~real
        for bit, flags in ((FIRST, first & real), (ACTION, action), (LAST, last), (TERMINAL, terminal)):
            kinds = kinds | self._byte(bit) * flags
        return kinds

    def _first(self) -> Array | None:
        path = self.layout.first
        if path is None:
            return None if self.layout.ids is None or self.layout.last else self._changes(self._told[self.layout.ids])
        return self._told[path] == STEP_FIRST if path == "step_type" else as_bool(self.xp, self._told[path])

    def _last(self) -> Array | None:
        if not self.layout.last:
            return None
        if self.layout.last == ("step_type",):
            return self._told["step_type"] == STEP_LAST
        last = self._like & ~self._like
        for path in self.layout.last:
            last = last | as_bool(self.xp, self._told[path])
        return last

    def _padding(self, first: Array | None, last: Array) -> Array:
        """Return the rows that are padding although no mask shows it: rows after a last row, up to a first row."""
        if first is not None:
            padding = self._after(last, first)
            if self.layout.needs_next_type:  # a padding row of TF-Agents looks like a boundary row
                following = as_array(self.xp, self._found["next_step_type"]).reshape(self.shape)
                padding = padding | (last & self._previous(~last & (following != STEP_LAST)))
            return padding
        if not self.layout.last:  # `discount` alone: the item holds one episode
            return self._after(last, None)
        is_open = not self.is_masked and not self.layout.has_action and self.is_of_items
        if is_open and any_true(self._after(last, None)):
            raise StructureError(
                "windows have rows after a last row, and no leaf shows whether these rows are padding or another "
                f"episode. The steps lack `is_first` or `step_type`; or pass `mask`. {_ADVICE}"
            )
        return last & ~last

    def _after(self, ends: Array, first: Array | None) -> Array:
        """Return the rows after an end, up to the next first row or start."""
        starts = self.starts if first is None else self.starts | first
        return follow_ends(self.xp, ends, starts)

    def _terminal(self, last: Array, real: Array) -> Array:
        layout = self.layout
        if not layout.last:
            return last
        if layout.terminal is not None:
            terminal = as_bool(self.xp, self._told[layout.terminal])
            wrong = terminal & ~last & real
            if any_true(wrong):
                raise StructureError(
                    f"`{layout.terminal}` is set on {int(wrong.sum())} rows that {join_paths(layout.last)} does not "
                    "show as last rows. Both flags belong on the same row: the row of the final observation, or the "
                    f"row of the last action (`last_row='action'`). {_ADVICE}"
                )
            return terminal & last
        if layout.truncated is not None and layout.last != (layout.truncated,):
            return last & ~as_bool(self.xp, self._told[layout.truncated])
        if layout.discount is None:
            return last & ~last
        zero = self._zero_discount()
        return last & (zero if layout.has_action else self._previous(zero & ~last))

    def _zero_discount(self) -> Array:
        discount = as_array(self.xp, self._found[str(self.layout.discount)])
        if tuple(discount.shape) not in (self.shape, (*self.shape, 1)):
            raise StructureError(f"`discount` has shape {tuple(discount.shape)}, expected {self.shape} as the flags.")
        return discount.reshape(self.shape) == 0

    def _check_one_episode(self, first: Array | None, last: Array) -> None:
        """Refuse rows of two episodes where only the discount shows an end."""
        if first is not None or self.layout.discount is None or self.layout.last:
            return
        zero = self._zero_discount()
        wrong = self._after(last, None) & ~zero & self.real
        if any_true(wrong):
            raise StructureError(
                f"`discount` is the only leaf that shows an end, and {int(wrong.sum())} rows with another discount "
                "follow a discount of 0 in the same item, so the start of the next episode is unknown. Steps need "
                f"`is_first`, or `is_last`, or `step_type`. {_ADVICE}"
            )

    def _check_rewards(self, last: Array) -> None:
        reward = self._found.get("reward")
        if reward is None or tuple(np.shape(reward)) not in (self.shape, (*self.shape, 1)):
            return
        wrong = last & (as_array(self.xp, reward).reshape(self.shape) != 0)
        if any_true(wrong):
            raise StructureError(
                f"{int(wrong.sum())} last rows ({join_paths(self.layout.last or ('discount',))}) have a reward. Pass "
                "`last_row='action'` if the last row has the last action and its reward, or `last_row='boundary'` if "
                "it only holds the final observation and its reward has no meaning. Steps of dm_env, whose reward "
                f"belongs to the action of the row before, need `rw.environments.TimeStepRecorder`. {_ADVICE}"
            )

    def _changes(self, ids: Array) -> Array:
        return (ids != self._before(ids)) & ~self.starts

    def _previous(self, flags: Array) -> Array:
        return self._before(flags) & ~self.starts

    def _before(self, rows: Array) -> Array:
        """Return the row before each row; before the first row, the last row, as in a ring."""
        return concatenated(self.xp, [rows[..., -1:], rows[..., :-1]], -1)

    def _flags_like(self, flags: Any, what: str) -> Array:
        shaped = as_bool(self.xp, array_like(self.xp, flags, self._like))
        if tuple(shaped.shape) != self.shape:
            raise StructureError(f"{what} has shape {tuple(shaped.shape)}, expected {self.shape} as the flags.")
        return shaped

    def _byte(self, bit: int) -> Array:
        return array_like(self.xp, np.asarray(bit, np.uint8), self._like)


def follow_ends(xp: Any, ends: Array, starts: Array) -> Array:
    """Return the rows after an end, up to the next start, [..., T].

    >>> follow_ends(np, np.array([False, True, False, False]), np.array([True, False, False, True])).tolist()
    [False, False, True, False]
    """
    size = ends.shape[-1]
    number = array_like(xp, 2 * np.arange(size), ends)
    latest = xp.where(ends, number + 1, xp.where(starts, number, xp.zeros_like(number)))
    distance = 1
    while distance < size:  # the largest number so far is odd after an end
        before = concatenated(xp, [xp.zeros_like(latest[..., :distance]), latest[..., :-distance]], -1)
        latest, distance = xp.maximum(latest, before), 2 * distance
    shifted = concatenated(xp, [xp.zeros_like(latest[..., :1]), latest[..., :-1]], -1)
    return (shifted % 2 == 1) & ~starts


def steps_and_mask(data: Any) -> tuple[Any, Any]:
    """Return steps and their mask, or None: tables of older observers have pairs (steps, mask)."""
    if type(data) is tuple and len(data) == 2 and tree.is_nested(data[0]) and not tree.is_nested(data[1]):  # noqa: PLR2004
        steps, mask = data
        if str(getattr(mask, "dtype", "")).endswith("bool"):
            return steps, mask
    return data, None


def _shape_of(flags: Mapping[str, Array]) -> tuple[int, ...]:
    """Return the shape of the rows: the shape of the flag with the fewest axes, without a last axis of size 1."""
    shapes = {path: tuple(flag.shape) for path, flag in flags.items()}
    shape = min(shapes.values(), key=len)
    if any(sizes not in (shape, (*shape, 1)) for sizes in shapes.values()) or len(shape) not in (1, 2):
        raise StructureError(f"flags must all be [T], [N] or [B, T], got shapes {shapes}.")
    return shape
