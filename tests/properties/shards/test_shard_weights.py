"""Shares of shards: any division of items among shards gives each item the probability that one server would."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numbered import insert_numbers

import reverb_writer as rw
from reverb_writer.shards.weights import mean_weight, shares

PRIORITIES = st.floats(0.0, 1e6).map(lambda priority: 0.0 if priority < 1e-6 else priority)
SHARDS = st.lists(st.lists(PRIORITIES, max_size=20), min_size=1, max_size=5).filter(any)
EXPONENTS = st.floats(0.0, 2.0)


def probabilities(priorities: list[float], exponent: float) -> list[float]:
    """Return what one server with these items says: in proportion to p ** C, or uniform if all of them are 0."""
    weights = np.array(priorities) ** exponent
    return list(weights / weights.sum() if weights.any() else np.full(len(weights), 1 / len(weights)))


@given(SHARDS, EXPONENTS, st.randoms(use_true_random=False))
def test_share_times_probability_is_that_of_one_server(
    shards: list[list[float]], exponent: float, chance: random.Random
) -> None:
    within = [probabilities(shard, exponent) if shard else [] for shard in shards]
    means = []
    for shard, chances in zip(shards, within, strict=True):
        drawable = [number for number, one in enumerate(chances) if one > 0]
        told = chance.choice(drawable) if drawable else None
        means.append(0.0 if told is None else mean_weight(exponent, shard[told], chances[told], len(shard)))
    found = shares([len(shard) for shard in shards], means)
    np.testing.assert_allclose(
        [share * one for share, chances in zip(found, within, strict=True) for one in chances],
        probabilities([priority for shard in shards for priority in shard], exponent),
        rtol=1e-9,
        atol=1e-12,
    )


def test_uniform_and_prioritized_shards_are_sampled_as_one() -> None:
    with (
        rw.LocalServer([rw.TableConfig("a")]) as one,
        rw.LocalServer([rw.TableConfig("a", sampler="prioritized")]) as other,
        rw.Client([one.address, other.address]) as client,
    ):
        for server in (one, other):
            insert_numbers(server.address, "a", [1])
        assert {sample.info.table_size for sample in client.sample("a", 8)} == {2}


@given(st.lists(st.integers(0, 1000), min_size=1).filter(any))
def test_shares_of_a_uniform_table_are_those_of_sizes(sizes: list[int]) -> None:
    means = [mean_weight(None, 5.0, 1 / size if size else 0.0, size) for size in sizes]
    np.testing.assert_allclose(shares(sizes, means), np.array(sizes) / sum(sizes))
