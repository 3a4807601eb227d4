"""Transitions as named tuples of arrays, over one step and over several steps.

gamma = 0.5, n = 3, a truncated episode of four actions; each line is the result of `n_step` for one transition

observation   s0    s1    s2    s3   s4   from   to   reward              discount
reward           2     3     5     7      s0     s3   2 + 3/2 + 5/4       1/4
              |-----------------|         s1     s4   3 + 5/2 + 7/4       1/4
                    |----------------|    s2     s4   5 + 7/2             1/2       fewer steps are left
                          |----------|    s3     s4   7                   1
                                |----|
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import tree

from reverb_writer.arguments import check_fraction, integer
from reverb_writer.arrays import Array, array_like, array_namespace, as_float, concatenated, take_rows, with_axes
from reverb_writer.errors import StructureError


class Transitions(NamedTuple):
    """Transitions: after `observation`, `action` gave `reward` and led to `next_observation`.

    Leaves are [B, T - 1, ...], or [N - 1, ...] for slices. A target of values is
    `reward + gamma * discount * value(next_observation)`.

    Attributes:
        observation: nest.
        action: nest, taken on the observation.
        reward: reward of the action; a nest if the steps have a nest.
        discount: 0 where the environment terminated with this action, otherwise 1, times the stored discount if the
            steps have one. So it is 1 at truncations and cuts. 0 where `mask` is False.
        next_observation: nest like `observation`.
        mask: bool [B, T - 1] or [N - 1], True for transitions. False where the first row of a pair is a boundary step
            or padding, or the two rows belong to different episodes or slices; the other leaves have no meaning there.
        continues: bool [B, T - 1] or [N - 1], True where the next transition of the row follows this one in the same
            episode.
        extras: the other fields of the step in which the action was taken, by name, such as `policy_info` or `seed`.
    """

    observation: Any
    action: Any
    reward: Any
    discount: Any
    next_observation: Any
    mask: Array
    continues: Array
    extras: Mapping[str, Any]

    def first(self) -> NStepTransitions:
        """Return the first transition of each window, leaves [B, ...]; views where the library has views.

        Raises:
            StructureError: the transitions are from slices, or are already the first ones.

        >>> import numpy as np
        >>> from reverb_writer.transitions import to_transitions
        >>> steps = {"observation": np.array([[0, 1, 2], [5, 6, 7]]), "action": np.zeros((2, 3))}
        >>> steps |= {"reward": np.ones((2, 3)), "discount": np.ones((2, 3))}
        >>> to_transitions(steps).first().next_observation.tolist()
        [1, 6]
        """
        if self.mask.ndim != 2:  # noqa: PLR2004  # B and T
            raise StructureError(
                f"`first` is for transitions [B, T - 1], got {tuple(self.mask.shape)}. For slices, choose "
                "the rows `batch.slices.first_rows`."
            )
        shape = tuple(self.mask.shape)

        def first(leaf: Any) -> Any:
            return leaf[:, 0] if has_rows(leaf, shape) else leaf

        found = NStepTransitions(*tree.map_structure(first, tuple(self)))
        return found._replace(continues=found.mask & ~found.mask)


class NStepTransitions(Transitions):
    """The result of `n_step`, `first` and `dataset.transitions`: `Transitions` that have one target each.

    They do not continue each other, so `continues` is False, and functions of runs of rows refuse them.

    Attributes:
        batch: the `Batch` of the transitions, from `dataset.transitions`: its `info` has keys and weights. Otherwise,
            and after `_replace`, None.
    """

    batch: Any = None


def check_one_target(transitions: Transitions) -> None:
    """Refuse transitions whose reward or discount is a nest."""
    if tree.is_nested(transitions.reward) or tree.is_nested(transitions.discount):
        raise StructureError(
            "`reward` or `discount` is a nest. Choose one of its leaves first: `transitions._replace(reward=...)`."
        )


def has_rows(nest: Any, shape: tuple[int, ...]) -> bool:
    """Return whether the shapes of all leaves begin with this one."""
    return all(tuple(getattr(leaf, "shape", ()))[: len(shape)] == shape for leaf in tree.flatten(nest))


def n_step(transitions: Transitions, n: int, gamma: float) -> NStepTransitions:
    """Extend each transition to n steps, or to the remaining steps of its episode or window. Pure.

    So no transition is lost at the end of an episode or window. As in Acme, the learner applies the last gamma: the
    target of values is `reward + gamma * discount * value(next_observation)` for every n.

    Args:
        transitions: from `to_transitions`, leaves [B, T - 1, ...] or [N - 1, ...].
        n: maximum number of steps, >= 1.
        gamma: the agent's discount, in [0, 1]. `transitions.discount` does not include it.

    Returns:
        Transitions over m steps: `reward` is the sum of r_i times gamma^i and the discounts before it; `discount` is
        gamma^(m-1) times the product of the m discounts; `next_observation` is m rows later. All other fields are those
        of the first step. Work: O(T min(n, T)).

    Raises:
        SpecError: a number is out of range.
        StructureError: the transitions already are over n steps, or reward or discount is a nest.

    >>> from reverb_writer.transitions import to_transitions
    >>> steps = {"observation": np.array([[0, 1, 2, 3]]), "action": np.zeros((1, 4))}
    >>> steps |= {"reward": np.array([[2.0, 3.0, 5.0, 0.0]]), "discount": np.array([[1.0, 1.0, 0.0, 0.0]])}
    >>> found = n_step(to_transitions(steps), 2, gamma=0.5)
    >>> found.reward.tolist(), found.discount.tolist(), found.next_observation.tolist()
    ([[3.5, 5.5, 5.0]], [[0.5, 0.0, 0.0]], [[2, 3, 3]])
    """
    n, gamma = integer("n", n, minimum=1), check_fraction("gamma", gamma)
    if isinstance(transitions, NStepTransitions):
        raise StructureError("these transitions already are over several steps. Call `n_step` once, with a larger n.")
    check_one_target(transitions)
    mask, continues = transitions.mask, transitions.continues
    xp = array_namespace(transitions.reward, transitions.discount, mask)
    axis = mask.ndim - 1
    rewards, discounts = (as_float(xp, x) for x in (transitions.reward, transitions.discount))
    ndim = max(rewards.ndim, discounts.ndim)
    rewards, discounts, is_real, goes_on = (with_axes(x, ndim) for x in (rewards, discounts, mask, continues))
    rewards = xp.where(is_real, rewards, xp.zeros_like(rewards))
    sums, products = rewards, discounts
    last = number = array_like(xp, np.arange(math.prod(mask.shape)).reshape(tuple(mask.shape)), mask)
    for _ in range(min(n, mask.shape[-1]) - 1):
        sums = xp.where(goes_on, rewards + gamma * discounts * _next(xp, sums, axis), rewards)
        products = xp.where(goes_on, gamma * discounts * _next(xp, products, axis), discounts)
        last = xp.where(continues, _next(xp, last, axis), number)
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
    """Return the next row in place of each row; the last row is repeated."""
    rows, last = (x[:, 1:], x[:, -1:]) if axis else (x[1:], x[-1:])
    return concatenated(xp, [rows, last], axis)
