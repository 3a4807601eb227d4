"""What fetches a dataset's samples: a thread for each server."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from reverb_writer.client import Client
from reverb_writer.errors import SpecError
from reverb_writer.reading.prefetch import Plan, Prefetch
from reverb_writer.reading.priority_updates import PriorityUpdates
from reverb_writer.wire.server_info import ServerInfo, TableInfo

__all__ = ["check_single_pass", "let_go", "start_sources"]

_ORDERED = ("fifo", "max_heap", "min_heap")


def check_single_pass(table: TableInfo) -> None:
    """Check that each item of a table comes once and in order.

    Raises:
        SpecError: it does not; says why.
    """
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


def start_sources(client: Client, infos: Sequence[ServerInfo], plan: Plan, wake: Callable[[], None]) -> list[Prefetch]:
    """Start to fetch; return what does so for each server. If one cannot start, none goes on.

    Args:
        client: of the servers.
        infos: what they told at the beginning.
        plan: what is fetched of each.
        wake: called whenever something is ready.
    """
    with contextlib.ExitStack() as started:
        sources = []
        for shard, info in zip(client.shards, infos, strict=True):
            sources.append(Prefetch(shard.channel, info, plan, wake=wake))
            started.callback(sources[-1].close)
        started.pop_all()
    return sources


def let_go(sources: Sequence[Prefetch], updates: PriorityUpdates, client: Client | None) -> None:
    """End what a dataset has started; `client` if it is its own."""
    for source in sources:
        if not source.is_forked:
            source.close()
    updates.close(1.0)
    if client is not None:
        client.close()
