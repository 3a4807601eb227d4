"""Transitions over several steps.

gamma = 0.5, n = 3, an episode of four actions that was truncated; a line is what `n_step` makes of a transition

observation   s0    s1    s2    s3   s4   from   to   reward              discount
reward           2     3     5     7      s0     s3   2 + 3/2 + 5/4       1/4
              |-----------------|         s1     s4   3 + 5/2 + 7/4       1/4
                    |----------------|    s2     s4   5 + 7/2             1/2       fewer are left
                          |----------|    s3     s4   7                   1
                                |----|
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tree

from reverb_writer.arguments import check_fraction, integer
from reverb_writer.arrays import Array, array_like, array_namespace, as_float, concatenated, take_rows, with_axes
from reverb_writer.errors import StructureError
from reverb_writer.transitions.records import NStepTransitions, Transitions, check_one_target


def n_step(transitions: Transitions, n: int, gamma: float) -> NStepTransitions:
    """Return for each transition the one over the n steps from it on, or over as many as follow in its episode. Pure.

    At the end of an episode or of a window there are fewer steps, so no transition is lost. As in Acme, the
    learner applies the last gamma, so the target of values is `reward + gamma * discount * value(next_observation)`,
    whatever n is.

    Args:
        transitions: from `to_transitions`, leaves [B, T - 1, ...] or [N - 1, ...].
        n: maximum of steps, >= 1.
        gamma: the agent's discount, in [0, 1]. `transitions.discount` does not include it.

    Returns:
        Over m steps: `reward`, the sum of r_i times gamma^i and the discounts before it; `discount`, gamma^(m-1) times
        the m discounts; `next_observation`, m rows later. The rest is that of the first step. Work: O(T min(n, T)).

    Raises:
        SpecError: a number out of range.
        StructureError: transitions over n steps already; or reward or discount is a nest.

    >>> from reverb_writer.transitions import to_transitions
    >>> steps = {"observation": np.array([[0, 1, 2, 3]]), "action": np.zeros((1, 4))}
    >>> steps |= {"reward": np.array([[2.0, 3.0, 5.0, 0.0]]), "discount": np.array([[1.0, 1.0, 0.0, 0.0]])}
    >>> found = n_step(to_transitions(steps), 2, gamma=0.5)
    >>> found.reward.tolist(), found.discount.tolist(), found.next_observation.tolist()
    ([[3.5, 5.5, 5.0]], [[0.5, 0.0, 0.0]], [[2, 3, 3]])
    """
    n, gamma = integer("n", n, minimum=1), check_fraction("gamma", gamma)
    if isinstance(transitions, NStepTransitions):
        raise StructureError("these transitions are over several steps already. Call `n_step` once, with a larger n.")
    check_one_target(transitions)
    mask, continues = transitions.mask, transitions.continues
    xp = array_namespace(transitions.reward, transitions.discount, mask)
    axis, size = mask.ndim - 1, mask.shape[-1]
    rewards, discounts = (as_float(xp, x) for x in (transitions.reward, transitions.discount))
    ndim = max(rewards.ndim, discounts.ndim)
    rewards, discounts, is_real, goes_on = (with_axes(x, ndim) for x in (rewards, discounts, mask, continues))
    rewards = xp.where(is_real, rewards, xp.zeros_like(rewards))
    sums, products = rewards, discounts
    number = array_like(xp, np.arange(size), mask)
    number = number + xp.zeros_like(mask, dtype=number.dtype)
    last = number
    for _ in range(min(n, size) - 1):
        sums = xp.where(goes_on, rewards + gamma * discounts * _next(xp, sums, axis), rewards)
        products = xp.where(goes_on, gamma * discounts * _next(xp, products, axis), discounts)
        last = xp.where(continues, _next(xp, last, axis), number)
    if axis:
        last = last + size * array_like(xp, np.arange(mask.shape[0])[:, None], mask)
    rows = last.reshape((-1,))

    def later(leaf: Array) -> Array:
        flat = leaf.reshape((len(rows), *leaf.shape[mask.ndim :]))
        return take_rows(xp, flat, rows).reshape(leaf.shape)

    return NStepTransitions(
        **{
            **transitions._asdict(),
            "reward": sums,
            "discount": products,
            "next_observation": tree.map_structure(later, transitions.next_observation),
            "continues": xp.zeros_like(continues),
        }
    )


def _next(xp: Any, x: Array, axis: int) -> Array:
    """Return in each row the next one, and the last one again."""
    rows, last = (x[:, 1:], x[:, -1:]) if axis else (x[1:], x[-1:])
    return concatenated(xp, [rows, last], axis)
