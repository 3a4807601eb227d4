"""Returns, advantages and targets. One backward recursion computes most results: x_t = a_t + b_t x_{t+1}.

    function            a_t                                 b_t                    x is
    ------------------  ----------------------------------  ---------------------  -------------------------------------
    discounted_returns  r_t                                 gamma d_t              the return
    lambda_returns      r_t + gamma d_t (1 - lambda_) v'_t  gamma d_t lambda_      the lambda-return, target of TD
    gae                 r_t + gamma d_t v'_t - v_t          gamma d_t lambda_      the advantage; x + v: lambda-return
    vtrace              rho_t (r_t + gamma d_t v'_t - v_t)  gamma d_t lambda_ c_t  the correction of v

v_t is the value of the observation of row t, and v'_t the value of the observation after its action. d_t is 0 if the
action terminated the episode. A run of rows ends where the episode ended or was truncated, or where the rows are cut.
There v'_t replaces x_{t+1} in the first two functions, and 0 replaces it in the other two.

The first argument is a batch, `Transitions`, or rewards:

    advantages, returns = gae(batch, "extras/value", gamma=0.99, lambda_=0.95)             # with a leaf of values
    advantages, returns = gae(rw.to_transitions(batch), values, gamma=0.99, lambda_=0.95)  # values of all rows, [B, T]
    advantages, returns = gae(rewards, values, gamma=0.99, lambda_=0.95)                   # [B, T], [B, T + 1]

Arrays are batch-major: [B, T, ...]. With `time_axis=0` they are [T, ...] or [T, B, ...]. `Transitions` of slices are
[N - 1, ...]; their values are [N]. Where `Transitions.mask` is False, results are 0.

Args:
    rewards: [B, T, ...] with T >= 1, or `Transitions`, or a `Batch` or its data, which `rw.to_transitions` converts. A
        batch only needs the reward and the kinds.
    values: [B, T + 1, ...], the values of the observations of all rows and of the observation after the last row. With
        `next_values`: [B, T, ...]. With a batch it may be the name of a leaf, such as "extras/value", which must
        include the values of final observations; rows [B, T] give results [B, T - 1].
    gamma: the agent's discount, a number in [0, 1].
    lambda_: a number in [0, 1].
    discounts: [B, T, ...] or None, d_t: 0, or False, where the action of the row terminated the episode, otherwise
        usually 1. Not with `Transitions`, which have it.
    continues: [B, T, ...] or None, flags: False where the next row is not the next step of the same episode, because
        the episode ended or the rows are cut. None if all rows are one run. Needs `next_values`. Not with
        `Transitions`, which have it.
    next_values: [B, T, ...] or None, v'_t of all rows. None to take the values of the next rows from `values`.
    time_axis: the axis of time in all arrays: 1, or 0.

No argument takes flags of ends. Some programs write `terminated` on a boundary row, others on the row of the action,
and an array does not show which row it is. `to_transitions` knows it from the kinds of rows; docs/explanation/steps.md
draws them. These functions take no boundary rows: without `next_values`, `values` must have one row more than the
rewards.

If the final observations are unknown, pass the values of the last observations as their `next_values`. This is the
approximation V(s_t) of legged-robot training, which writes `rewards += gamma * values * time_outs`.

Arrays by row may lack trailing axes of the rewards, or have size 1 there: discounts [B, T] and [B, T, 1] both suit
rewards [B, T, R]. All functions raise SpecError if a number is out of range or arguments contradict each other, and
StructureError if shapes do not match or arrays come from different libraries.

Arguments are not changed. Results are new arrays in the shape and dtype of the rewards (float64 for integers), or in
the dtype of the values if it is wider. All functions are pure, so any thread may call them. They take NumPy arrays and,
with array-api-compat, arrays of any library that it supports, such as PyTorch, on any device and with gradients.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from reverb_writer.arguments import check_fraction, integer
from reverb_writer.arrays import Array, array_namespace, as_array, as_bool, as_float, with_axes
from reverb_writer.errors import SpecError, StructureError
from reverb_writer.keywords import takes
from reverb_writer.transitions.records import Transitions
from reverb_writer.transitions.recursion import ReturnInputs, RowKeywords

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "Advantages",
    "VTrace",
    "discounted_returns",
    "gae",
    "lambda_returns",
    "n_step_returns",
    "normalize",
    "sequence_priorities",
    "vtrace",
]


class Advantages(NamedTuple):
    """The result of `gae`: `advantages` and `returns`, both in the shape of the rewards, [B, T, ...]."""

    advantages: Array
    returns: Array


class VTrace(NamedTuple):
    """The result of `vtrace`: `values` and `advantages`, both in the shape of the rewards, [B, T, ...]."""

    values: Array
    advantages: Array


@takes(ReturnInputs, __doc__)
def discounted_returns(
    rewards: Array | Transitions, values: Array = None, *, gamma: float, **rows: Unpack[RowKeywords]
) -> Array:
    """Return the discounted sum of the rewards from each row on: G_t = r_t + gamma d_t G_{t+1}.

    Only the values at the ends of runs matter. With None, the value after each run is 0, even if the episode continues.

    Args:
        **rows: the arguments that all functions share. Errors are those of `rw.returns`.

    >>> discounted_returns([[1.0, 1.0, 1.0]], [[0.0, 0.0, 0.0, 4.0]], gamma=0.5).tolist()
    [[2.25, 2.5, 3.0]]
    >>> discounted_returns([[1.0, 1.0, 1.0]], gamma=0.5, discounts=[[1, 0, 1]]).tolist()
    [[1.5, 1.0, 1.0]]
    """
    inputs = ReturnInputs(rewards, values, gamma, **rows)
    return inputs.result(inputs.scan_backwards(*inputs.lambda_return_terms(1.0)))


@takes(ReturnInputs, __doc__)
def lambda_returns(
    rewards: Array | Transitions, values: Array, *, gamma: float, lambda_: float, **rows: Unpack[RowKeywords]
) -> Array:
    """Return the mean of the n-step returns of all n, weighted by (1 - lambda) lambda^(n-1): the TD(lambda) target.

    `lambda_` is 0 for one-step targets, 1 for discounted returns.

    Args:
        **rows: the arguments that all functions share. Errors are those of `rw.returns`.

    >>> lambda_returns([[1.0, 1.0]], [[2.0, 2.0, 4.0]], gamma=0.5, lambda_=0.5).tolist()
    [[2.25, 3.0]]
    """
    lambda_ = check_fraction("lambda_", lambda_)
    inputs = ReturnInputs(rewards, values, gamma, **rows)
    return inputs.result(inputs.scan_backwards(*inputs.lambda_return_terms(lambda_)))


@takes(ReturnInputs, __doc__)
def n_step_returns(
    rewards: Array | Transitions, values: Array, n: int, *, gamma: float, **rows: Unpack[RowKeywords]
) -> Array:
    """Return, for each row, the discounted sum of the next n rewards and of the value after them.

    Where a run of rows ends earlier, the sum has fewer rewards, and the value after that end.

    Work: O(T min(n, T)).

    Args:
        n: number of rewards in a sum, >= 1.
        **rows: the arguments that all functions share. Errors are those of `rw.returns`.

    >>> n_step_returns([[1.0, 1.0, 1.0]], [[8.0, 8.0, 8.0, 4.0]], 2, gamma=0.5).tolist()
    [[3.5, 2.5, 3.0]]
    """
    n = integer("n", n, minimum=1)
    inputs = ReturnInputs(rewards, values, gamma, **rows)
    returns = inputs.rewards + inputs.discounts * inputs.next_values
    for _ in range(min(n, len(inputs.rewards)) - 1):
        returns = inputs.rewards + inputs.discounts * inputs.following(returns)
    return inputs.result(returns)


@takes(ReturnInputs, __doc__)
def gae(
    rewards: Array | Transitions, values: Array, *, gamma: float, lambda_: float, **rows: Unpack[RowKeywords]
) -> Advantages:
    """Estimate advantages: A_t = delta_t + gamma lambda d_t A_{t+1} with delta_t = r_t + gamma d_t v'_t - v_t.

    Args:
        **rows: the arguments that all functions share. Errors are those of `rw.returns`.

    Returns:
        `advantages`, not normalized, and `returns` (advantages + values), the targets of the values.

    Source: Schulman et al., High-dimensional continuous control using generalized advantage estimation, 2016, (16).

    >>> rewards, values = [[1.0, 1.0, 1.0]], [[0.5, 0.5, 0.5, 2.0]]
    >>> advantages, returns = gae(rewards, values, gamma=0.9, lambda_=0.8, discounts=[[1, 0, 1]])
    >>> advantages.round(4).tolist(), returns.round(4).tolist()
    ([[1.31, 0.5, 2.3]], [[1.81, 1.0, 2.8]])
    """
    lambda_ = check_fraction("lambda_", lambda_)
    inputs = ReturnInputs(rewards, values, gamma, **rows)
    advantages = inputs.scan_backwards(inputs.td_errors, inputs.zero_at_ends(inputs.discounts * lambda_))
    return Advantages(inputs.result(advantages), inputs.result(advantages + inputs.values))


@takes(ReturnInputs, __doc__)
def vtrace(
    rewards: Array | Transitions,
    values: Array,
    ratios: Array,
    *,
    gamma: float,
    lambda_: float = 1.0,
    max_rho: float = 1.0,
    max_c: float = 1.0,
    **rows: Unpack[RowKeywords],
) -> VTrace:
    """Correct values and advantages for actions that an older policy chose.

    The values belong to the policy that learns.

    Args:
        ratios: [B, T, ...], > 0: the probability of each action under the policy that learns, divided by its
            probability under the policy that acted.
        max_rho: upper bound of the ratios rho_t that weigh the TD errors and the advantages, > 0, may be infinite.
        max_c: upper bound of the ratios c_t that weigh the trace, > 0, may be infinite.
            A bound <= 0 raises SpecError.
        **rows: the arguments that all functions share. Errors are those of `rw.returns`.

    Returns:
        `values`, the targets of the values, and `advantages` for the policy gradient:
        rho_t (r_t + gamma d_t target_{t+1} - v_t).

    Source: Espeholt et al., IMPALA, 2018, section 4.1.

    >>> targets, advantages = vtrace([[1.0, 1.0]], [[2.0, 2.0, 4.0]], [[0.5, 3.0]], gamma=0.5)
    >>> targets.tolist(), advantages.tolist()
    ([[2.25, 3.0]], [[0.25, 1.0]])
    """
    lambda_ = check_fraction("lambda_", lambda_)
    inputs = ReturnInputs(rewards, values, gamma, **rows)
    ratios = inputs.masked(inputs.broadcast_like("ratios", ratios))
    xp, bounds = inputs.xp, {"max_rho": max_rho, "max_c": max_c}
    for name, bound in bounds.items():
        if not bound > 0:
            raise SpecError(f"`{name}` must be > 0, got {bound!r}.")
    rho, c = (xp.where(ratios > bound, xp.full_like(ratios, bound), ratios) for bound in bounds.values())
    corrections = inputs.scan_backwards(rho * inputs.td_errors, inputs.zero_at_ends(inputs.discounts * lambda_) * c)
    targets = inputs.values + corrections
    advantages = rho * (inputs.rewards + inputs.discounts * inputs.following(targets) - inputs.values)
    return VTrace(inputs.result(targets), inputs.result(advantages))


def normalize(x: Array, mask: Array | Transitions = None, *, epsilon: float = 1e-8) -> Array:
    """Return x shifted to mean 0 and scaled to standard deviation 1 (unbiased); a single element becomes 0.

    Args:
        x: [...], any shape with at least one element, usually advantages. All elements are normalized together.
        mask: flags [...] of the elements that count, with trailing axes left out or of size 1, or `Transitions`, whose
            mask is used; the other elements become 0. None if all count.
        epsilon: added to the standard deviation.

    Raises:
        StructureError: `x` has no elements, or the mask has another shape.

    >>> normalize([1.0, 2.0, 3.0]).round(4).tolist()
    [-1.0, 0.0, 1.0]
    """
    mask = mask.mask if isinstance(mask, Transitions) else mask
    xp = array_namespace(x, mask)
    x = as_float(xp, x)
    if not math.prod(x.shape):
        raise StructureError(f"`x` must have elements to be normalized, got shape {tuple(x.shape)}.")
    counted = xp.ones_like(x) != 0 if mask is None else with_axes(as_bool(xp, as_array(xp, mask)), x.ndim)
    if counted.ndim != x.ndim or any(a not in (1, b) for a, b in zip(counted.shape, x.shape, strict=True)):
        raise StructureError(f"`mask` must have the shape of `x`, {tuple(x.shape)}, got {tuple(counted.shape)}.")
    zero = xp.zeros_like(x)
    counted = xp.broadcast_to(counted, x.shape)
    size = xp.sum(xp.where(counted, xp.ones_like(x), zero))
    one = xp.ones_like(size)
    mean = xp.sum(xp.where(counted, x, zero)) / xp.where(size > 0, size, one)
    centred = xp.where(counted, x - mean, zero)
    return centred / (xp.sqrt(xp.sum(centred * centred) / xp.where(size > 1, size - 1, one)) + epsilon)


def sequence_priorities(td_errors: Array, mask: Array | Transitions = None, *, max_weight: float = 0.9) -> Array:
    """Return the priority of each sequence: w max|e| + (1 - w) mean|e| of its TD errors e.

    Args:
        td_errors: [B, T].
        mask: an array [B, T], True or not 0 for the steps that count; or `Transitions`, whose mask is used; or None if
            all count. A sequence in which no step counts has priority 0.
        max_weight: w in [0, 1].

    Returns:
        [B], one per sequence.

    Raises:
        SpecError: `max_weight` is out of range.
        StructureError: `td_errors` has no steps, or the mask has another shape.

    Source: Kapturowski et al., R2D2, 2019, section 2.3; Reverb's `td_error` priorities.

    >>> sequence_priorities([[1.0, -3.0], [0.0, 5.0]], max_weight=0.5).tolist()
    [2.5, 3.75]
    """
    max_weight = check_fraction("max_weight", max_weight)
    mask = mask.mask if isinstance(mask, Transitions) else mask
    xp = array_namespace(td_errors, mask)
    errors = xp.abs(as_array(xp, td_errors) * 1.0)
    shape = tuple(errors.shape)
    if errors.ndim <= 1 or not shape[1]:
        raise StructureError(f"`td_errors` must be [B, T, ...] with T >= 1, got shape {shape}.")
    counted = xp.ones_like(errors) != 0 if mask is None else as_bool(xp, mask)
    if tuple(counted.shape) != shape:
        raise StructureError(f"`mask` must have the shape of `td_errors`, {shape}, got {tuple(counted.shape)}.")
    errors = xp.where(counted, errors, xp.zeros_like(errors))
    count = xp.sum(xp.where(counted, xp.ones_like(errors), xp.zeros_like(errors)), axis=1)
    mean = xp.sum(errors, axis=1) / xp.where(count == 0, xp.ones_like(count), count)
    return max_weight * xp.max(errors, axis=1) + (1 - max_weight) * mean
