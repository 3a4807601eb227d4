"""Returns over n steps."""

from __future__ import annotations

from typing import NamedTuple

from reverb_writer.arguments import check_fraction, integer
from reverb_writer.returns.recursion import Array, ReturnInputs, next_rows

__all__ = ["NStepTransitions", "n_step_returns", "n_step_transitions"]


class NStepTransitions(NamedTuple):
    """What `n_step_transitions` returns; both [T, ...]."""

    rewards: Array
    discounts: Array


def n_step_returns(
    rewards: Array,
    values: Array,
    last_value: Array,
    n: int,
    *,
    gamma: Array,
    terminated: Array = None,
    truncated: Array = None,
    final_values: Array = None,
) -> Array:
    """Return the discounted sum of the next n rewards of each row and of the value of what follows them.

    Where an episode or the rows end earlier, the sum has fewer rewards and the value of what follows that end.

    Arguments and errors: as in the package's docstring. `n` is the number of rewards in a sum, >= 1.

    Returns:
        [T, ...]. Work: O(T min(n, T)).

    >>> n_step_returns([1.0, 1.0, 1.0], [8.0, 8.0, 8.0], 4.0, 2, gamma=0.5).tolist()
    [3.5, 2.5, 3.0]
    """
    n = integer("n", n, minimum=1)
    inputs = ReturnInputs(rewards, values, last_value, gamma, terminated, truncated, final_values)
    returns = inputs.rewards + inputs.gamma * inputs.next_values
    for _ in range(min(n, len(inputs.rewards)) - 1):
        returns = inputs.rewards + inputs.gamma * inputs.following(returns)
    return returns


def n_step_transitions(rewards: Array, discounts: Array, n: int, *, gamma: float) -> NStepTransitions:
    """Return the transition over n steps that starts at each row; the last ones of an episode have fewer steps.

    Args:
        rewards: [T, ...] of one episode, T >= 1.
        discounts: [T, ...], the environment's own: 0 where it terminates, else mostly 1.
        n: steps in a transition, >= 1.
        gamma: the agent's discount, in [0, 1]. `discounts` do not include it.

    Returns:
        For the m = min(n, T - t) steps from row t on: `rewards`, the sum of r_{t+i} times gamma^i and the discounts
        before it; `discounts`, gamma^(m-1) times the m discounts. As in Acme, the learner applies the last gamma. The
        value to bootstrap from is that of row t + m. Work: O(T min(n, T)).

    Raises:
        SpecError: a number out of range.
        StructureError: the shapes do not match, or the arrays are of different libraries.

    Source: Acme `NStepTransitionAdder`.

    >>> n_step_transitions([2.0, 3.0, 5.0], [1.0, 1.0, 0.0], 2, gamma=0.5)
    NStepTransitions(rewards=array([3.5, 5.5, 5. ]), discounts=array([0.5, 0. , 0. ]))
    """
    n, gamma = integer("n", n, minimum=1), check_fraction("gamma", gamma)
    inputs = ReturnInputs(rewards, None, 0.0, discounts, None, None, None)
    reward_sums, discount_products = inputs.rewards, inputs.gamma
    for _ in range(min(n, len(inputs.rewards)) - 1):
        reward_sums = inputs.rewards + gamma * inputs.gamma * next_rows(inputs.xp, reward_sums, inputs.last_value)
        discount_products = inputs.gamma * next_rows(
            inputs.xp, gamma * discount_products, inputs.xp.ones_like(inputs.last_value)
        )
    return NStepTransitions(reward_sums, discount_products)
