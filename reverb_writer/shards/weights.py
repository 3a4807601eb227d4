"""The share of a table that each shard holds. Arithmetic only.

An item of priority p is sampled with probability p ** C / mass, where the mass is the sum over all items of its shard.
So each sample gives the mass of its shard, and a shard's share is its mass divided by the sum of all masses. The share
times the probability within the shard is the probability that the item would have on one server with all items:

    mass_s / (mass_1 + ... + mass_n)  x  p ** C / mass_s  =  p ** C / (mass_1 + ... + mass_n)

The items of a uniform table weigh 1 each, so its mass is its size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

EXACT = frozenset({"uniform", "prioritized"})
"""Samplers whose tables on several servers are sampled as one table."""

_MAX_WEIGHT = 1e150  # the sum over all items of all shards is finite


def mean_weight(exponent: float | None, priority: float, probability: float, table_size: int) -> float:
    """Return the mean of p ** C, >= 0, over the items of a shard, computed from one of its samples.

    `exponent` is C, None for a uniform table; `probability` is the sample's probability within its shard. If all
    priorities are 0, items are sampled uniformly and the mean is 0.

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
    """Return the probability of each shard for the next sample, from the numbers of items and their mean weights.

    The sum is 1; all are 0 if no shard has an item.

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
