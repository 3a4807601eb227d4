"""Make and stop the fetchers of a dataset, and check what the servers tell first."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from reverb_writer.client.client import Client
from reverb_writer.client.on_shards import answering, logged, on_all
from reverb_writer.client.server_calls import Server
from reverb_writer.client.weights import EXACT
from reverb_writer.errors import SpecError
from reverb_writer.reading.global_sampler import GlobalSampler
from reverb_writer.reading.read_options import ReadOptions
from reverb_writer.reading.thread_fetcher import ThreadFetcher
from reverb_writer.reading.waiting import unchained
from reverb_writer.tables.table_info import ServerInfo, TableInfo, check_tables_exist

_LOG = logging.getLogger(__package__)

LEAST_S = 0.05
"""Time for a question to a server, in seconds, even if the time-out has been spent on others."""

MAX_SILENCE_S = 0.25
"""When the last sample in flight came so many seconds ago, no more is waited for at the end."""

_STOP_S = 3.0
_ORDERED = ("fifo", "max_heap", "min_heap")


def check_end(table: str, options: ReadOptions, infos: Iterable[ServerInfo]) -> None:
    """Check, by what the servers tell, that `max_samples` and `single_pass` can work."""
    infos = list(infos)
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


def request_infos(client: Client, table: str, timeout_s: float, *, needs_all: bool = False) -> dict[str, ServerInfo]:
    """Ask all servers at once for their tables; log every ten seconds who is awaited.

    Args:
        client: of the servers. Those that its target says are lost are not asked.
        table: that each must have.
        timeout_s: time-out in seconds.
        needs_all: whether a server that does not answer is an error. If not, those are left out that do not answer
            within two seconds, while another does; fetchers take them in when they do.

    Returns:
        The answers by name of the shard, at least one.

    Raises:
        StructureError: a server has no such table; names those it has.
        ServerUnavailableError, ReplayTimeoutError: no server answers in time, or not all that are needed.
    """
    present = client.in_state("up", "draining")
    addresses = ", ".join(shard.address for shard in present)
    with logged(lambda: f"table `{table}`: waiting for the server at {addresses}"), unchained():
        if needs_all:
            infos = dict(zip(present, on_all(present, lambda shard: shard.request_info(timeout_s)), strict=True))
        else:
            infos = answering(present, timeout_s)
    for shard in present:
        if shard in infos:
            check_tables_exist([table], infos[shard], shard.address)
        else:
            _LOG.warning("Table `%s` is read without the server at %s, which does not answer.", table, shard.address)
    return {shard.name: info for shard, info in infos.items()}


class Fetchers:
    """The fetchers of a table: one for each server, or one that samples all servers as one."""

    def __init__(
        self,
        client: Client,
        infos: Mapping[str, ServerInfo],
        table: str,
        batch_size: int,
        options: ReadOptions,
        *,
        wake: Callable[[], None],
        remember: Callable[[Sequence[int], Server], object],
        **how: Any,
    ) -> None:
        """Make the fetchers; none is started.

        Args:
            client: of the servers.
            infos: tables of those that have answered, by name of the shard.
            table: name of the table.
            batch_size: samples in a batch.
            options: of the dataset.
            wake: called whenever a batch or an error is ready.
            remember: gets keys of samples, and the server that they come from, if one fetcher has several.
            how: `prepare` and `finish` of a `ThreadFetcher`, if batches are not just samples.
        """
        tables = [info.tables[table] for info in infos.values()]
        self._client, self._shards = client, client.shards

        def make(server: Server, info: ServerInfo | None, **more: Any) -> ThreadFetcher:
            return ThreadFetcher(server, info, tables[0], batch_size, options, wake=wake, **how, **more)

        self._make = make
        # Whether there is one fetcher for all servers. `all` grows when the client's target gets more of them.
        self.together = client.may_have_several and not options.has_end and {one.sampler for one in tables} <= EXACT
        if self.together:
            make_sampler = functools.partial(
                GlobalSampler, client, infos, tables[0], batch_size=batch_size, remember=remember
            )
            self.all = [self._make(self._shards[0], None, make_sampler=make_sampler)]
        else:
            self.all = [self._make(shard, infos.get(shard.name)) for shard in self._shards]

    def follow_target(self) -> None:
        """Begin with servers that are new in the client's target, and end with those that have left it.

        After an interrupt the next call does the rest. Once the dataset is closed, nothing begins.
        """
        shards = self._client.shards
        if not (self.together or shards is self._shards or self._is_closing):
            for fetcher in self.all:
                if fetcher.server not in shards:
                    fetcher.stop()
            present = {fetcher.server for fetcher in self.all if not fetcher.is_stopped}
            for shard in shards:
                if shard not in present:
                    self._begin(self._make(shard, None))
            self._shards = shards
        if self._is_closing:  # another thread may have closed the dataset meanwhile, and not know those that are new
            stop_fetchers([one for one in self.all if not (one.is_stopped or one.is_closing)], MAX_SILENCE_S)

    @property
    def _is_closing(self) -> bool:
        return any(fetcher.is_closing for fetcher in self.all)

    def _begin(self, fetcher: ThreadFetcher) -> None:
        """Start a fetcher; after an interrupt it is stopped, and may be in `all` or not."""
        try:
            fetcher.start()
            self.all.append(fetcher)
        except BaseException:
            fetcher.stop()
            raise


def stop_fetchers(fetchers: Sequence[ThreadFetcher], max_silence_s: float = 0.0, timeout_s: float = _STOP_S) -> None:
    """Stop fetching. All fetchers stop asking before this waits for one.

    `timeout_s` is for all together: half of it for samples in flight, and the rest for threads, which may be in a call
    to their server.
    """
    began_at = time.monotonic()
    for fetcher in fetchers:
        fetcher.stop_asking()
    for fetcher in fetchers:
        fetcher.stop_asking(max_silence_s, began_at + timeout_s / 2)
    for fetcher in fetchers:
        fetcher.stop()
    deadline = min(began_at + timeout_s, time.monotonic() + _STOP_S)
    for fetcher in fetchers:
        fetcher.join(max(deadline - time.monotonic(), 0.0))
