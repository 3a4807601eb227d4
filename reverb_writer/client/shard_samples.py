"""Samples of a table that lies on several servers, one after the other."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from reverb_writer.background import in_background
from reverb_writer.client.on_shards import answering
from reverb_writer.client.server_connection import Sample, ServerConnection
from reverb_writer.client.shard_weights import EXACT, mean_weight, shares
from reverb_writer.deadline import Deadline
from reverb_writer.table_info import check_tables_exist


def sample_shards(
    shards: Sequence[ServerConnection], first: int, table: str, num_samples: int, deadline: Deadline
) -> Iterator[Sample]:
    """Sample items one after the other: of all servers as one table, or of each in its turn.

    `first`, modulo their number, is the server whose turn comes first; `deadline` that of all samples together.

    Servers that do not answer are left out; so are those that hand out nothing now, unless no other does.
    """
    infos = answering(shards, deadline.left_s())
    for shard, info in infos.items():
        check_tables_exist([table], info, shard.address)
    ready = [shard for shard, info in infos.items() if info.tables[table].num_ready()] or list(infos)
    tables = [infos[shard].tables[table] for shard in ready]
    if not {one.sampler for one in tables} <= EXACT:
        order = [(first + turn) % len(ready) for turn in range(num_samples)]
        streams = _streams(ready, table, order, [[] for _ in ready], deadline)
        yield from (next(streams[number]) for number in order)
        return
    known: list[list[Sample]] = [[] for _ in ready]
    sizes, means = [one.current_size for one in tables], [1.0] * len(ready)
    if tables[0].sampler_exponent is not None and not tables[0].max_times_sampled:
        begun = [in_background(functools.partial(next, shard.sample(table, 1, deadline))) for shard in ready]
        for number, answer in enumerate(begun):
            info = answer.result().info
            known[number].append(answer.result())
            sizes[number] = info.table_size
            means[number] = mean_weight(tables[number].sampler_exponent, info.priority, info.probability, sizes[number])
    share = shares(sizes, means)
    if not any(share):
        share = [1 / len(ready)] * len(ready)
    order = np.random.default_rng().choice(len(ready), num_samples, p=share).tolist()
    streams = _streams(ready, table, order, known, deadline)
    for number in order:
        sample = next(streams[number])
        info = sample.info._replace(probability=share[number] * sample.info.probability, table_size=sum(sizes))
        yield sample._replace(info=info)


def _streams(
    shards: Sequence[ServerConnection],
    table: str,
    order: Sequence[int],
    known: Sequence[Sequence[Sample]],
    deadline: Deadline,
) -> list[Iterator[Sample]]:
    """Return the samples of each server, as many as `order` has its number, `known` ones first."""
    missing = [order.count(number) - len(known[number]) for number in range(len(shards))]
    return [
        itertools.chain(first, shard.sample(table, num_samples, deadline) if num_samples > 0 else ())
        for shard, first, num_samples in zip(shards, known, missing, strict=True)
    ]
