"""Calls to several servers at once, or to the first that answers; samples of several servers, drawn as of one."""

from __future__ import annotations

import contextlib
import functools
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np

from reverb_writer.background import in_background
from reverb_writer.client.server_calls import Sample
from reverb_writer.deadline import Deadline
from reverb_writer.errors import ReplayTimeoutError, ServerUnavailableError
from reverb_writer.shards.server_set import ServerSet, ShardServer
from reverb_writer.shards.weights import EXACT, mean_weight, shares
from reverb_writer.tables.table_info import ServerInfo, check_tables_exist

_T = TypeVar("_T")

_ANSWER_WITHIN_S = 2.0  # time for an answer, if there are several servers
_RETRY_S = 0.1


def on_each(
    shards: Sequence[ShardServer], verb: Callable[[ShardServer], _T]
) -> tuple[dict[ShardServer, _T], dict[ShardServer, Exception]]:
    """Call all shards at once; return the results, and the errors of unreachable shards.

    Any other error is raised when all calls have ended; the first one if several fail.
    """
    outcomes = {shard: in_background(functools.partial(verb, shard)) for shard in shards}
    for outcome in outcomes.values():
        outcome.wait()
    done: dict[ShardServer, _T] = {}
    unreachable: dict[ShardServer, Exception] = {}
    for shard, outcome in outcomes.items():
        try:
            done[shard] = outcome.result()
        except (ReplayTimeoutError, ServerUnavailableError) as error:
            unreachable[shard] = error
    return done, unreachable


def on_all(shards: Sequence[ShardServer], verb: Callable[[ShardServer], _T]) -> list[_T]:
    """Call all shards at once, and return the results in the shards' order.

    The first error is raised when all calls have ended; errors of reachable shards have precedence.
    """
    if len(shards) == 1:
        return [verb(shards[0])]
    done, unreachable = on_each(shards, verb)
    for error in unreachable.values():
        raise error
    return [done[shard] for shard in shards]


def answering(
    shards: Sequence[ShardServer], timeout_s: float, tables: Iterable[str], *, needs_all: bool = False
) -> dict[ShardServer, ServerInfo]:
    """Return the tables of the shards that answer. Several shards have two seconds, and are asked until one answers.

    With `needs_all`, each shard has `timeout_s` seconds, and the first error of a shard is raised.

    Raises ServerUnavailableError if no shard answers within `timeout_s` seconds, ReplayTimeoutError if the only shard
    is connected but does not answer, or StructureError if a shard lacks one of the `tables`.
    """
    if needs_all or len(shards) == 1:
        answers = on_all(shards, lambda shard: shard.channel.server_info(timeout_s))
        infos = dict(zip(shards, answers, strict=True))
    else:
        infos = _first_answers(shards, timeout_s)
    for shard, info in infos.items():
        check_tables_exist(tables, info, shard.address)
    return infos


def _first_answers(shards: Sequence[ShardServer], timeout_s: float) -> dict[ShardServer, ServerInfo]:
    until = time.monotonic() + timeout_s
    while True:
        wait_s = max(min(until - time.monotonic(), _ANSWER_WITHIN_S), _RETRY_S)
        found, unreachable = on_each(shards, functools.partial(_ask, timeout_s=wait_s))
        if found:
            return found
        if time.monotonic() + _RETRY_S > until:
            names = ", ".join(shard.name for shard in shards)
            why = "".join(f" {error}" for error in unreachable.values())
            raise ServerUnavailableError(f"none of {names} answers within {timeout_s:.1f} s.{why}")
        time.sleep(_RETRY_S)


def sample_each(
    connections: ServerSet, table: str, num_wanted: Callable[[str, ServerInfo], int], deadline: Deadline
) -> dict[str, list[Sample]]:
    """Return samples of each shard that answers, by its name, of which more than none are wanted.

    `num_wanted` gets the name of a shard and its answer. Shards that fail are left out; if all do that have answered,
    the first error is raised, as `answering` raises it if none answers.
    """
    infos = answering(connections.in_state("up", "draining"), deadline.left_s(), [table])
    wanted = {shard: number for shard, info in infos.items() if (number := num_wanted(shard.name, info)) > 0}
    read, failed = on_each([*wanted], lambda shard: [*shard.server.sample(table, wanted[shard], deadline)])
    if len(failed) == len(infos):
        raise next(iter(failed.values()))
    return {shard.name: samples for shard, samples in read.items()}


def first_that_answers(shards: Sequence[ShardServer], deadline: Deadline) -> ShardServer:
    """Return the first server that answers within two seconds, or within half of the time left; else the first one."""
    for shard in shards if len(shards) > 1 else ():
        with contextlib.suppress(ServerUnavailableError, ReplayTimeoutError):
            _ask(shard, min(deadline.left_s() / 2, _ANSWER_WITHIN_S))
            return shard
    return shards[0]


def _ask(shard: ShardServer, timeout_s: float) -> ServerInfo:
    return shard.channel.start_info(timeout_s).result()


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
