"""Returns that look n steps ahead."""

from __future__ import annotations

from typing import NamedTuple

from reverb_writer.arguments import integer
from reverb_writer.returns.recursion import Array, Rows, fraction, shifted

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
    """Sum up the next n rewards of each row, discounted, and the value of what follows them.

    Where an episode or the rows end before that, fewer are summed up, and the value is that of what follows the end.

    Args:
        rewards: [T, ...], T >= 1.
        values: [T, ...], of the observation in each row.
        last_value: [...], of the observation after the last row.
        n: rewards in a sum, >= 1.
        gamma: the discount, a number in [0, 1], or [T, ...].
        terminated: on the row of the action; see the package's docstring, as the other ends.
        truncated: as there.
        final_values: as there.

    Returns:
        [T, ...]. Work: O(T min(n, T)).

    Raises:
        SpecError: a number out of range, or `truncated` without `final_values`.
        StructureError: shapes do not go together, or arrays are of different libraries.

    >>> n_step_returns([1.0, 1.0, 1.0], [8.0, 8.0, 8.0], 4.0, 2, gamma=0.5).tolist()
    [3.5, 2.5, 3.0]
    """
    n = integer("n", n, minimum=1)
    rows = Rows(rewards, values, last_value, gamma, terminated, truncated, final_values)
    returns = rows.rewards + rows.gamma * rows.next_values
    for _ in range(min(n, len(rows.rewards)) - 1):
        returns = rows.rewards + rows.gamma * rows.after(returns)
    return returns


def n_step_transitions(rewards: Array, discounts: Array, n: int, *, gamma: float) -> NStepTransitions:
    """Fold n steps into one transition that starts at each row; the last ones of an episode fold what is left.

    Args:
        rewards: [T, ...] of one episode, T >= 1.
        discounts: [T, ...], the environment's own: 0 where it terminates, else mostly 1.
        n: steps in a transition, >= 1.
        gamma: the agent's discount, in [0, 1].

    Returns:
        With m = min(n, T - t), for the m steps from row t on: `rewards`, the sum of r_{t+i} times gamma^i and the
        discounts before it; `discounts`, gamma^(m-1) times the m discounts: one gamma less, which the learner applies,
        as Acme has it. The value to bootstrap from is that of row t + m. Work: O(T min(n, T)).

    Raises:
        SpecError: a number out of range.
        StructureError: shapes do not go together, or arrays are of different libraries.

    Source: Acme `NStepTransitionAdder`.

    >>> n_step_transitions([2.0, 3.0, 5.0], [1.0, 1.0, 0.0], 2, gamma=0.5)
    NStepTransitions(rewards=array([3.5, 5.5, 5. ]), discounts=array([0.5, 0. , 0. ]))
    """
    n, gamma = integer("n", n, minimum=1), fraction("gamma", gamma)
    rows = Rows(rewards, None, 0.0, discounts, None, None, None)
    folded, discount = rows.rewards, rows.gamma
    for _ in range(min(n, len(rows.rewards)) - 1):
        folded = rows.rewards + gamma * rows.gamma * shifted(rows.xp, folded, rows.last)
        discount = rows.gamma * shifted(rows.xp, gamma * discount, rows.xp.ones_like(rows.last))
    return NStepTransitions(folded, discount)
