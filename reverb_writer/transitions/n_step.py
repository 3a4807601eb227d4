"""Transitions over n steps, of all rows or of one row per window.

gamma = 0.5, n = 3, a truncated episode of four actions; each line is the result of `n_step` for one transition

observation   s0    s1    s2    s3   s4   from   to   reward              discount
reward           2     3     5     7      s0     s3   2 + 3/2 + 5/4       1/4
              |-----------------|         s1     s4   3 + 5/2 + 7/4       1/4
                    |----------------|    s2     s4   5 + 7/2             1/2       fewer steps are left
                          |----------|    s3     s4   7                   1
                                |----|
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from reverb_writer.arguments import check_fraction, integer
from reverb_writer.arrays import (
    Array,
    array_like,
    array_namespace,
    as_float,
    concatenated,
    copied,
    take_along_time,
    with_axes,
)
from reverb_writer.errors import SpecError, StructureError
from reverb_writer.leaves import host_array
from reverb_writer.nests import map_present
from reverb_writer.transitions.pairing import paired, steps_fields
from reverb_writer.transitions.records import NStepTransitions, Transitions, check_one_target, has_rows


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
        gamma^(m-1) times the product of the m discounts; `next_observation` is m rows later, a copy if n > 1. All
        other fields are those of the first step. Work: O(T min(n, T)).

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
    folded = _fold(transitions, n, gamma)

    def later(leaf: Array) -> Array:
        return leaf if n == 1 else take_along_time(folded.xp, leaf, folded.last)

    return NStepTransitions(
        **{
            **transitions._asdict(),
            "reward": folded.reward,
            "discount": folded.discount,
            "next_observation": map_present(later, transitions.next_observation),
            "continues": folded.xp.zeros_like(transitions.continues),
        }
    )


def one_per_window(
    batch: Any, n: int, gamma: float, rng: np.random.Generator, *, is_prioritized: bool = False
) -> NStepTransitions:
    """Return one transition over n steps per window, leaves [B, ...]; `next_observation` is a copy.

    A window of n + 1 rows or fewer gives its first row. A longer window gives a row at random, uniformly among the rows
    whose n steps are in the window or end with the episode; if no row is, uniformly among its transitions. So rows near
    the ends of an episode, which are in fewer windows, are drawn less often than others.

    Args:
        batch: a `Batch` of windows, leaves [B, T, ...].
        n: maximum number of steps, >= 1.
        gamma: the agent's discount, in [0, 1].
        rng: source of randomness.
        is_prioritized: whether the table samples windows by priority.

    Raises:
        SpecError: a number is out of range; or a prioritized table has windows of more than n + 1 rows, because a
            priority belongs to a window, not to one of its rows.
        StructureError: the batch has slices; or as in `to_transitions`.

    >>> from reverb_writer.slices.batch import Batch
    >>> number = np.arange(4)[None]
    >>> data = {"observation": number, "action": number, "reward": np.ones((1, 4))}
    >>> batch = Batch(data, None, row_kinds=np.array([[2, 2, 2, 4 | 8]], np.uint8))
    >>> found = one_per_window(batch, 3, 0.5, np.random.default_rng(0))
    >>> found.observation.tolist(), found.reward.tolist(), found.next_observation.tolist()
    ([0], [1.75], [3])
    """
    n, gamma = integer("n", n, minimum=1), check_fraction("gamma", gamma)
    found, ends = paired(batch, steps_fields)
    if found.mask.ndim == 1:
        raise StructureError(
            "the batch has slices, whose rows all are transitions. Use `n_step(to_transitions(batch))`."
        )
    size = int(found.mask.shape[1])
    num_rows = size + (batch.last_row != "action")
    if is_prioritized and num_rows > n + 1:
        raise SpecError(
            f"windows of {num_rows} rows hold several transitions over {n} steps, and a priority belongs to a window, "
            f"not to one of its transitions. Write windows of {n + 1} rows (`sequence_length={n + 1}`), or sample the "
            "table uniformly."
        )
    folded = _fold(found, n, gamma)
    columns = None
    if size > n and not is_prioritized:
        mask, ends, last = (host_array(leaf) for leaf in (found.mask, ends, folded.last))
        columns = _drawn(mask, ends, last, n, rng)
    xp, shape = folded.xp, tuple(found.mask.shape)

    def of_row(leaf: Any) -> Any:
        if not has_rows(leaf, shape):
            return leaf
        return leaf[:, 0] if columns is None else take_along_time(xp, leaf, columns)[:, 0]

    last = of_row(folded.last)[:, None]

    def row_after(leaf: Any) -> Any:
        return copied(leaf[:, 0]) if size == 1 else take_along_time(xp, leaf, last)[:, 0]

    chosen = found._replace(
        reward=folded.reward, discount=folded.discount, continues=found.mask ^ found.mask, next_observation=()
    )
    return NStepTransitions(*map_present(of_row, tuple(chosen)))._replace(
        next_observation=map_present(row_after, found.next_observation)
    )


def _drawn(mask: Any, ends: Any, last: Any, n: int, rng: np.random.Generator) -> Any:
    """Return the number of a row of each window, [B, 1]; the first row of a window without a transition."""
    has_n = last - np.arange(mask.shape[1]) + 1 >= n
    whole = mask & (has_n | np.take_along_axis(ends, last, axis=1))
    choices = np.where(whole.any(axis=1, keepdims=True), whole, mask)
    drawn = rng.integers(np.maximum(choices.sum(axis=1, keepdims=True), 1))
    return (choices.cumsum(axis=1) > drawn).argmax(axis=1)[:, None]


class _Folded(NamedTuple):
    """Sums over n steps, in the shape of the transitions."""

    xp: Any
    reward: Array
    discount: Array
    last: Array  # number of the last of the n steps, in its window or among all rows


def _fold(transitions: Transitions, n: int, gamma: float) -> _Folded:
    check_one_target(transitions)
    mask, continues = transitions.mask, transitions.continues
    xp = array_namespace(transitions.reward, transitions.discount, mask)
    axis, size = mask.ndim - 1, mask.shape[-1]
    rewards, discounts = (as_float(xp, x) for x in (transitions.reward, transitions.discount))
    ndim = max(rewards.ndim, discounts.ndim)
    rewards, discounts, is_real, goes_on = (with_axes(x, ndim) for x in (rewards, discounts, mask, continues))
    rewards = xp.where(is_real, rewards, xp.zeros_like(rewards))
    sums, products = rewards, discounts
    own = np.zeros if size == 1 else lambda shape, dtype: np.broadcast_to(np.arange(size, dtype=dtype), shape).copy()
    last = number = array_like(xp, own(tuple(mask.shape), np.int64), mask)
    for _ in range(min(n, size) - 1):
        sums = xp.where(goes_on, rewards + gamma * discounts * _next(xp, sums, axis), rewards)
        products = xp.where(goes_on, gamma * discounts * _next(xp, products, axis), discounts)
        last = xp.where(continues, _next(xp, last, axis), number)
    return _Folded(xp, sums, products, last)


def _next(xp: Any, x: Array, axis: int) -> Array:
    """Return the next row in place of each row; the last row is repeated."""
    rows, last = (x[:, 1:], x[:, -1:]) if axis else (x[1:], x[-1:])
    return concatenated(xp, [rows, last], axis)
