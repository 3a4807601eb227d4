"""The share of a table that each shard holds, and samples of all shards that are drawn by these shares.

An item of priority p is sampled with probability p ** C / mass, where the mass is the sum over all items of its shard.
So each sample gives the mass of its shard, and a shard's share is its mass divided by the sum of all masses. The share
times the probability within the shard is the probability that the item would have on one server with all items:

    mass_s / (mass_1 + ... + mass_n)  x  p ** C / mass_s  =  p ** C / (mass_1 + ... + mass_n)

The items of a uniform table weigh 1 each, so its mass is its size.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from reverb_writer.client.server_calls import Sample
from reverb_writer.deadline import Deadline
from reverb_writer.shards.server_set import ShardServer, answering, on_all

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


def sample_shards(
    shards: Sequence[ShardServer], first: int, table: str, num_samples: int, deadline: Deadline
) -> Iterator[Sample]:
    """Sample items one by one: of all servers as one table, or of the servers in turn.

    `first`, modulo the number of servers, is the server of the first turn; `deadline` is for all samples together.
    Servers that do not answer are left out. If any server has samples now, servers without samples are left out.
    """
    infos = answering(shards, deadline.left_s(), [table])
    ready = [shard for shard, info in infos.items() if info.tables[table].num_ready()] or list(infos)
    tables = [infos[shard].tables[table] for shard in ready]
    is_exact = {one.sampler for one in tables} <= EXACT
    known: list[list[Sample]] = [[] for _ in ready]
    sizes, means = [one.current_size for one in tables], [1.0] * len(ready)
    if is_exact and tables[0].sampler_exponent is not None and not tables[0].max_times_sampled:
        for number, sample in enumerate(on_all(ready, lambda shard: next(shard.server.sample(table, 1, deadline)))):
            (_, priority, probability, sizes[number], _) = sample.info
            known[number].append(sample)
            means[number] = mean_weight(tables[number].sampler_exponent, priority, probability, sizes[number])
    share = shares(sizes, means)
    if not any(share):
        share = [1 / len(ready)] * len(ready)
    if is_exact:
        order = np.random.default_rng().choice(len(ready), num_samples, p=share).tolist()
    else:
        order = [(first + turn) % len(ready) for turn in range(num_samples)]
    missing = [order.count(number) - len(known[number]) for number in range(len(ready))]
    streams = [
        itertools.chain(
            known[number], shard.server.sample(table, missing[number], deadline) if missing[number] > 0 else ()
        )
        for number, shard in enumerate(ready)
    ]
    for number in order:
        sample = next(streams[number])
        if is_exact:
            info = sample.info._replace(probability=share[number] * sample.info.probability, table_size=sum(sizes))
            sample = sample._replace(info=info)
        yield sample
