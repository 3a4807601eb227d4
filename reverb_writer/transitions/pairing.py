"""Rows and the rows after them as transitions: arithmetic on the kinds of rows (`reverb_writer.rows`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tree

from reverb_writer import rows
from reverb_writer.arrays import (
    Array,
    array_like,
    array_namespace,
    as_bool,
    as_float,
    concatenated,
    copied,
    take_along_time,
    take_rows,
    with_axes,
)
from reverb_writer.errors import StructureError
from reverb_writer.leaves import host_array
from reverb_writer.nests import fields_of, join_paths, map_present, named_leaves
from reverb_writer.rows.kinds import Pairs, pairs
from reverb_writer.rows.layouts import FLAG_NAMES, steps_and_mask
from reverb_writer.transitions.records import Transitions, has_rows

_NEEDED = ("observation", "action", "reward")
_NO_EXTRAS = {*_NEEDED, "discount", *FLAG_NAMES}


def to_transitions(
    batch: Any, *, mask: Any = None, kinds: Any = None, last_row: rows.LastRow | None = None
) -> Transitions:
    """Return the transitions between the rows of a batch. Pure.

    A transition is a row with an action and the next row of the same episode; `reverb_writer.rows` and
    docs/explanation/steps.md define the kinds of rows. The kinds are `kinds`, or those of the `Batch`, or those that
    the leaves show (`rows.kinds_of`).

    Args:
        batch: a `Batch` of windows, leaves [B, T, ...], or of slices, leaves [N, ...]; or its `data`. Arrays are NumPy
            arrays or, with array-api-compat, arrays of PyTorch, JAX and others.
        mask: False for padding, in the shape of the kinds; or None.
        kinds: uint8 [B, T] or [N], the kind of each row; or None.
        last_row: "action" if the last row of an episode is the row of its last action. A row that ended the episode by
            termination then is a transition, whose `next_observation` repeats its own, and leaves are [B, T] or [N].
            "boundary" if the last row only holds the final observation. None for the batch's `last_row`.

    Returns:
        `Transitions`, leaves [B, T - 1, ...] or [N - 1, ...]: the last row of a window only gives its observation. They
        are [B, T, ...] or [N, ...] with `last_row="action"`, and for slices with `next` (`with_next`), because the row
        after each slice is known. `next_observation` is a copy. The other leaves are views where the library has views.

    Raises:
        StructureError: a field is missing or has another shape; or the leaves do not show the kinds of rows, or
            contradict themselves.

    >>> steps = {  # an episode of two actions that terminated, and padding
    ...     "observation": np.array([[5, 6, 7, 0]]),
    ...     "action": np.array([[1, 2, 0, 0]]),
    ...     "reward": np.array([[0.5, 1.5, 0.0, 0.0]]),
    ...     "is_first": np.array([[True, False, False, False]]),
    ...     "is_last": np.array([[False, False, True, False]]),
    ...     "is_terminal": np.array([[False, False, True, False]]),
    ... }
    >>> found = to_transitions(steps)
    >>> found.next_observation.tolist(), found.discount.tolist(), found.mask.tolist()
    ([[6, 7, 0]], [[1.0, 0.0, 0.0]], [[True, True, False]])
    """
    return paired(batch, steps_fields, mask=mask, kinds=kinds, last_row=last_row, copies=True)[0]


def is_record(batch: Any) -> bool:
    """Return whether this is a `Batch`, which a package above defines, and not the nest of its data."""
    return hasattr(batch, "data") and hasattr(batch, "row_kinds")


def paired(
    batch: Any,
    read: Callable[[Any], dict[str, Any]],
    *,
    mask: Any = None,
    kinds: Any = None,
    last_row: rows.LastRow | None = None,
    copies: bool = False,
) -> tuple[Transitions, Array]:
    """Return the transitions of a batch, and flags of those whose next row is the last row of an episode.

    `read` returns the fields of steps. `next_observation` may be a view of the batch unless `copies` is set.
    """
    slices = after = None
    data = batch
    if is_record(batch):
        batch = batch if last_row is None else dataclasses.replace(batch, last_row=last_row)
        data, slices, after, last_row = batch.data, batch.slices, batch.next, batch.last_row
    fields = read(data)
    reward = tree.flatten(fields["reward"])[0]
    xp = array_namespace(reward)
    starts = None if slices is None else array_like(xp, slices.starts, reward)
    if kinds is None and is_record(batch) and (batch.row_kinds is not None or mask is None):
        kinds = batch.kinds
    elif kinds is None:
        kinds = rows.kinds_of(data, mask=mask, last_row=last_row, starts=starts)
    kinds = array_like(xp, kinds, reward)
    _check_leaves(fields, tuple(kinds.shape), 1 if last_row == "action" else 2)
    if mask is not None:
        kinds = _masked(xp, kinds, as_bool(xp, array_like(xp, mask, kinds)))
    observation = fields["observation"]
    if after is not None:
        following, numbers = _rows_after_slices(xp, batch, kinds)
        then = _taken_of_both(xp, observation, read(after)["observation"], numbers)
        found = pairs(kinds, starts, following=following, last_row=last_row)
    elif last_row == "action":
        numbers = _rows_after(xp, kinds)
        following, then = tree.map_structure(lambda leaf: take_along_time(xp, leaf, numbers), (kinds, observation))
        found = pairs(kinds, starts, last_row="action")
    else:
        axis, shape = kinds.ndim - 1, tuple(kinds.shape)
        following, then = map_present(lambda leaf: leaf[:, 1:] if axis else leaf[1:], (kinds, observation))
        then = map_present(copied, then) if copies else then

        def before(leaf: Any) -> Any:
            return leaf if not has_rows(leaf, shape) else leaf[:, :-1] if axis else leaf[:-1]

        fields = map_present(before, fields)
        found = pairs(kinds, starts)
    return _transitions(xp, fields, found, then), rows.has(following, rows.LAST)


def _transitions(xp: Any, fields: Mapping[str, Any], found: Pairs, next_observation: Any) -> Transitions:
    """Return the transitions of rows whose leaves have the shape of the pairs."""
    goes_on = found.mask & ~found.terminal

    def zero_at_ends(leaf: Array) -> Array:
        return xp.where(with_axes(goes_on, leaf.ndim), leaf, xp.zeros_like(leaf))

    stored = fields.get("discount")
    if stored is None:
        stored = xp.ones_like(goes_on, dtype=as_float(xp, tree.flatten(fields["reward"])[0]).dtype)
    return Transitions(
        observation=fields["observation"],
        action=fields["action"],
        reward=fields["reward"],
        discount=map_present(zero_at_ends, stored),
        next_observation=next_observation,
        mask=found.mask,
        continues=found.continues,
        extras=_extras(fields),
    )


def _extras(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the other fields of steps; the fields of `extras` are among them, not below a name of their own."""
    others = {name: value for name, value in fields.items() if name not in _NO_EXTRAS}
    inner = fields_of(others.get("extras"))
    if inner is None:
        return others
    del others["extras"]
    if both := [name for name in inner if name in others]:
        raise StructureError(
            f"{join_paths(both)}: a field of the steps and a field of their `extras` have one name, so one of the two "
            "would be lost in `transitions.extras`. Rename a field first."
        )
    return {**others, **inner}


def _masked(xp: Any, kinds: Array, mask: Array) -> Array:
    if tuple(mask.shape) != tuple(kinds.shape):
        raise StructureError(f"the mask has shape {tuple(mask.shape)}, expected {tuple(kinds.shape)} as the kinds.")
    return xp.where(mask, kinds, xp.full_like(kinds, rows.PADDING))


def _rows_after(xp: Any, kinds: Array) -> Array:
    """Return the number of the row after each row in its window, [B, T], or among all rows, [N]; its own if LAST."""
    own = np.arange(kinds.shape[-1])
    own, after = (array_like(xp, numbers, kinds) for numbers in (own, np.minimum(own + 1, len(own) - 1)))
    return xp.where(rows.has(kinds, rows.LAST), own, after)


def _rows_after_slices(xp: Any, batch: Any, kinds: Array) -> tuple[Array, Any]:
    """Return the kind of the row after each row of slices, [N], and its number among the N rows and S next rows.

    slices             a0 a1 a2 | b0 b1        a3 follows a2; b1 is the last row of its trajectory
    row after each     a1 a2 a3   b1 b1        no row follows b1: the kind is PADDING
    """
    slices = batch.slices
    first, lengths, cut = map(host_array, (slices.first_rows, slices.lengths, slices.cut_by_sampler))
    size, last = len(kinds), first + lengths - 1
    numbers = np.minimum(np.arange(1, size + 1), size - 1)
    numbers[last] = np.where(cut, size + np.arange(len(last)), last)
    next_kinds = _kinds_of_next(xp, batch, last) if batch.next_kinds is None else batch.next_kinds
    following = take_rows(xp, concatenated(xp, [kinds, array_like(xp, next_kinds, kinds)], 0), numbers)
    follows = np.ones(size, bool)
    follows[last[~cut]] = False
    return _masked(xp, following, array_like(xp, follows, kinds)), numbers


def _kinds_of_next(xp: Any, batch: Any, last: Any) -> Array:
    """Return the kinds of the next rows as the leaves show them, [S]; some layouts show an end in the row before."""

    def both(leaf: Array, after: Array) -> Array:
        own = np if isinstance(leaf, np.ndarray) else xp
        return concatenated(own, [take_rows(own, leaf, last)[:, None], after[:, None]], 1)

    steps, after = (steps_and_mask(nest)[0] for nest in (batch.data, batch.next))
    cut = array_like(xp, host_array(batch.slices.cut_by_sampler), tree.flatten(after)[0])
    mask = xp.stack([xp.ones_like(cut), cut], 1)  # the next row of another slice repeats its last row
    return rows.kinds_of(tree.map_structure(both, steps, after), mask=mask, last_row=batch.last_row)[:, 1]


def _taken_of_both(xp: Any, nest: Any, after: Any, numbers: Any) -> Any:
    """Return rows of a nest by number; the rows of `after` have the numbers after its own."""

    def choose(leaf: Array, leaf_after: Array) -> Array:
        own = np if isinstance(leaf, np.ndarray) else xp  # strings stay NumPy arrays
        return take_rows(own, concatenated(own, [leaf, leaf_after], 0), numbers)

    return tree.map_structure(choose, nest, after)


def steps_fields(data: Any, needed: Sequence[str] = _NEEDED) -> dict[str, Any]:
    """Return the fields of steps by name, without fields of None."""
    fields = fields_of(steps_and_mask(data)[0])
    if fields is None:
        raise StructureError(
            f"steps must be a dict or a named tuple of leaves [B, T, ...], got a {type(data).__name__}. A table "
            "without a stored spec gives columns without names."
        )
    if "next_observation" in fields:
        text = "the steps have a `next_observation`, so they already are transitions. Use `batch.data` as it is."
        raise StructureError(text)
    missing = [f"`{name}`" for name in needed if name not in fields]
    if missing:
        raise StructureError(
            f"the steps lack {', '.join(missing)}; found {', '.join(map(repr, fields))}. Rename the fields first."
        )
    return {name: value for name, value in fields.items() if value is not None}


def _check_leaves(fields: Mapping[str, Any], shape: tuple[int, ...], needed_rows: int) -> None:
    if len(shape) not in (1, 2):
        raise StructureError(f"the kinds must be [B, T] for windows or [N] for slices, got shape {shape}.")
    if len(shape) > 1 and shape[1] < needed_rows:
        raise StructureError(f"windows of {shape[1]} steps hold no transition: `sequence_length` must be 2 or more.")
    needed = {name: fields[name] for name in (*_NEEDED, "discount") if name in fields}
    if all(has_rows(field, shape) for field in needed.values()):
        return
    paths, leaves = named_leaves(needed, "steps")
    wrong = [path for path, leaf in zip(paths, leaves, strict=True) if not has_rows(leaf, shape)]
    raise StructureError(f"{join_paths(wrong[:3])}: expected leaves that begin with the shape of the kinds, {shape}.")
