"""Common to every dataset of a replay table: it is opened, iterated, converted, counted, closed and pickled."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import time
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from reverb_writer.arguments import check_timeout, check_wait
from reverb_writer.background import in_background, may_be_interrupted
from reverb_writer.client import server_set
from reverb_writer.client.client import Client, as_client
from reverb_writer.client.weights import EXACT
from reverb_writer.decoding.table_structure import TableStructure
from reverb_writer.errors import IncompleteError, ReplayTimeoutError, ServerUnavailableError, SpecError
from reverb_writer.reading.by_mass import ByMass
from reverb_writer.reading.mixer import Mixer
from reverb_writer.reading.prefetcher import BatchMaker, Prefetcher
from reverb_writer.reading.priority_updates import PriorityUpdates
from reverb_writer.reading.read_options import ReadOptions
from reverb_writer.reading.stats import DatasetStats
from reverb_writer.reading.views import Views
from reverb_writer.slices.batch import Batch
from reverb_writer.tables.table_info import ServerInfo, TableInfo, check_tables_exist

if TYPE_CHECKING:
    from typing_extensions import Self

_LOG = logging.getLogger(__package__)

_ORDERED = {"fifo", "max_heap", "min_heap"}
_LOOK_EVERY_S = 0.2  # why a wait lasts
_END_S = 5.0  # how long the main thread waits for the end of a dataset that was not closed
_STOP_S = 3.0  # for the thread to end
_MAX_SILENCE_S = 0.25  # when the last sample in flight came so long ago, no more is waited for at the end


class Dataset(Views):
    """An endless iterator over batches. Iterated by one thread at a time; the rest is thread-safe.

    Attributes:
        table: its name.
        timeout_s: time-out of a batch, in seconds.
    """

    table: str
    timeout_s: float
    gives_lists = False  # whether data are lists of samples, by `collate="list"`
    _arguments: tuple[tuple[Any, ...], dict[str, Any]]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Remember the arguments: where the dataset is unpickled, they open another one."""
        dataset = super().__new__(cls)
        dataset._arguments = args, kwargs
        return dataset

    def _open(self, client: Any, table: str, pool_size: int, options: ReadOptions, maker: BatchMaker) -> None:
        """Connect to the servers. If that fails, all that has started is stopped.

        The `maker` makes `pool_size` samples to batches together. It must not refer to the dataset, which could not be
        garbage then: the thread has it.
        """
        if not isinstance(table, str):
            raise SpecError(
                f"`table` must be the name of one table, got {table!r}. For several make a dataset of each, and a "
                "MixedDataset."
            )
        self.table, self._pool_size = table, pool_size
        self._client, self._owns_client = as_client(client, options.timeout_s)
        self.timeout_s = self._client.timeout_s if options.timeout_s is None else options.timeout_s
        self._stats = DatasetStats()
        parts: list[Any] = []  # the prefetcher and the priorities, as far as there are any
        # A dataset that is not closed must not hang the interpreter's end; nor one whose opening was interrupted.
        owned_client = self._client if self._owns_client else None
        self._finalizer = weakref.finalize(self, _shut_down, parts, owned_client)
        try:
            connect_s = self.timeout_s if options.connect_timeout_s is None else options.connect_timeout_s
            infos, info, rule = _open_table(self._client, table, options, connect_s)
            self._updates = PriorityUpdates(self._client, info)
            parts.append(self._updates)
            mixer = self._mixer = rule(self._client, infos, info, pool_size, options, self._updates.remember_owner)
            self._updates.lost_servers = lambda: mixer.lost_servers
            self._prefetcher = Prefetcher(mixer, maker, pool_size, options, TableStructure(table, info.signature))
            parts.append(self._prefetcher)
        except BaseException:
            self._finalizer()
            raise

    def __iter__(self) -> Iterator[Batch]:
        """Begin to fetch, and return the dataset itself; it continues where the last iteration ended."""
        self._prefetcher.start()
        return self

    def __next__(self) -> Batch:
        """Return the next batch; after `close()` or a single pass, a last batch of the remaining samples, then stop.

        The first call begins to fetch.

        Raises:
            ReplayTimeoutError: no batch within the time-out; names the cause with its numbers. No sample is lost.
            ServerUnavailableError: no batch within the time-out, and no server can be reached.
            UnsafeDataError, FormatError: a sample must not or cannot be decoded; it is skipped, the next call goes on.
            StructureError: samples differ in length or shape, which the dataset does not allow; or the table is gone.
            IncompleteError: all trajectories that arrived within the time-out are too short for a slice.
            ClosedError: in a forked child.
        """
        batch = self._next_batch(time.monotonic(), self.timeout_s)
        if batch is None:
            raise StopIteration
        return batch

    def take(self, timeout_s: float = 0.0) -> Batch | None:
        """Return what has arrived by now: a batch, or a smaller one of what has; None if there is nothing.

        It ends no iteration, and raises nothing because of a server that is slow or gone. It waits for no `transform`
        of another batch.

        Args:
            timeout_s: time to wait for a full batch, in seconds, >= 0.

        Raises:
            UnsafeDataError, FormatError, StructureError, ClosedError: as `next`.
        """
        start, timeout_s = time.monotonic(), check_wait(timeout_s)
        if timeout_s > 0:
            with contextlib.suppress(ReplayTimeoutError, ServerUnavailableError, IncompleteError):
                return self._next_batch(start, timeout_s)
        self._begin()
        return self._counted(self._prefetcher.pop() or self._prefetcher.pop_rest(), start)

    def _begin(self) -> None:
        if self._updates.is_forked:
            self._client.shards[0].channel.check_usable()
        self._prefetcher.start()

    def _next_batch(self, start: float, timeout_s: float) -> Batch | None:
        """Return the next batch; None at the end. The time-out counts from `start`, of `time.monotonic()`.

        While it waits, it has the servers asked for the cause, and logs that every ten seconds.
        """
        self._begin()
        woken, pause_s = self._prefetcher.woken, min(_LOOK_EVERY_S, timeout_s / 4)
        deadline, log_at, look_at = start + timeout_s, start + server_set.LOG_EVERY_S, time.monotonic() + pause_s
        while True:
            woken.clear()
            has_ended = self._prefetcher.has_ended  # before the look: nothing comes after it
            batch = self._counted(self._prefetcher.pop(waits=True), start)
            if batch is not None:
                return batch
            if not has_ended and woken.wait(min(deadline, look_at) - time.monotonic()):
                continue
            now = time.monotonic()
            if has_ended or now >= deadline:
                too_short, self._prefetcher.too_short = self._prefetcher.too_short, None
                if has_ended and too_short is None:
                    return None
                raise too_short or self._too_late(start, timeout_s)
            if now >= look_at:
                look_at, log_at = now + pause_s, self._look(now, start, log_at)

    def _counted(self, found: Batch | Exception | None, called_at: float) -> Batch | None:
        """Return a batch that is handed out, or raise the error in its place."""
        if isinstance(found, Exception):
            raise found
        if found is not None:
            now = time.monotonic()
            self._stats.batches += 1
            self._stats.samples += len(found.info)
            self._stats.wait_s += now - called_at
            self._stats.last_age_s = now - found.info.received_at
        return found

    def _look(self, now: float, start: float, log_at: float) -> float:
        """Have the servers asked for the cause of a wait, and log it at `log_at`; return when to log it next."""
        for source in self._mixer.sources:
            source.stream.look(now, start)
        if now < log_at:
            return log_at
        _LOG.warning("table `%s`: no batch for %.0f s. %s", self.table, now - start, self._why(start))
        return now + server_set.LOG_EVERY_S

    def _why(self, since: float) -> str:
        """Say what keeps samples from coming, for each server that has not ended."""
        streams = [source.stream for source in self._mixer.sources]
        return " ".join(stream.explain(since) for stream in streams if not stream.is_done)

    def _too_late(self, start: float, timeout_s: float) -> ReplayTimeoutError | ServerUnavailableError:
        stats = self.stats()
        foreign = f"{stats.foreign_items} of another structure were left out. " if stats.foreign_items else ""
        unsafe = f"{stats.skipped_samples} were unsafe or damaged, and skipped. " if stats.skipped_samples else ""
        losses = [source.stream.loss for source in self._mixer.sources]
        is_gone = all(loss is not None and not loss.is_silent for loss in losses)
        num_come = self._prefetcher.num_for_batch
        what = (
            f"{num_come} of {self._pool_size} samples have come. {foreign}{unsafe}{self._why(start)}"
            if not self._prefetcher.is_making
            else "its samples have come, and are still made to a batch. Make `transform` faster or raise `timeout_s`."
        )
        return (ServerUnavailableError if is_gone else ReplayTimeoutError)(
            f"table `{self.table}`: no batch within {timeout_s:.1f} s, {what}"
        )

    def update_priorities(self, batch_or_keys: Any, priorities: Any) -> None:
        """Set priorities of items, soon: the learner does not wait for the server.

        Args:
            batch_or_keys: a batch, of any view; its info; or [n] integers, as `batch.info.keys`. The server ignores
                keys of items that it has removed.
            priorities: [n], finite and >= 0, of any framework: tensors may have gradients and be on any device. Of
                several for one key the last one counts. A batch of slices has a key for each slice.

        Raises:
            SpecError: a priority cannot be one, or there are not as many as keys. Nothing changed.
            ClosedError: after `close()`.
        """
        self._updates.put(batch_or_keys, priorities)

    def flush_priorities(self, timeout_s: float | None = None) -> None:
        """Return when all priorities given so far are set, or counted as not set.

        `stats()` has the counters, `failed_priority_updates` and `gone_priority_updates`.

        Raises:
            ReplayTimeoutError: not within `timeout_s` seconds, or the dataset's time-out.
        """
        self._updates.flush(self.timeout_s if timeout_s is None else check_timeout(timeout_s))

    def stats(self) -> DatasetStats:
        """Return the counters so far."""
        stats = DatasetStats(**vars(self._stats))
        self._prefetcher.count(stats)
        stats.priority_updates, stats.failed_priority_updates = self._updates.num_sent, self._updates.num_failed
        stats.gone_priority_updates = self._updates.num_gone
        return stats

    def close(self, timeout_s: float | None = None) -> None:
        """Stop fetching, and set the priorities that are on their way. Idempotent.

        The samples that have arrived, `ready_samples` of `stats()`, can still be iterated over, in a last, smaller
        batch if need be. If sampling removes items from a table, the samples in flight are read first.

        Args:
            timeout_s: time-out of the whole call, in seconds: half of it at most for samples in flight, and the rest
                for priorities that are not set yet. None for the dataset's.
        """
        timeout_s = self.timeout_s if timeout_s is None else check_timeout(timeout_s)
        # The finalizer is alive until the end of all below, which may be interrupted.
        if not self._finalizer.alive or self._updates.is_forked:
            return
        began_at = time.monotonic()
        deadline = began_at + timeout_s
        lost = self._updates.lost_servers()  # before `stop` ends the streams of the others
        self._updates.lost_servers = lambda: lost
        self._prefetcher.stop(_MAX_SILENCE_S, began_at + timeout_s / 2)
        self._prefetcher.join(min(timeout_s, timeout_s / 2 + _STOP_S))
        self._updates.close(max(deadline - time.monotonic(), 0.0))
        if self._owns_client:
            self._client.close()
        self._finalizer.detach()

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how to open a dataset like this one in another process; samples fetched by this one stay here."""
        args, kwargs = self._arguments
        given = inspect.signature(type(self)).bind(*args, **kwargs)
        replay = given.arguments["replay"]
        if not isinstance(replay, Client):  # a picklable argument that makes the same client
            given.arguments["replay"] = getattr(replay, "server_address", replay)
        return functools.partial(type(self), *given.args, **given.kwargs), ()

    def __repr__(self) -> str:
        stats = self.stats()
        counts = f"{stats.batches} batches, {stats.ready_samples} samples ready"
        return f"<{type(self).__name__} of {self.table} at {self._client.address}: {counts}>"


def _shut_down(parts: list[Any], client: Client | None) -> None:
    """End the threads of a dataset, and close `client` if the dataset owns one. Does nothing in a forked child.

    The garbage collector may call this in any thread, such as one that is to end here or holds a lock that is needed.
    So another thread does it. Only the main thread waits for that: it may be about to end the process.
    """
    if parts and parts[0].is_forked:
        return
    ended = in_background(functools.partial(_end, parts, client))
    if may_be_interrupted() and ended.wait(_END_S):
        ended.result()


def _end(parts: list[Any], client: Client | None) -> None:
    for prefetcher in parts[1:]:
        prefetcher.stop(discards=True)
        prefetcher.join(_STOP_S)
    if parts:
        parts[0].close(1.0)  # the priorities
    if client is not None:
        client.close()


def _open_table(
    client: Client, table: str, options: ReadOptions, timeout_s: float
) -> tuple[dict[str, ServerInfo], TableInfo, type[Mixer]]:
    """Return the tables of the servers, by name of the shard, the table as the first one tells it, and its mixer."""
    infos = _request_infos(client, table, timeout_s, needs_all=options.has_end)
    tables = [info.tables[table] for info in infos.values()]
    for one in tables if options.single_pass else ():
        if not {one.sampler, one.remover} <= _ORDERED or one.max_times_sampled != 1:
            raise SpecError(
                "`single_pass` needs a table whose sampler and remover are 'fifo', 'max_heap' or 'min_heap', and whose "
                f"`max_times_sampled` is 1: `{table}` has {one.sampler!r}, {one.remover!r} and {one.max_times_sampled}."
            )
    is_exact = client.connections.may_have_several and not options.has_end and {one.sampler for one in tables} <= EXACT
    return infos, tables[0], ByMass if is_exact else Mixer


def _request_infos(client: Client, table: str, timeout_s: float, *, needs_all: bool) -> dict[str, ServerInfo]:
    """Ask all servers at once for their tables, by name of the shard; log every ten seconds who is awaited.

    Servers that their target says are lost are not asked. One that does not answer is an error if `needs_all`. If not,
    it is left out if it does not answer within two seconds, while another does; it is read when it does.
    """
    present = client.connections.in_state("up", "draining")
    addresses = ", ".join(shard.address for shard in present)
    with server_set.logged(lambda: f"table `{table}`: waiting for the server at {addresses}"):
        try:
            if needs_all:
                infos = dict(
                    zip(present, server_set.on_all(present, lambda shard: shard.request_info(timeout_s)), strict=True)
                )
            else:
                infos = server_set.answering(present, timeout_s)
        except (ReplayTimeoutError, ServerUnavailableError) as error:
            raise error from None  # without gRPC's error: the message names the cause
    for shard in present:
        if shard in infos:
            check_tables_exist([table], infos[shard], shard.address)
        else:
            _LOG.warning("Table `%s` is read without the server at %s, which does not answer.", table, shard.address)
    return {shard.name: info for shard, info in infos.items()}
