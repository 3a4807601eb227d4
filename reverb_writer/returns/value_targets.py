"""Returns, advantages and targets of values, each by the backward recursion.

The package's docstring describes the arguments and the errors that these functions share.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from reverb_writer.arguments import check_fraction
from reverb_writer.errors import StructureError
from reverb_writer.returns.recursion import Array, ReturnInputs, array_namespace, as_float

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
    """Return the discounted sum of the rewards from each row on: G_t = r_t + gamma G_{t+1}.

    Arguments and errors: as in the package's docstring. `gamma` by row are discounts as dm_env has them.

    Returns:
        [T, ...].

    >>> discounted_returns([1.0, 1.0, 1.0], 0.5, 4.0).tolist()
    [2.25, 2.5, 3.0]
    >>> discounted_returns([1.0, 1.0, 1.0], 0.5, 4.0, terminated=[0, 1, 0]).tolist()
    [1.5, 1.0, 3.0]
    """
    inputs = ReturnInputs(rewards, None, last_value, gamma, terminated, truncated, final_values)
    return inputs.scan_backwards(
        inputs.rewards + inputs.gamma * inputs.end_values, inputs.zero_at_ends(inputs.gamma), inputs.last_value
    )


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

    Arguments and errors: as in the package's docstring. `lam` is 0 for one-step targets, 1 for discounted returns.

    Returns:
        [T, ...].

    >>> lambda_returns([1.0, 1.0], [2.0, 2.0], 4.0, gamma=0.5, lam=0.5).tolist()
    [2.25, 3.0]
    """
    lam = check_fraction("lam", lam)
    inputs = ReturnInputs(rewards, values, last_value, gamma, terminated, truncated, final_values)
    weight = inputs.zero_at_ends(inputs.gamma * lam)
    return inputs.scan_backwards(
        inputs.rewards + (inputs.gamma - weight) * inputs.next_values, weight, inputs.last_value
    )


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

    Arguments and errors: as in the package's docstring.

    Returns:
        `advantages`, not normalized, and `returns`, which are advantages + values: the targets of the values.

    Source: Schulman et al., High-dimensional continuous control using generalized advantage estimation, 2016, (16).

    >>> rewards, values = [1.0, 1.0, 1.0], [0.5, 0.5, 0.5]
    >>> advantages, returns = gae(rewards, values, 2.0, gamma=0.9, lam=0.8, terminated=[0, 1, 0])
    >>> advantages.round(4).tolist(), returns.round(4).tolist()
    ([1.31, 0.5, 2.3], [1.81, 1.0, 2.8])
    """
    lam = check_fraction("lam", lam)
    inputs = ReturnInputs(rewards, values, last_value, gamma, terminated, truncated, final_values)
    zero = inputs.xp.zeros_like(inputs.last_value)
    advantages = inputs.scan_backwards(inputs.td_errors, inputs.zero_at_ends(inputs.gamma * lam), zero)
    return Advantages(advantages, advantages + inputs.values)


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

    Other arguments and errors: as in the package's docstring. The values are those of the policy that learns.

    `ratios` [T, ...] are > 0: the probability of each action under the policy that learns, divided by its probability
    under the policy that acted. `max_rho` > 0 is the upper bound of the ratios rho_t that weigh the TD errors and the
    advantages; `max_c` > 0 is the upper bound of the ratios c_t that weigh the trace. Both bounds may be infinite.

    Returns:
        `values`, the targets of the values, and `advantages` for the policy gradient:
        rho_t (r_t + gamma target_{t+1} - v_t).

    Source: Espeholt et al., IMPALA, 2018, section 4.1.

    >>> targets, advantages = vtrace([1.0, 1.0], [2.0, 2.0], 4.0, [0.5, 3.0], gamma=0.5)
    >>> targets.tolist(), advantages.tolist()
    ([2.25, 3.0], [0.25, 1.0])
    """
    lam = check_fraction("lam", lam)
    inputs = ReturnInputs(rewards, values, last_value, gamma, terminated, truncated, final_values)
    ratios = inputs.broadcast_like("ratios", ratios)
    rho, c = inputs.clip_above("max_rho", ratios, max_rho), inputs.clip_above("max_c", ratios, max_c)
    zero = inputs.xp.zeros_like(inputs.last_value)
    corrections = inputs.scan_backwards(rho * inputs.td_errors, inputs.zero_at_ends(inputs.gamma * lam) * c, zero)
    targets = inputs.values + corrections
    return VTrace(targets, rho * (inputs.rewards + inputs.gamma * inputs.following(targets) - inputs.values))


def normalize(x: Array, *, epsilon: float = 1e-8) -> Array:
    """Return x shifted to mean 0 and scaled to standard deviation 1 (unbiased); a single element becomes 0.

    Args:
        x: an array of any shape with at least one element, usually advantages. All elements are normalized together.
        epsilon: added to the standard deviation.

    Raises:
        StructureError: `x` has no elements.

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
