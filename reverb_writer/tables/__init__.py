"""Tables of a replay server: their configuration, and what a server reports about them. Pure.

    table_config     what a table is: selectors, rate limiters, sizes
    table_dicts      a table as plain values, for TOML and JSON
    table_messages   a table in Reverb's messages
    shares           one shard's part of a table that several shards serve together
    table_info       the tables of a server as it reports them
    rate_limits      which side of a rate limiter waits, and why

Importing this package loads `table_config` only.
"""

from __future__ import annotations

from reverb_writer.tables.table_config import (
    Balance,
    MinSize,
    Prioritized,
    Queue,
    RateLimiter,
    SampleToInsertRatio,
    Selector,
    Stack,
    TableConfig,
    check_tables,
    check_unique_names,
)

__all__ = [
    "Balance",
    "MinSize",
    "Prioritized",
    "Queue",
    "RateLimiter",
    "SampleToInsertRatio",
    "Selector",
    "Stack",
    "TableConfig",
    "check_tables",
    "check_unique_names",
]
