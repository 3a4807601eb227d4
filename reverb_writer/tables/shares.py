"""One shard's share of a table that has the sizes and bounds of all shards together. Pure."""

from __future__ import annotations

from dataclasses import replace

from reverb_writer.arguments import integer
from reverb_writer.errors import SpecError
from reverb_writer.tables import MinSize, Queue, RateLimiter, SampleToInsertRatio, TableConfig


def share_of(table: TableConfig, shard: int, num_shards: int) -> TableConfig:
    """Return the table of one of several shards that together serve `table`.

    `max_size` is split so that sizes differ by at most one. `min_size` is rounded up, so that all shards together hold
    at least `min_size` items before the first sample. An error buffer is split evenly. Each shard has a whole table of
    one item, such as the table of `Variables`.

    Args:
        table: the table with the sizes of all shards together.
        shard: number of the shard, from 0.
        num_shards: number of shards, >= 1.

    Raises:
        SpecError: a share is too small to work; the error names it and the needed sizes.

    >>> share_of(TableConfig("replay", 10, rate_limiter=MinSize(5)), 0, 4)  # of 10 items: 3, 3, 2 and 2
    TableConfig(name='replay', max_size=3, sampler='uniform', remover='fifo', rate_limiter=MinSize(min_size=2), \
max_times_sampled=0, signature=None)
    """
    num_shards = integer("num_shards", num_shards, minimum=1)
    shard = integer("shard", shard, minimum=0, maximum=num_shards - 1)
    if table.max_size == 1:
        return table
    if table.max_size < num_shards:
        raise SpecError(
            f"table `{table.name}`: `max_size` is the size of all {num_shards} shards together and must be 1 or >= "
            f"{num_shards}, got {table.max_size}."
        )
    try:
        limiter = _limiter(table.rate_limiter, shard, num_shards)
        return replace(table, max_size=_part(table.max_size, shard, num_shards), rate_limiter=limiter)
    except SpecError as error:
        raise SpecError(
            f"table `{table.name}`: sizes and bounds are those of all {num_shards} shards together, and one shard's "
            f"share cannot work: {error}"
        ) from error


def _limiter(limiter: RateLimiter, shard: int, num_shards: int) -> RateLimiter:
    if isinstance(limiter, Queue):
        return type(limiter)(_part(limiter.size, shard, num_shards))
    min_size = -(-limiter.balance.min_size // num_shards)
    if isinstance(limiter, MinSize):
        return MinSize(min_size)
    if isinstance(limiter.error_buffer, tuple):
        low, high = limiter.error_buffer
        return SampleToInsertRatio(limiter.samples_per_insert, min_size, (low / num_shards, high / num_shards))
    return SampleToInsertRatio(limiter.samples_per_insert, min_size, limiter.error_buffer / num_shards)


def _part(total: int, shard: int, num_shards: int) -> int:
    return total // num_shards + (shard < total % num_shards)
