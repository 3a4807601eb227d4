"""The checked inputs of a return, the backward recursion over them, and the library of the arrays."""

from __future__ import annotations

import importlib
from types import NoneType
from typing import Any

import numpy as np

from reverb_writer.arguments import check_fraction
from reverb_writer.errors import SpecError, StructureError
from reverb_writer.extras import needs

__all__ = ["Array", "ReturnInputs", "array_namespace", "as_array", "as_float", "next_rows"]

Array = Any
"""An array of NumPy, or of another library that array-api-compat knows."""


class ReturnInputs:
    """Rewards, values and ends of episodes, checked and broadcast to one shape; see the package's docstring.

    Attributes:
        xp: the library of the arrays.
        rewards: [T, ...].
        gamma: a number, or [T, ...] in the rewards' shape.
        values: [T, ...], 0 if there are none.
        last_value: [...], the value of what follows the last row.
        end_values: 0, or [T, ...]: the value of what follows where an episode ends, 0 elsewhere.
    """

    def __init__(
        self,
        rewards: Array,
        values: Array,
        last_value: Array,
        gamma: Array,
        terminated: Array,
        truncated: Array,
        final_values: Array,
    ) -> None:
        """Check all arguments.

        Raises:
            SpecError: `gamma` out of range, or `truncated` without `final_values`.
            StructureError: the shapes do not match, the arrays are of different libraries, or `terminated` is set one
                row after those where the discounts are 0.
        """
        if truncated is not None and final_values is None:
            raise SpecError(
                "`truncated` needs `final_values`, the values of the final observations. Pass those, or "
                "`final_values=values` to approximate them by the values of the last observations in the rows."
            )
        self.xp = array_namespace(rewards, values, last_value, gamma, terminated, truncated, final_values)
        self.rewards = as_float(self.xp, rewards)
        if self.rewards.ndim == 0 or not self.rewards.shape[0]:
            raise StructureError(f"`rewards` must be [T, ...] with T >= 1, got shape {tuple(self.rewards.shape)}.")
        self.values = self.xp.zeros_like(self.rewards) if values is None else self.broadcast_like("values", values)
        self.last_value = self.broadcast_like("last_value", last_value, self.rewards[0, ...])
        self.gamma = (
            check_fraction("gamma", gamma) if isinstance(gamma, int | float) else self.broadcast_like("gamma", gamma)
        )
        ended = None if terminated is None else self._flags("terminated", terminated)
        if ended is not None and not isinstance(self.gamma, float):
            self._check_not_on_boundary_steps(ended)
        self.end_values: Array = 0.0
        self._ended = ended
        if truncated is not None:
            cut = self._flags("truncated", truncated)
            self._ended = cut if ended is None else cut | ended
            is_cut = cut if ended is None else cut & ~ended
            self.end_values = self.xp.where(is_cut, self.broadcast_like("final_values", final_values), 0.0)

    @property
    def next_values(self) -> Array:
        """[T, ...] v'_t, the value of what follows each row; see the table in the package's docstring."""
        return self.following(self.values)

    @property
    def td_errors(self) -> Array:
        """[T, ...] delta_t = r_t + gamma v'_t - v_t."""
        return self.rewards + self.gamma * self.next_values - self.values

    def following(self, x: Array) -> Array:
        """Return the value of what follows each row, if x [T, ...] are the values of the rows."""
        following = next_rows(self.xp, x, self.last_value)
        return following if self._ended is None else self.xp.where(self._ended, self.end_values, following)

    def zero_at_ends(self, x: Array) -> Array:
        """Return x, a number or [T, ...], as [T, ...] with 0 where an episode ends."""
        x = self.xp.full_like(self.rewards, x) if isinstance(x, float) else x
        return x if self._ended is None else self.xp.where(self._ended, 0.0, x)

    def clip_above(self, name: str, x: Array, bound: float) -> Array:
        """Return x with `bound` in place of what is greater."""
        if not bound > 0:
            raise SpecError(f"`{name}` must be > 0, got {bound!r}.")
        return self.xp.where(x > bound, self.xp.full_like(x, bound), x)

    def scan_backwards(self, start: Array, weight: Array, last: Array) -> Array:
        """Return x with x_t = start_t + weight_t x_{t+1} and x_T = last."""
        rows = []
        for t in reversed(range(start.shape[0])):
            last = start[t, ...] + weight[t, ...] * last
            rows.append(last)
        return self.xp.stack(rows[::-1])

    def _check_not_on_boundary_steps(self, ended: Array) -> None:
        """Refuse flags that are set one row after a discount of 0, unless discounts are also 0 in other places."""
        is_zero = (self.gamma == 0) & ~ended
        before = next_rows(self.xp, ended, ended[0, ...] & ~ended[0, ...])
        try:
            num_late, is_elsewhere = int((is_zero & before).sum()), bool((is_zero & ~before).any())
        except TypeError:  # JAX traces the function: there are no numbers yet
            return
        if num_late and not is_elsewhere:
            raise StructureError(
                f"`terminated` is set on {num_late} rows that follow a row with a discount of 0: on boundary steps, "
                "which only hold the final observation. It belongs on the row of the action that ended the episode, "
                "one row before. Move each flag up by a row, `np.append(terminated[1:], False)`, within its episode. "
                "Leave boundary steps out of the training data; docs/contiguous.md shows how."
            )

    def _flags(self, name: str, x: Array) -> Array:
        flags = self.broadcast_like(name, x)
        return flags if flags.dtype == (np.bool_ if self.xp is np else self.xp.bool) else flags != 0

    def broadcast_like(self, name: str, x: Array, like: Array = None) -> Array:
        """Return x in the shape of the rewards, or of `like`; trailing axes that x lacks are added."""
        is_row, like = like is not None, self.rewards if like is None else like
        if isinstance(x, int | float):
            return self.xp.full_like(like, x)
        x = as_array(self.xp, x)
        sizes = (*x.shape, *(1,) * (like.ndim - x.ndim))
        fits = len(sizes) == like.ndim and all(a in (1, b) for a, b in zip(sizes, like.shape, strict=True))
        if not fits or not (is_row or x.ndim == 0 or sizes[0] == like.shape[0]):
            raise StructureError(
                f"`{name}`: shape {tuple(x.shape)} does not match rewards {tuple(self.rewards.shape)}: expected "
                f"{tuple(like.shape)}, or that shape with trailing axes left out or of size 1."
            )
        return self.xp.broadcast_to(x.reshape(sizes), like.shape)


def next_rows(xp: Any, x: Array, last: Array) -> Array:
    """Return in each row the next row of x, and `last` in the last one."""
    concat = xp.concatenate if xp is np else xp.concat  # NumPy 1.26 has no `concat`
    return concat([x[1:, ...], last[None, ...]])


def as_array(xp: Any, x: Any) -> Array:
    """Return an array as it is, and a list as an array."""
    return x if hasattr(x, "ndim") else xp.asarray(x)  # `torch.asarray` would cut off the gradients of a tensor


def as_float(xp: Any, x: Any) -> Array:
    """Return an array of a floating dtype: the same array if it has one already."""
    x = as_array(xp, x)
    return x if xp.result_type(x.dtype, xp.float32) == x.dtype else x * 1.0


def array_namespace(*arrays: Any) -> Any:
    """Return the library of the arrays: NumPy, unless one of them is of another library."""
    own = (np.ndarray, np.generic, int, float, list, tuple, type(None))
    if all(isinstance(array, own) for array in arrays):
        return np
    kinds = ", ".join(sorted({type(array).__name__ for array in arrays if not isinstance(array, own)}))
    with needs(f"Arrays of other libraries than NumPy ({kinds})", "reverb-writer[arrays]"):
        compat = importlib.import_module("array_api_compat")
    try:
        return compat.array_namespace(*(array for array in arrays if not isinstance(array, int | float | NoneType)))
    except TypeError as error:
        raise StructureError(f"all arrays must be of one library: {error}") from None
