"""What a server's figures say: how much a table would hand out at once, and what several servers hold together."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from reverb_writer.tables.table_info import RateLimiterInfo, TableInfo, merge_tables

INF = math.inf


def table(size: int, limiter: RateLimiterInfo) -> TableInfo:
    return TableInfo("t", "fifo", "fifo", 100, 1, size, 0, 0, 0, limiter, None, {})


@pytest.mark.parametrize(
    ("size", "limiter", "expected"),
    [
        (0, RateLimiterInfo(1.0, -INF, INF, 1, 0, 0), 0),
        (7, RateLimiterInfo(1.0, -INF, INF, 1, 9, 2), 7),
        (7, RateLimiterInfo(1.0, -INF, INF, 8, 9, 2), 0),  # min_size_to_sample
        (5, RateLimiterInfo(2.0, 3.0, INF, 1, 5, 4), 3),  # 2 x 5 - 4 = 6 may fall to 3
        (5, RateLimiterInfo(0.5, 0.0, INF, 1, 5, 2), 0),  # 0.5 x 5 - 2 = 0.5 may not fall by 1
        (2, RateLimiterInfo(8.0, 0.0, INF, 1, 2, 0), 2),  # 16 samples are allowed, of 2 items
    ],
)
def test_no_more_is_ready_than_items_and_rate_limiter_allow(size: int, limiter: RateLimiterInfo, expected: int) -> None:
    assert table(size, limiter).num_ready() == expected


# Several servers.


def together(*tables: TableInfo) -> TableInfo:
    return merge_tables([{"t": table} for table in tables])["t"]


def test_bounds_of_several_servers_are_added_up() -> None:
    one, other = RateLimiterInfo(2.0, -5.0, 10.0, 3, 4, 6), RateLimiterInfo(2.0, -1.0, 20.0, 4, 10, 6)
    merged = together(table(4, one), replace(table(6, other), max_size=50))
    assert merged.rate_limiter == RateLimiterInfo(2.0, -6.0, 30.0, 7, 14, 12)
    assert merged.rate_limiter.diff == one.diff + other.diff
    assert (merged.current_size, merged.max_size) == (10, 150)
    assert [server.rate_limiter for server in merged.servers] == [one, other]
    unbounded = together(table(0, replace(one, min_diff=-INF)), table(0, replace(other, max_diff=INF))).rate_limiter
    assert (unbounded.min_diff, unbounded.max_diff) == (-INF, INF)
    assert together(table(4, one)) == table(4, one)


def test_several_servers_block_when_each_does() -> None:
    full, free = RateLimiterInfo(1.0, 0.0, 10.0, 1, 10, 0), RateLimiterInfo(1.0, 0.0, 10.0, 1, 0, 0)
    assert together(table(10, full), table(10, full)).blocks_inserts()
    assert not together(table(10, full), table(0, free)).blocks_inserts()
    assert not together(table(10, full), table(0, free)).blocks_samples()
    assert together(table(0, free), table(0, free)).blocks_samples()
    assert together(table(10, full), table(0, free)).num_ready() == 10


def test_servers_that_are_configured_differently_are_told_as_they_are() -> None:
    one, other = RateLimiterInfo(1.0, 0.0, 10.0, 1, 10, 0), RateLimiterInfo(4.0, 0.0, 10.0, 1, 30, 20)
    prioritized = replace(table(1, one), sampler="prioritized", sampler_exponent=0.5)
    merged = together(prioritized, replace(table(1, other), max_times_sampled=3))
    assert merged.rate_limiter.diff == one.diff + other.diff
    assert (merged.sampler, merged.sampler_exponent) == ("prioritized, fifo", None)
    assert merged.max_times_sampled == 3
    assert together(prioritized, replace(prioritized, max_times_sampled=0)).max_times_sampled == 0
    assert together(prioritized, prioritized).sampler_exponent == 0.5


def test_table_prints_as_a_small_table() -> None:
    assert str(table(7, RateLimiterInfo(1.0, -INF, INF, 1, 9, 2))).splitlines() == [
        "TableInfo, without zeros",
        "  name                             t",
        "  sampler                          fifo",
        "  remover                          fifo",
        "  max_size                         100",
        "  max_times_sampled                1",
        "  current_size                     7",
        "  rate_limiter/samples_per_insert  1",
        "  rate_limiter/min_diff            -inf",
        "  rate_limiter/max_diff            inf",
        "  rate_limiter/min_size_to_sample  1",
        "  rate_limiter/num_inserts         9",
        "  rate_limiter/num_samples         2",
    ]
