"""What fetches a dataset's samples: a thread for each server."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

from reverb_writer.client.client import Client
from reverb_writer.client.waiting_log import logged
from reverb_writer.errors import SpecError
from reverb_writer.reading.fetch_options import FetchOptions
from reverb_writer.reading.priority_updates import PriorityUpdates
from reverb_writer.reading.thread_fetcher import ThreadFetcher
from reverb_writer.reading.waiting import unchained
from reverb_writer.transport.server_info import ServerInfo, TableInfo, check_tables_exist

__all__ = ["check_end", "picklable_client", "request_infos", "shut_down", "start_sources", "stop_sources"]

_STOP_S = 3.0
_LEAST_S = 0.05  # a server that is asked at all has a chance to answer
_ORDERED = ("fifo", "max_heap", "min_heap")


def check_end(plan: FetchOptions, infos: Sequence[ServerInfo]) -> None:
    """Check that samples can end as they are to, by what the servers tell.

    Raises:
        SpecError: `max_samples` of several servers, or a single pass over a table whose items do not come once each and
            in order.
    """
    if plan.max_samples is not None and len(infos) > 1:
        raise SpecError(
            f"`max_samples` is for one server, got {len(infos)}: none knows what the others have given. Make a dataset "
            "for each."
        )
    if plan.single_pass:
        for info in infos:
            _check_single_pass(info.tables[plan.table])


def _check_single_pass(table: TableInfo) -> None:
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


def request_infos(client: Client, table: str, timeout_s: float) -> list[ServerInfo]:
    """Ask each server for its tables, `timeout_s` seconds at most for all of them; log every ten what is waited for.

    Raises:
        StructureError: a server has no such table; names those that are.
        ServerUnavailableError, ReplayTimeoutError: a server does not answer in time.
    """
    deadline = time.monotonic() + timeout_s
    infos: list[ServerInfo] = []

    def waited_for() -> str:
        return ", ".join(shard.address for shard in client.shards[len(infos) :][:1])

    with logged(lambda: f"table `{table}`: waiting for the server at {waited_for()}"), unchained():
        for shard in client.shards:
            infos.append(shard.request_info(max(deadline - time.monotonic(), _LEAST_S)))
            check_tables_exist([table], infos[-1], shard.address)
    return infos


def start_sources(
    client: Client, infos: Sequence[ServerInfo], plan: FetchOptions, wake: Callable[[], None]
) -> list[ThreadFetcher]:
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
            sources.append(ThreadFetcher(shard.channel, info, plan, wake=wake))
            started.callback(stop_sources, sources[-1:])
        started.pop_all()
    return sources


def stop_sources(sources: Sequence[ThreadFetcher], drain_s: float = 0.0, timeout_s: float = _STOP_S) -> None:
    """Stop fetching. All are stopped before one is waited for.

    Args:
        sources: what fetches.
        drain_s: see `ThreadFetcher.drain`.
        timeout_s: how long their threads are waited for at most, together, seconds; one may be in a call to its server.
    """
    deadline = time.monotonic() + min(timeout_s, _STOP_S)
    for source in sources:
        source.drain(0.0)
    for source in sources:
        source.drain(min(drain_s, timeout_s))
    for source in sources:
        source.stop()
    for source in sources:
        source.join(max(deadline - time.monotonic(), 0.0))


def shut_down(sources: Sequence[ThreadFetcher], updates: PriorityUpdates, client: Client | None) -> None:
    """End what a dataset has started; `client` if it is its own. Does nothing in a forked child."""
    if any(source.is_forked for source in sources):
        return
    stop_sources(sources)
    updates.close(1.0)
    if client is not None:
        client.close()


def picklable_client(client: Any) -> Any:
    """Return what another process can make a dataset's client of."""
    return client if isinstance(client, Client) else getattr(client, "server_address", client)
