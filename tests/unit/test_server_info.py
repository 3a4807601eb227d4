"""How much a table would hand out at once, by its size and its rate limiter."""

from __future__ import annotations

import math

import pytest

from reverb_writer.wire.server_info import RateLimiterInfo, TableInfo

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
