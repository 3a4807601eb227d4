"""The checked inputs of a return, and the backward recursion over them."""

from __future__ import annotations

from typing import Any, TypedDict

from reverb_writer.arguments import check_fraction
from reverb_writer.arrays import (
    Array,
    array_namespace,
    as_array,
    as_bool,
    as_float,
    concatenated,
    is_bool,
    is_float,
    with_axes,
)
from reverb_writer.errors import SpecError, StructureError
from reverb_writer.transitions.batch_values import is_batch, with_values
from reverb_writer.transitions.records import NStepTransitions, Transitions, check_one_target


class RowKeywords(TypedDict, total=False):
    """Keyword arguments that all functions of `rw.returns` take; its docstring describes them."""

    discounts: Array
    continues: Array
    next_values: Array
    time_axis: int


class ReturnInputs:
    """Checked rewards, values and discounts, with time as the first axis; see the docstring of `rw.returns`.

    Attributes:
        xp: the library of the arrays.
        rewards: [T, ...], 0 on rows without a transition.
        discounts: [T, ...], gamma times the discounts of the environment. Only gamma if these are None or flags;
            `continues` then includes the flags.
        continues: [T, ...] bool, False in the last row; None if all other rows continue.
        values: [T, ...], 0 without values.
        next_values: [T, ...] v'_t, the value after each row.
    """

    def __init__(
        self,
        rewards: Any,
        values: Array | str,
        gamma: float,
        *,
        discounts: Array = None,
        continues: Array = None,
        next_values: Array = None,
        time_axis: int = 1,
    ) -> None:
        """Check all arguments; errors as in `rw.returns`."""
        if time_axis not in (0, 1):
            raise SpecError(f"`time_axis` must be 1 for [B, T, ...] or 0 for [T, ...], got {time_axis!r}.")
        self._axis = int(time_axis)
        gamma = check_fraction("gamma", gamma)
        if is_batch(rewards):
            rewards, values, after = with_values(rewards, values)
            next_values = after if next_values is None else next_values
        _check_goes_together(rewards, values, discounts, continues, next_values)
        mask = None
        if isinstance(rewards, Transitions):
            mask = rewards.mask
            self._axis = min(self._axis, mask.ndim - 1)  # slices are [N]
            rewards, discounts, continues = rewards.reward, rewards.discount, rewards.continues
        xp = self.xp = array_namespace(rewards, values, discounts, continues, next_values, mask)
        rewards = as_float(xp, rewards)
        if rewards.ndim <= self._axis or not rewards.shape[self._axis]:
            shape = ("[B, T, ...]", "[T, ...]")[1 - self._axis]
            raise StructureError(
                f"`rewards` must be {shape} with T >= 1, got shape {tuple(rewards.shape)}. Time is axis {self._axis}: "
                "`time_axis` is 1 by default, and 0 for [T, ...] or [T, B, ...]."
            )
        self.rewards = self._with_time_at(0, rewards)
        self._gamma = gamma
        self.discounts: Array = gamma
        self._is_followed = None
        runs = None if continues is None else self._flags("continues", continues)
        if discounts is not None:
            discounts = as_array(xp, discounts)
            self._is_followed = followed = self._flags("discounts", discounts)
            if is_bool(xp, discounts):  # flags need no multiplication: a run of rows ends at them
                runs = followed if runs is None else runs & followed
            else:
                discounts = discounts if is_float(xp, discounts) else xp.asarray(discounts, dtype=self.rewards.dtype)
                self.discounts = gamma * self.broadcast_like("discounts", discounts)
        self.continues = None
        if runs is not None:
            self.continues = concatenated(xp, [runs[:-1, ...], xp.zeros_like(runs[-1:, ...])], 0)
        self._mask = None if mask is None else self._flags("mask", mask)
        num_rows = self.rewards.shape[0]
        if values is None:
            self.values = xp.zeros_like(self.rewards)
            after = self.values if next_values is None else self.broadcast_like("next_values", next_values)
        elif next_values is None:
            rows = self.broadcast_like("values", values, num_rows + 1)
            self.values, after = rows[:-1, ...], rows[1:, ...]
        else:
            self.values = self.broadcast_like("values", values)
            after = self.broadcast_like("next_values", next_values)
        self.values, self.rewards = self.masked(self.values), self.masked(self.rewards)
        # A discount of 0 removes the next value, even if it is not finite.
        self.next_values = self._where_followed(self.masked(after))

    @property
    def td_errors(self) -> Array:
        """[T, ...] delta_t = r_t + gamma d_t v'_t - v_t."""
        return self.rewards + self.discounts * self.next_values - self.values

    def following(self, x: Array) -> Array:
        """Return x [T, ...] of the next row of the same run, or v'_t where the run ends."""
        after = concatenated(self.xp, [x[1:, ...], self.next_values[-1:, ...]], 0)
        if self.continues is None:
            return self._where_followed(after)
        return self.xp.where(self.continues, after, self.next_values)

    def zero_at_ends(self, x: Array) -> Array:
        """Return x, a number or [T, ...], as [T, ...] with 0 in the last row of each run."""
        x = self.xp.full_like(self.rewards, x) if isinstance(x, float) else x
        if self.continues is None:
            return concatenated(self.xp, [x[:-1, ...], self.xp.zeros_like(x[-1:, ...])], 0)
        return x * self.continues  # takes a third of the time of `where`

    def lambda_return_terms(self, lambda_: float) -> tuple[Array, Array]:
        """Return a_t and b_t of the lambda-return x_t = a_t + b_t x_{t+1}; lambda_ = 1 is the discounted return."""
        weight = self.zero_at_ends(self.discounts * lambda_)
        return self.rewards + (self.discounts - weight) * self.next_values, weight

    def scan_backwards(self, start: Array, weight: Array) -> Array:
        """Return x with x_t = start_t + weight_t x_{t+1}, where the last weight is 0."""
        rows, last = [start[-1, ...]], start[-1, ...]
        for t in reversed(range(start.shape[0] - 1)):
            last = start[t, ...] + weight[t, ...] * last
            rows.append(last)
        return self.xp.stack(rows[::-1])

    def result(self, x: Array) -> Array:
        """Return x with the axes of the arguments, and 0 on rows without a transition."""
        return self._with_time_at(self._axis, self.masked(x))

    def masked(self, x: Array) -> Array:
        """Return x with 0 on rows without a transition."""
        return x if self._mask is None else self.xp.where(self._mask, x, self.xp.zeros_like(x))

    def broadcast_like(self, name: str, x: Array, num_rows: int | None = None) -> Array:
        """Return x with time first, in the shape of the rewards except for the number of rows."""
        x = as_array(self.xp, x)
        if x.ndim > self._axis:
            x = self._with_time_at(0, x)
        sizes = (self.rewards.shape[0] if num_rows is None else num_rows, *self.rewards.shape[1:])
        shaped = with_axes(x, len(sizes))
        fits = shaped.ndim == len(sizes) and all(a in (1, b) for a, b in zip(shaped.shape, sizes, strict=True))
        if not fits or x.ndim <= self._axis or x.shape[0] != sizes[0]:
            hint = (
                " `values` belong to T + 1 observations, of each row and after the last row, or to T observations with "
                "`next_values`. Recorded steps are T + 1 rows, boundary step included: pass `rw.to_transitions(steps)` "
                "in place of their rewards."
                if name == "values"
                else ""
            )
            raise StructureError(
                f"`{name}`: shape {self._outside(x.shape)} does not match rewards {self._outside(self.rewards.shape)}: "
                f"expected {self._outside(sizes)}, or that shape with trailing axes left out or of size 1.{hint}"
            )
        return self.xp.broadcast_to(shaped, sizes)

    def _with_time_at(self, axis: int, x: Array) -> Array:
        """Return x with its axis of time moved to `axis`."""
        return self.xp.moveaxis(x, self._axis - axis, axis) if self._axis else x

    def _outside(self, shape: Any) -> tuple[int, ...]:
        """Return a shape with the axes of the arguments."""
        time, *others = shape or (0,)
        return (*others[: self._axis], time, *others[self._axis :]) if shape else ()

    def _flags(self, name: str, x: Array) -> Array:
        return as_bool(self.xp, self.broadcast_like(name, x))

    def _where_followed(self, x: Array) -> Array:
        """Return x with 0 where the discount is 0."""
        if not self._gamma:
            return self.xp.zeros_like(x)
        return x if self._is_followed is None else self.xp.where(self._is_followed, x, self.xp.zeros_like(x[:1, ...]))


def _check_goes_together(rewards: Any, values: Any, discounts: Any, continues: Any, next_values: Any) -> None:
    """Refuse arguments that contradict or lack each other."""
    if isinstance(values, str):
        raise SpecError(f"`values` is the name of a leaf, {values!r}, so the first argument must be a batch.")
    if isinstance(rewards, Transitions):
        if discounts is not None or continues is not None:
            raise SpecError("the transitions already have `discounts` and `continues`. Leave these arguments out.")
        if isinstance(rewards, NStepTransitions):
            raise StructureError(
                "transitions over n steps overlap, and have one target: `reward + gamma * discount * value` of their "
                "`next_observation`. Pass the result of `to_transitions` to `rw.returns`."
            )
        check_one_target(rewards)
    elif continues is not None and next_values is None:
        raise SpecError(
            "`continues` needs `next_values`, the values of the observations after the actions: where a run of rows "
            "ends, the next row does not have this value."
        )
