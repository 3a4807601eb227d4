"""What fetches a dataset's samples: a thread for each server, or processes.

A table says what can be: one that gives its items away keeps its order only with one reader, and only a thread of the
learner's own process delivers all that was given to it.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence

from reverb_writer.client import Client
from reverb_writer.errors import SpecError
from reverb_writer.reading.prefetch import Plan, Prefetch
from reverb_writer.reading.priority_updates import PriorityUpdates
from reverb_writer.reading.turns import Source
from reverb_writer.reading.workers import Worker, can_start
from reverb_writer.wire.server_info import ServerInfo, TableInfo

__all__ = ["check_table", "let_go", "start_sources"]

_ORDERED = ("fifo", "max_heap", "min_heap")


def check_table(table: TableInfo, num_workers: int, *, single_pass: bool) -> None:
    """Check that a table can be read so.

    Raises:
        SpecError: it cannot; says why.
    """
    if num_workers and not can_start():
        raise SpecError(
            f"`num_workers` must be 0 here, got {num_workers}: worker processes need Linux and a Python executable."
        )
    if num_workers and table.max_times_sampled > 0:
        raise SpecError(
            f"`num_workers` must be 0 for `{table.name}`, whose items are removed when they have been sampled "
            f"{table.max_times_sampled} times, got {num_workers}: what a process has fetched is lost when it ends."
        )
    if not single_pass:
        return
    for role, selector in (("sampler", table.sampler), ("remover", table.remover)):
        if selector not in _ORDERED:
            raise SpecError(
                f"`single_pass` needs a table whose order is known: the {role} of `{table.name}` is {selector!r}, "
                f"expected one of {', '.join(map(repr, _ORDERED))}."
            )
    if table.max_times_sampled != 1:
        raise SpecError(
            f"`single_pass` needs items that are sampled once: `max_times_sampled` of `{table.name}` is "
            f"{table.max_times_sampled}, expected 1, else its first item would come again and again."
        )


def start_sources(
    client: Client, infos: Sequence[ServerInfo], plan: Plan, num_workers: int, wake: Callable[[], None]
) -> list[list[Source]]:
    """Start to fetch; return what does so for each server. If one cannot start, none goes on.

    Args:
        client: of the servers.
        infos: what they told at the beginning.
        plan: what is fetched of each.
        num_workers: processes for each, which share the cache; 0 for a thread.
        wake: called whenever something is ready.
    """
    if num_workers:
        plan = dataclasses.replace(plan, max_cache_bytes=max(plan.max_cache_bytes // num_workers, 1))
    servers: list[list[Source]] = []
    with contextlib.ExitStack() as started:
        for one, shard, info in zip(client.each(), client.shards, infos, strict=True):
            servers.append([])
            for _ in range(num_workers or 1):
                source: Source = (
                    Worker(one, info, plan, wake=wake)
                    if num_workers
                    else Prefetch(shard.channel, info, plan, wake=wake)
                )
                started.callback(source.close)
                servers[-1].append(source)
        started.pop_all()
    return servers


def let_go(sources: Sequence[Source], updates: PriorityUpdates, client: Client | None) -> None:
    """End what a dataset has started; `client` if it is its own. Does nothing in a forked child."""
    if any(source.is_forked for source in sources):
        return
    for source in sources:
        source.close()
    updates.close(1.0)
    if client is not None:
        client.close()
