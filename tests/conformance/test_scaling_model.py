"""The model of hosts (docs/deploy/sizing.md) says what a closed form says where there is one."""

from __future__ import annotations

import math

import pytest

from benchmarks.scaling_model import busiest_share, scaling_model


def test_busiest_of_two_shards_is_as_far_from_the_mean_as_heads_from_tails() -> None:
    # The mean deviation of n tosses of a coin is sqrt(n / (2 pi)).
    assert busiest_share(2, 1000) == pytest.approx(1 + math.sqrt(1000 / (2 * math.pi)) / 500, abs=0.002)
    assert busiest_share(1, 1000) == 1
    assert busiest_share(16, 1) == 16  # one actor, one shard


def test_network_limits_where_items_are_large() -> None:
    (one, *_) = scaling_model(server_cpu_us=8, item_bytes=1e6, num_actors=1000).rows
    assert one == ["1", "1,250", "1.00", "1,250", "1"]  # 10 Gbit/s = 1,250 MB/s
