"""Pairs of neighbouring rows as transitions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tree

from reverb_writer.arrays import (
    Array,
    any_true,
    array_like,
    array_namespace,
    as_array,
    as_bool,
    as_float,
    concatenated,
    take_rows,
    with_axes,
)
from reverb_writer.errors import StructureError
from reverb_writer.leaves import host_array
from reverb_writer.nests import fields_of, join_paths, named_leaves
from reverb_writer.steps import MARKER_NAMES
from reverb_writer.transitions.records import Transitions, has_rows
from reverb_writer.transitions.step_flags import StepFlags, as_rows, follow_ends, shifted, split_mask

_NEEDED = ("observation", "action", "reward")
_FLAGS = MARKER_NAMES | {"discount"}


def to_transitions(batch: Any, *, mask: Any = None) -> Transitions:
    """Return the transitions between the neighbouring rows of a batch. Pure.

    Steps are those of this package's recorders and of `Episode`, RLDS steps, or TF-Agents' `Trajectory`: see
    docs/explanation/steps.md. A pair of rows is a transition if the first row is neither a boundary step nor padding
    and the second row is the next row of the same episode.

    The mask shows padding. Without a mask, rows after a boundary step are padding if `is_first` or `step_type` shows no
    other episode. Padding after an episode that the actor cut by `observer.reset()` needs the mask, because no boundary
    step precedes it. A window whose only flag is `discount` must hold one episode: a discount other than 0 after a
    discount of 0 is refused.

    Args:
        batch: a `Batch` of windows, leaves [B, T, ...], or of slices, leaves [N, ...]; or its `data`.
            It may be a pair (steps, mask), as observers write it with `mask=True`. Arrays are NumPy arrays or, with
            array-api-compat, arrays of PyTorch, JAX and others.
        mask: False for padding, in the shape of the flags; added to the masks of the batch.

    Returns:
        `Transitions`, leaves [B, T - 1, ...] or [N - 1, ...]: the last row of a window only gives its observation.
        Leaves are views where the library has views. Slices with `next` (`with_next`) give leaves [N, ...], a
        transition from each row, because the row after each slice is known.

    Raises:
        StructureError: a field or a flag is missing, is on a wrong row, or has another shape.

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
    return _transitions(batch, mask, _fields)


def is_batch(steps: Any) -> bool:
    """Return whether this is a `Batch` or the nest of its data, not transitions or an array."""
    if isinstance(steps, Transitions):
        return False
    has_info = hasattr(steps, "data") and hasattr(steps, "info")
    return has_info or fields_of(split_mask(steps)[0]) is not None


def with_values(batch: Any, values: Any) -> tuple[Transitions, Any, Any]:
    """Return the transitions of a batch, which may lack observations and actions, with values before and after them.

    If `values` is the name of a leaf, both values are its rows. An array is returned unchanged, with None.

    Raises:
        StructureError: as in `to_transitions`; or the leaf does not exist, or lacks values of final observations.
    """

    def of_values(data: Any) -> dict[str, Any]:
        fields = {"observation": (), "action": (), **_fields(data, ("reward",))}
        return {**fields, "observation": leaf_at(fields, values)} if isinstance(values, str) else fields

    found = _transitions(batch, None, of_values)
    if not isinstance(values, str):
        return found, values, None
    before, after = found.observation, found.next_observation
    if before.ndim == found.mask.ndim + 1 and before.shape[-1] == 1 and before.ndim > found.reward.ndim:
        before, after = before[..., 0], after[..., 0]
    if before.ndim == found.mask.ndim:
        lacks = found.mask & ~found.continues & (before != 0) & (after == 0)
        discount = as_rows(found.discount, found.mask)
        if any_true(lacks if discount is None else lacks & (discount != 0)):
            raise StructureError(
                f"`{values}` is 0 on final observations of truncated episodes, because recorders have no value there. "
                "Pass the critic's values of all rows instead of the name."
            )
    return found, before, after


def _transitions(batch: Any, mask: Any, read: Callable[[Any], Mapping[str, Any]]) -> Transitions:
    """Return the transitions of a batch; `read` returns the fields of its data."""
    data, info, markers, after = batch, None, None, None
    if hasattr(batch, "data") and (hasattr(batch, "info") or hasattr(batch, "markers")):  # not the data of a tensor
        data, info, markers = batch.data, getattr(batch, "info", None), getattr(batch, "markers", None)
        after = split_mask(getattr(batch, "next", None))[0]
    data, column = split_mask(data)
    given = (mask, getattr(info, "mask", None), getattr(markers, "mask", None), column)
    masks = [one for one in given if one is not None]
    if markers is not None and after is not None:
        return _with_next_rows(read(data), read(after), masks, markers.slices)
    fields = read(data)
    flags = StepFlags.read(fields, masks)
    return _paired(flags, fields, None if markers is None else _breaks(flags, markers))


def _paired(flags: StepFlags, fields: Mapping[str, Any], breaks: Array | None) -> Transitions:
    """Return the transitions of neighbouring rows; `breaks` is from `_breaks` for slices, and None for windows."""
    _check_leaves(fields, flags.shape)
    valid, terminal = _pairs(flags, fields, breaks)
    xp, is_batch = flags.xp, len(flags.shape) > 1

    def first(nest: Any) -> Any:
        return tree.map_structure(lambda leaf: leaf[:, :-1] if is_batch else leaf[:-1], nest)

    def second(nest: Any) -> Any:
        return tree.map_structure(lambda leaf: leaf[:, 1:] if is_batch else leaf[1:], nest)

    def zero_at_ends(leaf: Array) -> Array:
        return xp.where(with_axes(valid & ~terminal, leaf.ndim), leaf, xp.zeros_like(leaf))

    stored = fields.get("discount")
    if stored is None:
        reward = tree.flatten(fields["reward"])[0]
        stored = xp.ones_like(flags.like, dtype=as_float(xp, reward).dtype)
    return Transitions(
        observation=first(fields["observation"]),
        action=first(fields["action"]),
        reward=first(fields["reward"]),
        discount=tree.map_structure(zero_at_ends, first(stored)),
        next_observation=second(fields["observation"]),
        mask=valid,
        continues=concatenated(xp, [valid[..., :-1] & valid[..., 1:], xp.zeros_like(valid[..., :1])], -1),
        extras={
            name: first(value) if has_rows(value, flags.shape) else value for name, value in _others(fields).items()
        },
    )


def _others(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that a transition takes unchanged."""
    return {name: value for name, value in fields.items() if name not in _FLAGS and name not in _NEEDED}


def _with_next_rows(
    fields: Mapping[str, Any], after: Mapping[str, Any], masks: Sequence[Any], slices: Any
) -> Transitions:
    """Return one transition for each row of slices whose next rows are known.

    slices             a0 a1 a2 | b0 b1        a3 follows a2; b1 is the last row of its trajectory
    rows in order      a0 a1 a2   a3   b0 b1   then the last row again, for its own pair
    from each row      a0 a1 a2   -    b0 b1   the transition from b1 is masked: no row follows
    """
    num_rows, cut = len(slices.rows), np.flatnonzero(slices.cut_by_sampler)
    following = (slices.first_rows + slices.lengths)[cut]  # the row before which each next row is inserted
    # Numbers of rows in order; row N + s is the row after slice s.
    order = np.append(np.insert(np.arange(num_rows), following, num_rows + cut), num_rows - 1)
    at = np.arange(num_rows) + np.searchsorted(following, np.arange(num_rows), "right")  # new place of each row
    starts = np.zeros(len(order), bool)
    starts[at[slices.first_rows]] = starts[-1] = True
    told = [name for name in fields if name in _FLAGS or name in _NEEDED[1:]]
    xp = array_namespace(*tree.flatten([fields[name] for name in told]))

    def joined(rows: Any) -> Callable[[Array, Array], Array]:
        """Return a function that chooses among the rows of a leaf and the rows after them."""

        def choose(leaf: Array, following: Array) -> Array:
            own = np if isinstance(leaf, np.ndarray) else xp  # strings stay NumPy arrays
            return take_rows(own, concatenated(own, [leaf, following], 0), rows)

        return choose

    small = {name: tree.map_structure(joined(order), fields[name], after[name]) for name in told}
    small["observation"] = order  # numbers of rows, so that frames are copied once
    of_next = np.ones(len(slices.lengths), bool)
    flags = StepFlags.read(small, [np.append(host_array(one) != 0, of_next)[order] for one in masks])
    _check_leaves(fields, (len(at),))
    found = _paired(flags, small, array_like(xp, starts, flags.like))
    return Transitions(
        observation=fields["observation"],
        action=fields["action"],
        reward=fields["reward"],
        discount=tree.map_structure(lambda leaf: take_rows(xp, leaf, at), found.discount),
        next_observation=tree.map_structure(
            joined(found.next_observation[at]), fields["observation"], after["observation"]
        ),
        mask=take_rows(xp, found.mask, at),
        continues=take_rows(xp, found.continues, at),
        extras=_others(fields),
    )


def _fields(data: Any, needed: Sequence[str] = _NEEDED) -> dict[str, Any]:
    fields = fields_of(data)
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


def _check_leaves(fields: Mapping[str, Any], shape: tuple[int, ...]) -> None:
    if len(shape) > 1 and shape[1] < 2:  # noqa: PLR2004  # a pair of rows
        raise StructureError(f"windows of {shape[1]} steps hold no transition: `sequence_length` must be 2 or more.")
    needed = {name: fields[name] for name in (*_NEEDED, "discount") if name in fields}
    paths, leaves = named_leaves(needed, "steps")
    wrong = [path for path, leaf in zip(paths, leaves, strict=True) if not has_rows(leaf, shape)]
    if wrong:
        raise StructureError(f"{join_paths(wrong[:3])}: expected leaves that begin with the flags' shape, {shape}.")


def _breaks(flags: StepFlags, markers: Any) -> Array:
    """Return the rows of slices that do not follow the row before them, [N]."""
    xp, starts = flags.xp, markers.slices.starts
    if starts.shape != flags.shape:
        raise StructureError(f"markers must be [N] as the flags of the steps, {flags.shape}, got {starts.shape}.")
    return array_like(xp, starts, flags.like) | as_bool(xp, markers.is_init)


def _pairs(flags: StepFlags, fields: Mapping[str, Any], breaks: Array | None) -> tuple[Array, Array]:
    """Return the pairs of neighbouring rows that are transitions, and the pairs that lead to a terminal state."""
    xp, boundary = flags.xp, flags.boundary
    is_told = boundary is not None
    starts = xp.zeros_like(flags.like)
    for found in (flags.first, breaks):
        starts = starts if found is None else starts | found
    if boundary is None:
        discount = as_rows(fields.get("discount"), flags.like)
        boundary = xp.zeros_like(starts) if discount is None else shifted(xp, discount == 0) & ~starts
        if discount is not None and flags.first is None:
            _check_one_episode(flags, discount == 0, starts)
    padding = follow_ends(xp, boundary, starts)
    if is_told and flags.first is None:
        if len(flags.shape) > 1 and not flags.is_masked and any_true(padding):
            raise StructureError(
                "windows have rows after a boundary step, and no flag shows whether they are padding or another "
                "episode. The steps lack `is_first` or `step_type`, or the batch a mask (`mask=True` of the observer)."
            )
        if len(flags.shape) == 1 or flags.is_masked:
            padding = xp.zeros_like(padding)
    real = flags.real & ~padding
    valid = real[..., :-1] & real[..., 1:] & ~boundary[..., :-1] & ~starts[..., 1:]
    terminal = xp.zeros_like(valid) if flags.terminal is None else flags.terminal[..., 1:]
    if "step_type" in fields and "next_step_type" in fields:
        types, following = (as_array(xp, fields[name]).reshape(flags.shape) for name in ("step_type", "next_step_type"))
        valid = valid & (following[..., :-1] == types[..., 1:])
    idle = _idle(flags, fields)
    return valid if idle is None else valid & (terminal | ~idle[..., :-1]), terminal


def _check_one_episode(flags: StepFlags, is_zero: Array, starts: Array) -> None:
    """Refuse rows that show two episodes: after an end, which has discount 0, all discounts must be 0."""
    follows = follow_ends(flags.xp, is_zero, starts) & ~is_zero & flags.real
    if any_true(follows):
        raise StructureError(
            f"`discount` is the only flag, and {int(follows.sum())} rows with another discount follow a discount of 0 "
            "in the same window, so the start of the next episode is unknown. Write `is_first` and `is_last`, or "
            "`step_type`; or windows of one episode each, whose boundary step has discount 0."
        )


def _idle(flags: StepFlags, fields: Mapping[str, Any]) -> Array | None:
    """Return the rows whose action, reward and discount are all 0; None if the steps lack the fields or flags for that.

    If no terminal state follows, the row is the last row of an `Episode` chunk that was cut: it holds an observation,
    no action, and no flag, because the episode continues. Padding after it consists of such rows.
    """
    reward, discount = (as_rows(fields.get(name), flags.like) for name in ("reward", "discount"))
    if flags.terminal is None or reward is None or discount is None:
        return None
    idle = (reward == 0) & (discount == 0)
    for leaf in tree.flatten(fields["action"]):
        is_zero = (leaf == 0).reshape((*flags.shape, -1))
        idle = idle & flags.xp.all(is_zero, axis=-1)
    return idle


def leaf_at(nest: Any, path: str) -> Any:
    """Return the part of a nest with this name, such as `observation/rgb`."""
    found = nest
    for name in path.split("/"):
        fields = fields_of(found) or {}
        if name not in fields:
            raise StructureError(f"no leaf `{path}`: there are {join_paths(named_leaves(nest, 'the nest')[0])}.")
        found = fields[name]
    return found
