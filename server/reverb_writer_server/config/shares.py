"""What one of several servers that are one replay serves of the tables that they configure together."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import TYPE_CHECKING

from reverb_writer.errors import SpecError
from reverb_writer.tables.shares import share_of
from reverb_writer_server.config.advice import advice
from reverb_writer_server.config.sources import ConfigError, Settings

if TYPE_CHECKING:
    from reverb_writer_server.config.schema import ServedTable


def shares_of(
    settings: Settings, tables: tuple[ServedTable, ...], shards: int, shard: int | None
) -> tuple[ServedTable, ...]:
    """Return the tables of server `shard` of `shards`.

    Raises:
        ConfigError: there is no such server, or its share of a table would not work.
    """
    if shards == 1 and not shard:
        return tables
    if shard is None or shard >= shards:
        origin = settings.origin("cluster", "shards" if shard is None else "shard")
        got = "nothing" if shard is None else shard
        raise ConfigError(
            f"{origin}: `cluster.shard`: got {got}, allowed: 0 to {shards - 1}, for `cluster.shards` is {shards}."
        )
    return tuple(_share(settings, table, shards, shard) for table in tables)


def _share(settings: Settings, table: ServedTable, shards: int, shard: int) -> ServedTable:
    name = table.config.name
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            config = share_of(table.config, shard, shards)
    except SpecError as error:
        raise ConfigError(f"{settings.origin('tables', name)}: `cluster.shards` = {shards}: {error}") from error
    warned = dict.fromkeys(str(warning.message) for warning in caught)
    return replace(table, config=config, advice=(*warned, *advice(config)))
