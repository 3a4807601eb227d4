"""Returns, advantages and targets of values, each by the backward recursion."""

from __future__ import annotations

import math
from typing import NamedTuple

from reverb_writer.errors import StructureError
from reverb_writer.returns.recursion import Array, Rows, array_namespace, as_float, fraction

__all__ = ["Advantages", "VTrace", "discounted_returns", "gae", "lambda_returns", "normalize", "vtrace"]


class Advantages(NamedTuple):
    """What `gae` returns; both [T, ...]."""

    advantages: Array
    returns: Array


class VTrace(NamedTuple):
    """What `vtrace` returns; both [T, ...]."""

    values: Array
    advantages: Array


def discounted_returns(
    rewards: Array,
    gamma: Array,
    last_value: Array = 0.0,
    *,
    terminated: Array = None,
    truncated: Array = None,
    final_values: Array = None,
) -> Array:
    """Sum up what follows each row, discounted: G_t = r_t + gamma G_{t+1}.

    Args:
        rewards: [T, ...], T >= 1.
        gamma: the discount, a number in [0, 1], or [T, ...] of discounts as dm_env has them.
        last_value: [...] or a number, what follows the last row.
        terminated: on the row of the action; see the package's docstring, as the other ends.
        truncated: as there.
        final_values: as there.

    Returns:
        [T, ...].

    Raises:
        SpecError: a number out of range, or `truncated` without `final_values`.
        StructureError: shapes do not go together, or arrays are of different libraries.

    >>> discounted_returns([1.0, 1.0, 1.0], 0.5, 4.0).tolist()
    [2.25, 2.5, 3.0]
    >>> discounted_returns([1.0, 1.0, 1.0], 0.5, 4.0, terminated=[0, 1, 0]).tolist()
    [1.5, 1.0, 3.0]
    """
    rows = Rows(rewards, None, last_value, gamma, terminated, truncated, final_values)
    return rows.scan(rows.rewards + rows.gamma * rows.end_values, rows.where_going_on(rows.gamma), rows.last)


def lambda_returns(
    rewards: Array,
    values: Array,
    last_value: Array,
    *,
    gamma: Array,
    lam: float,
    terminated: Array = None,
    truncated: Array = None,
    final_values: Array = None,
) -> Array:
    """Mix the n-step returns of all n, weighted by (1 - lam) lam^(n-1); also known as the target of TD(lambda).

    Args:
        rewards: [T, ...], T >= 1.
        values: [T, ...], of the observation in each row.
        last_value: [...], of the observation after the last row.
        gamma: the discount, a number in [0, 1], or [T, ...].
        lam: lam in [0, 1]; 0 for one-step targets, 1 for discounted returns.
        terminated: on the row of the action; see the package's docstring, as the other ends.
        truncated: as there.
        final_values: as there.

    Returns:
        [T, ...].

    Raises:
        SpecError: a number out of range, or `truncated` without `final_values`.
        StructureError: shapes do not go together, or arrays are of different libraries.

    >>> lambda_returns([1.0, 1.0], [2.0, 2.0], 4.0, gamma=0.5, lam=0.5).tolist()
    [2.25, 3.0]
    """
    lam = fraction("lam", lam)
    rows = Rows(rewards, values, last_value, gamma, terminated, truncated, final_values)
    weight = rows.where_going_on(rows.gamma * lam)
    return rows.scan(rows.rewards + (rows.gamma - weight) * rows.next_values, weight, rows.last)


def gae(
    rewards: Array,
    values: Array,
    last_value: Array,
    *,
    gamma: Array,
    lam: float,
    terminated: Array = None,
    truncated: Array = None,
    final_values: Array = None,
) -> Advantages:
    """Estimate advantages: A_t = delta_t + gamma lam A_{t+1} with delta_t = r_t + gamma v'_t - v_t.

    Args:
        rewards: [T, ...], T >= 1.
        values: [T, ...], of the observation in each row.
        last_value: [...], of the observation after the last row.
        gamma: the discount, a number in [0, 1], or [T, ...].
        lam: lam in [0, 1].
        terminated: on the row of the action; see the package's docstring, as the other ends.
        truncated: as there.
        final_values: as there.

    Returns:
        `advantages`, not normalized, and `returns`, which are advantages + values: the targets of the values.

    Raises:
        SpecError: a number out of range, or `truncated` without `final_values`.
        StructureError: shapes do not go together, or arrays are of different libraries.

    Source: Schulman et al., High-dimensional continuous control using generalized advantage estimation, 2016, (16).

    >>> rewards, values = [1.0, 1.0, 1.0], [0.5, 0.5, 0.5]
    >>> advantages, returns = gae(rewards, values, 2.0, gamma=0.9, lam=0.8, terminated=[0, 1, 0])
    >>> advantages.round(4).tolist(), returns.round(4).tolist()
    ([1.31, 0.5, 2.3], [1.81, 1.0, 2.8])
    """
    lam = fraction("lam", lam)
    rows = Rows(rewards, values, last_value, gamma, terminated, truncated, final_values)
    nothing = rows.xp.zeros_like(rows.last)
    advantages = rows.scan(rows.td_errors, rows.where_going_on(rows.gamma * lam), nothing)
    return Advantages(advantages, advantages + rows.values)


def vtrace(
    rewards: Array,
    values: Array,
    last_value: Array,
    ratios: Array,
    *,
    gamma: Array,
    lam: float = 1.0,
    max_rho: float = 1.0,
    max_c: float = 1.0,
    terminated: Array = None,
    truncated: Array = None,
    final_values: Array = None,
) -> VTrace:
    """Correct values and advantages for actions that an older policy chose.

    Args:
        rewards: [T, ...], T >= 1.
        values: [T, ...], of the observation in each row, by the policy that learns.
        last_value: [...], of the observation after the last row.
        ratios: [T, ...], probability of each action by the policy that learns over that by the one that acted; > 0.
        gamma: the discount, a number in [0, 1], or [T, ...].
        lam: lam in [0, 1].
        max_rho: upper bound of the ratios rho_t that weigh the errors and the advantages, > 0; may be infinite.
        max_c: upper bound of the ratios c_t that weigh the trace, > 0; may be infinite.
        terminated: on the row of the action; see the package's docstring, as the other ends.
        truncated: as there.
        final_values: as there.

    Returns:
        `values`, the targets of the values, and `advantages` for the policy gradient:
        rho_t (r_t + gamma target_{t+1} - v_t).

    Raises:
        SpecError: a number out of range, or `truncated` without `final_values`.
        StructureError: shapes do not go together, or arrays are of different libraries.

    Source: Espeholt et al., IMPALA, 2018, section 4.1.

    >>> targets, advantages = vtrace([1.0, 1.0], [2.0, 2.0], 4.0, [0.5, 3.0], gamma=0.5)
    >>> targets.tolist(), advantages.tolist()
    ([2.25, 3.0], [0.25, 1.0])
    """
    lam = fraction("lam", lam)
    rows = Rows(rewards, values, last_value, gamma, terminated, truncated, final_values)
    ratios = rows.fit("ratios", ratios)
    rho, c = rows.at_most("max_rho", ratios, max_rho), rows.at_most("max_c", ratios, max_c)
    nothing = rows.xp.zeros_like(rows.last)
    corrections = rows.scan(rho * rows.td_errors, rows.where_going_on(rows.gamma * lam) * c, nothing)
    targets = rows.values + corrections
    return VTrace(targets, rho * (rows.rewards + rows.gamma * rows.after(targets) - rows.values))


def normalize(x: Array, *, epsilon: float = 1e-8) -> Array:
    """Shift and scale to mean 0 and standard deviation 1 (unbiased), over all elements together; a lone one becomes 0.

    Args:
        x: any shape, at least one element; advantages, mostly.
        epsilon: added to the standard deviation.

    Raises:
        StructureError: no elements.

    >>> normalize([1.0, 2.0, 3.0]).round(4).tolist()
    [-1.0, 0.0, 1.0]
    """
    xp = array_namespace(x)
    x = as_float(xp, x)
    size = math.prod(x.shape)
    if not size:
        raise StructureError(f"`x` must have elements to be normalized, got shape {tuple(x.shape)}.")
    centred = x - xp.mean(x)
    return centred / (xp.sqrt(xp.sum(centred * centred) / max(size - 1, 1)) + epsilon)
