"""Make and stop the fetchers of a dataset, one for each server, and check what the servers tell first."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

from reverb_writer.client.client import Client
from reverb_writer.client.waiting_log import logged
from reverb_writer.errors import SpecError
from reverb_writer.reading.read_options import ReadOptions
from reverb_writer.reading.thread_fetcher import ThreadFetcher
from reverb_writer.reading.waiting import unchained
from reverb_writer.table_info import ServerInfo, TableInfo, check_tables_exist

LEAST_S = 0.05
"""Time for a question to a server, in seconds, even if the time-out has been spent on others."""

_STOP_S = 3.0
_ORDERED = ("fifo", "max_heap", "min_heap")


def check_end(table: str, options: ReadOptions, infos: Sequence[ServerInfo]) -> None:
    """Check, by what the servers tell, that `max_samples` and `single_pass` can work."""
    if options.max_samples is not None and len(infos) > 1:
        raise SpecError(
            f"`max_samples` is for one server, got {len(infos)}: none knows how many the others have given. Make a "
            "dataset for each."
        )
    if options.single_pass:
        for info in infos:
            _check_single_pass(info.tables[table])


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
    """Ask each server for its tables, within `timeout_s` seconds for all of them; log every ten seconds who is awaited.

    Raises:
        StructureError: a server has no such table; names those it has.
        ServerUnavailableError, ReplayTimeoutError: a server does not answer in time.
    """
    deadline = time.monotonic() + timeout_s
    infos: list[ServerInfo] = []

    def waited_for() -> str:
        return ", ".join(shard.address for shard in client.shards[len(infos) :][:1])

    with logged(lambda: f"table `{table}`: waiting for the server at {waited_for()}"), unchained():
        for shard in client.shards:
            infos.append(shard.request_info(max(deadline - time.monotonic(), LEAST_S)))
            check_tables_exist([table], infos[-1], shard.address)
    return infos


def make_fetchers(
    client: Client,
    infos: Sequence[ServerInfo],
    table: str,
    batch_size: int,
    options: ReadOptions,
    wake: Callable[[], None],
    **how: Any,
) -> list[ThreadFetcher]:
    """Make a fetcher for each server; none is started.

    `how` has `prepare` and `finish` of a `ThreadFetcher`, if batches are not just samples; both get the server's
    `ServerConnection` first. `wake` is called whenever a batch or an error is ready.
    """
    return [
        ThreadFetcher(
            shard.channel,
            info,
            table,
            batch_size,
            options,
            wake=wake,
            **{name: functools.partial(function, shard) for name, function in how.items()},
        )
        for shard, info in zip(client.shards, infos, strict=True)
    ]


def stop_fetchers(fetchers: Sequence[ThreadFetcher], max_silence_s: float = 0.0, timeout_s: float = _STOP_S) -> None:
    """Stop fetching. All fetchers stop asking before this waits for one.

    Args:
        fetchers: of the dataset.
        max_silence_s: see `ThreadFetcher.stop_asking`.
        timeout_s: time-out of the wait for all threads together, in seconds; one may be in a call to its server.
    """
    deadline = time.monotonic() + min(timeout_s, _STOP_S)
    for fetcher in fetchers:
        fetcher.stop_asking()
    for fetcher in fetchers:
        fetcher.stop_asking(min(max_silence_s, timeout_s))
    for fetcher in fetchers:
        fetcher.stop()
    for fetcher in fetchers:
        fetcher.join(max(deadline - time.monotonic(), 0.0))
