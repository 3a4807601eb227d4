"""The one rule for rows that have no kind yet: kinds from the leaves of their layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from reverb_writer.arrays import Array, any_true, array_like, array_namespace, as_array, as_bool, concatenated
from reverb_writer.errors import StructureError
from reverb_writer.nests import join_paths, named_leaves
from reverb_writer.rows.kinds import ACTION, FIRST, LAST, PADDING, TERMINAL, LastRow
from reverb_writer.rows.layouts import (
    ADVICE,
    STEP_FIRST,
    STEP_LAST,
    Layout,
    ambiguous,
    layout_of,
    steps_and_mask,
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

    Row 0 is FIRST only if a leaf shows it, because the rows may be cut from the middle of an episode. `first_rows`
    begins a trajectory at row 0 in any case, and `RolloutWriter.save` makes row 0 of a whole trajectory FIRST.

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
            f"{ADVICE}"
        )
    if outcome and not layout.shows_outcome:
        raise StructureError(
            f"{join_paths(layout.last)} shows where an episode ended, but no leaf shows whether the environment ended "
            f"it. Steps need `terminated`, `is_terminal`, `truncated` or `discount`. {ADVICE}"
        )
    if outcome and layout.has_action is None:
        raise ambiguous(layout)
    masks = [one for one in (mask, column) if one is not None]
    return _Rows(layout, found, masks, starts, is_ring=is_ring).kinds(checks=outcome and last_row is None)


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
                f"episode. The steps lack `is_first` or `step_type`; or pass `mask`. {ADVICE}"
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
                    f"row of the last action (`last_row='action'`). {ADVICE}"
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
                f"`is_first`, or `is_last`, or `step_type`. {ADVICE}"
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
                f"belongs to the action of the row before, need `rw.environments.TimeStepRecorder`. {ADVICE}"
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


def _shape_of(flags: Mapping[str, Array]) -> tuple[int, ...]:
    """Return the shape of the rows: the shape of the flag with the fewest axes, without a last axis of size 1."""
    shapes = {path: tuple(flag.shape) for path, flag in flags.items()}
    shape = min(shapes.values(), key=len)
    if any(sizes not in (shape, (*shape, 1)) for sizes in shapes.values()) or len(shape) not in (1, 2):
        raise StructureError(f"flags must all be [T], [N] or [B, T], got shapes {shapes}.")
    return shape
