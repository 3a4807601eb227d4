"""Find the first and last rows of episodes, and the reason of their ends, in every layout that this package writes.

    layout                      first row           boundary step            terminated
    --------------------------  ------------------  -----------------------  ---------------------------------------
    `record`, `Episode.steps`   is_first            is_last                  terminated, on the boundary step
    RLDS                        is_first            is_last                  is_terminal, on the boundary step
    TF-Agents                   step_type == FIRST  step_type == LAST        discount == 0, on the row before
    Gymnasium's flags alone     -                   terminated or truncated  terminated, on the boundary step
    `discount` alone            -                   -                        discount == 0, on the row before

Steps may have several of these layouts. `discount` is always on the row of the action.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tree

from reverb_writer.arrays import Array, any_true, array_like, array_namespace, as_array, as_bool, concatenated
from reverb_writer.errors import DOCS, StructureError
from reverb_writer.nests import fields_of, join_paths
from reverb_writer.steps import FIRST, FLAG_NAMES, LAST, find_flags

_ADVICE = f"{DOCS}/explanation/steps.html draws which row has which flag."


@dataclass(frozen=True)
class StepFlags:
    """Flags of rows, each [B, T] or [N], or None if the steps lack it."""

    xp: Any  # the library of the arrays
    shape: tuple[int, ...]  # (B, T), or (N,)
    like: Array  # any array of flags, for its shape and device
    real: Array  # the row is not padding, according to the masks
    is_masked: bool  # whether a mask exists
    first: Array | None  # the first row of its episode
    boundary: Array | None  # the row holds the final observation of an episode, and no action
    terminal: Array | None  # the state of the row is terminal

    @classmethod
    def read(cls, fields: Mapping[str, Any], masks: Sequence[Any]) -> StepFlags:
        """Find the flags among the fields of steps by name; masks have the shape of the flags, False for padding."""
        given = find_flags(fields)
        discount = fields.get("discount")
        told_by = given or ({} if discount is None or tree.is_nested(discount) else {"discount": discount})
        if not told_by:
            raise StructureError(
                f"the steps have no flags, only {', '.join(map(repr, fields))}. They need `discount`, or `is_last` or "
                f"`step_type` beside `terminated`, `is_terminal` or `discount`. {_ADVICE}"
            )
        xp = array_namespace(*told_by.values())
        shape = _shape({kind: as_array(xp, flag) for kind, flag in told_by.items()})
        like = as_bool(xp, next(iter(told_by.values()))).reshape(shape)
        real = xp.ones_like(like)
        for mask in masks:
            shaped = as_bool(xp, array_like(xp, mask, like))
            if tuple(shaped.shape) != shape:
                raise StructureError(f"a mask has shape {tuple(shaped.shape)}, expected {shape} as the flags.")
            real = real & shaped
        flags = with_types({kind: as_array(xp, flag).reshape(shape) for kind, flag in given.items()})
        first, boundary, terminal, truncated = (
            None if kind not in flags else as_bool(xp, flags[kind])
            for kind in ("first", "last", "terminated", "truncated")
        )
        missing = []
        if terminal is None and discount is None:
            missing.append("`discount`, `terminated` or `is_terminal`, which show how an episode ended")
        if boundary is None and terminal is not None and truncated is None:
            missing.append("`is_last`, `step_type` or `truncated`, which show where an episode ended")
        if missing:
            found = [name for names in FLAG_NAMES.values() for name in names if fields.get(name) is not None]
            raise StructureError(f"the steps lack {'; and '.join(missing)}. Flags: {join_paths(found)}. {_ADVICE}")
        if terminal is not None and boundary is not None:
            _check_only(terminal, boundary, real)
        elif terminal is not None:
            boundary = terminal | truncated
            _check_rows(fields, boundary, terminal, real)
        if "last" in flags:
            _warn_of_rewards(fields, boundary & real)
        return cls(xp, shape, like, real, bool(masks), first, boundary, terminal)


def with_types(flags: Mapping[str, Array]) -> dict[str, Array]:
    """Return flags by kind; if the steps lack `first` or `last`, take them from `step_type`."""
    others = {kind: flag for kind, flag in flags.items() if kind != "step_type"}
    types = flags.get("step_type")
    return others if types is None else {"first": types == FIRST, "last": types == LAST, **others}


def split_mask(data: Any) -> tuple[Any, Any]:
    """Return steps and their mask, or None. An observer with `mask=True` writes a pair (steps, mask).

    >>> import numpy as np
    >>> split_mask(({"reward": [1.0, 0.0]}, np.array([True, False])))
    ({'reward': [1.0, 0.0]}, array([ True, False]))
    >>> pairs = [({"a": 1}, {"b": True}), ({"a": 1}, np.zeros(1)), (np.ones(1), np.array([True]))]
    >>> [split_mask(pair)[1] for pair in pairs]  # pairs of other things
    [None, None, None]
    """
    if type(data) is tuple and len(data) == 2:  # noqa: PLR2004  # a pair
        steps, mask = data
        if (
            fields_of(steps) is not None
            and not tree.is_nested(mask)
            and str(getattr(mask, "dtype", "bool")).endswith("bool")
        ):
            return steps, mask
    return data, None


def _shape(flags: Mapping[str, Array]) -> tuple[int, ...]:
    """Return the shape of the rows: the shape of the flag with the fewest axes, without a last axis of size 1."""
    shapes = {name: tuple(flag.shape) for name, flag in flags.items()}
    shape = min(shapes.values(), key=len)
    if any(sizes not in (shape, (*shape, 1)) for sizes in shapes.values()) or len(shape) not in (1, 2):
        raise StructureError(f"flags must all be [B, T], or [N] for slices, got shapes {shapes}.")
    return shape


def _check_only(terminal: Array, boundary: Array, real: Array) -> None:
    """Refuse flags of termination on rows that are not boundary steps."""
    wrong = terminal & ~boundary & real
    if any_true(wrong):
        raise StructureError(
            f"`terminated` or `is_terminal` is set on {int(wrong.sum())} rows that are no boundary steps (`is_last`, "
            "`step_type`). It belongs on the boundary step, which holds the final observation: one row after the "
            f"action that ended the episode. {_ADVICE}"
        )


def _check_rows(fields: Mapping[str, Any], ends: Array, terminal: Array, real: Array) -> None:
    """Refuse flags of ends on the row of an action, which its reward or its discount shows."""
    reward, discount = (as_rows(fields.get(name), ends) for name in ("reward", "discount"))
    beside = ends & ~ends if reward is None else ends & (reward != 0)
    if discount is not None and ends.ndim > 1:
        ended_here = terminal[:, 1:] & (discount[:, 1:] == 0) & (discount[:, :-1] != 0)
        beside = beside if not any_true(ended_here) else beside | terminal
    beside = beside & real
    if any_true(beside):
        raise StructureError(
            f"`terminated` or `truncated` is set on {int(beside.sum())} rows of actions: these rows have a reward, "
            "or the 0 of `discount`. The flag belongs on the boundary step, one row later, which holds the final "
            "observation. Write boundary steps, as `rw.environments.record` does; or pass arrays to `rw.returns`, "
            f"with `discounts` and `continues`. {_ADVICE}"
        )


def _warn_of_rewards(fields: Mapping[str, Any], boundary: Array) -> None:
    """Warn of rewards on boundary steps, because they are in no transition."""
    reward = as_rows(fields.get("reward"), boundary)
    if reward is not None and any_true(boundary & (reward != 0)):
        warnings.warn(
            "boundary steps (`is_last`, `step_type`) have a reward, which is in no transition. A reward belongs beside "
            f"its action; the boundary step is one row later, and holds the final observation. {_ADVICE}",
            stacklevel=2,
        )


def as_rows(x: Any, like: Array) -> Array | None:
    """Return x in the shape of flags, without a last axis of size 1; None if it has another shape."""
    if not hasattr(x, "ndim") or tuple(x.shape) not in (tuple(like.shape), (*like.shape, 1)):
        return None
    return x.reshape(tuple(like.shape))


def shifted(xp: Any, x: Array) -> Array:
    """Return the previous row in place of each row, and zeros in the first row."""
    return concatenated(xp, [xp.zeros_like(x[..., :1]), x[..., :-1]], -1)


def follow_ends(xp: Any, boundary: Array, starts: Array) -> Array:
    """Return the rows after a boundary step, up to the next start of an episode."""
    size = boundary.shape[-1]
    number = array_like(xp, 2 * np.arange(size), boundary)
    latest = xp.where(boundary, number + 1, xp.where(starts, number, xp.zeros_like(number)))
    distance = 1
    while distance < size:  # the largest number so far is odd after a boundary step
        before = concatenated(xp, [xp.zeros_like(latest[..., :distance]), latest[..., :-distance]], -1)
        latest, distance = xp.maximum(latest, before), 2 * distance
    return (shifted(xp, latest) % 2 == 1) & ~starts
