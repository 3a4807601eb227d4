"""Warnings about tables whose rules have unexpected effects. `TableConfig` itself refuses rules that always block."""

from __future__ import annotations

import math

from reverb_writer.tables import TableConfig


def advice(table: TableConfig) -> list[str]:
    """Return the warnings, a sentence each: now about a ratio that `max_times_sampled` makes unreachable."""
    balance = table.rate_limiter.balance
    times = table.max_times_sampled
    if not times or not math.isfinite(balance.max_diff) or balance.samples_per_insert <= times:
        return []
    grows = balance.samples_per_insert - times
    inserts = math.floor(balance.max_diff / grows)
    sentence = (
        f"table `{table.name}`: samples_per_insert {balance.samples_per_insert:g} cannot be reached, because an "
        f"item is removed after {times} samples: each insert raises diff by {grows:g} for good. After {inserts} "
        f"inserts the limiter blocks inserts that would take the table above min_size {balance.min_size}. Raise "
        f"max_times_sampled to {math.ceil(balance.samples_per_insert)}."
    )
    return [sentence]
