"""How much of a table each of several shards holds, and so how often each is to be sampled. Pure.

An item of priority p is sampled with probability p ** C / mass, where the mass is the sum over all items of its shard.
So each sample tells the mass of its shard, and a shard's share is its mass divided by the sum of the masses. The shares
times the probabilities within the shards are the probabilities that one server with all items would have:

    mass_s / (mass_1 + ... + mass_n)  x  p ** C / mass_s  =  p ** C / (mass_1 + ... + mass_n)

The items of a uniform table weigh 1 each, so its mass is its size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

EXACT = frozenset({"uniform", "prioritized"})
"""Samplers whose tables on several servers are sampled as one."""

_MAX_WEIGHT = 1e150  # the sum over all items of all shards is finite


def mean_weight(exponent: float | None, priority: float, probability: float, table_size: int) -> float:
    """Return the mean of p ** C over the items of a shard, as one of its samples tells it.

    Args:
        exponent: C; None for a uniform table.
        priority: p of the sampled item.
        probability: with which it was sampled from its shard.
        table_size: items of the shard.

    Returns:
        The mean, >= 0. It is 0 if all priorities are, while which items are sampled uniformly.

    >>> mean_weight(2.0, 3.0, 0.5, 4)  # 9 is half of the mass, which is 18
    4.5
    """
    if exponent is None:
        return 1.0
    if probability <= 0 or table_size <= 0:
        return 0.0
    try:
        mass = math.pow(priority, exponent) / probability
    except OverflowError:
        return _MAX_WEIGHT
    return min(mass / table_size, _MAX_WEIGHT)


def shares(sizes: Sequence[int], means: Sequence[float]) -> list[float]:
    """Return with which probability each shard is to be sampled next.

    Args:
        sizes: items of each shard, >= 0.
        means: mean weight of its items, see `mean_weight`.

    Returns:
        Numbers >= 0 whose sum is 1; all 0 if no shard has an item.

    >>> shares([1, 10, 100], [1.0, 1.0, 1.0]) == [1 / 111, 10 / 111, 100 / 111]
    True
    >>> shares([2, 1, 5], [1.5, 3.0, 0.0]), shares([1, 3], [0.0, 0.0]), shares([0], [1.0])
    ([0.5, 0.5, 0.0], [0.25, 0.75], [0.0])
    """
    masses = [size * mean for size, mean in zip(sizes, means, strict=True)]
    if not any(masses):
        masses = list(map(float, sizes))
    total = sum(masses)
    return [mass / total for mass in masses] if total else masses
