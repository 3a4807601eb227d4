"""Fetch samples of one table ahead of their use, in a thread, bounded.

    SampleFetcher or GlobalSampler -> BatchAssembler -> batches that are ready -> take(), which frees room for more

At most `max_in_flight_batches` batches are in flight, being assembled, or ready. After a lost connection the thread
reconnects and asks again for the samples that did not arrive. Batches come in the order in which the server chose their
samples. A message that cannot be read ends a stream: the reader gets an error for it, and once it has, the thread opens
another stream.
"""

from __future__ import annotations

import collections
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from reverb_writer.background import Flag, start_thread, uninterrupted
from reverb_writer.client.server_calls import Server
from reverb_writer.decoding.batch_assembler import BatchAssembler
from reverb_writer.decoding.samples import BatchInfo
from reverb_writer.decoding.table_structure import TableStructure
from reverb_writer.errors import (
    ClosedError,
    FormatError,
    ReverbWriterError,
    ServerUnavailableError,
    UnsafeDataError,
)
from reverb_writer.reading.global_sampler import GlobalSampler
from reverb_writer.reading.read_options import ReadOptions
from reverb_writer.reading.server_link import RETRY_S, ServerLink, fetch_until_closed
from reverb_writer.reading.stats import FetchStats
from reverb_writer.tables.table_info import ServerInfo, TableInfo
from reverb_writer.transport.sample_fetcher import SampleFetcher

Fetched = tuple[Any, BatchInfo]
"""What a thread makes of the samples of a batch: their columns, or slices of them. And the info of the samples."""

Part = tuple[Callable[[], Any], BatchInfo]
"""A part of a batch: a function that makes it, and the info of the samples that are fully delivered with it."""

_LOG = logging.getLogger(__package__)


class ThreadFetcher:
    """The samples of one table on one server, ahead of their use.

    Or on several servers, of which a `GlobalSampler` makes one.
    """

    def __init__(
        self,
        server: Server,
        info: ServerInfo | None,
        table: TableInfo,
        batch_size: int,
        options: ReadOptions,
        *,
        wake: Callable[[], None],
        structure: TableStructure | None = None,
        finish: Callable[[str, BatchAssembler], Sequence[Part]] | None = None,
        make_sampler: Callable[..., GlobalSampler] | None = None,
    ) -> None:
        """Prepare to fetch; `start` begins.

        Args:
            server: its connection, not closed by this; the first one of several.
            info: the server's tables at the beginning; None if it has not answered yet, or of several servers.
            table: the table at the beginning.
            batch_size: samples in a batch.
            options: of the dataset.
            wake: called from the thread whenever a batch or an error is ready.
            structure: of the table; samples of another one are left out. None to take all.
            finish: divides a full batch into parts, which are made ready one after the other as they are taken; gets
                the server's address, "" for several. It must call the assembler's `begin_next`, at the latest when the
                last part is made. None for one part, the samples.
            make_sampler: makes what samples the table on several servers together; gets `max_samples`, `num_held` and
                `pause`. None for one server.
        """
        self._link = ServerLink(server.channel, table.name, info)
        self._server, self._table = server, table.name
        self._batch_size, self._skip_unsafe, self._wake = batch_size, options.skip_unsafe, wake
        self._finish, self._max_ready = finish, options.max_in_flight_batches
        self._arrived: list[Any] = []  # samples that are not assembled; changed by the thread that holds `_assembling`
        self._parts: collections.deque[Part] = collections.deque()  # of the last batch, that are not made
        self._assembler = BatchAssembler(
            options.max_cache_bytes,
            options.max_sample_bytes,
            batch_size=batch_size,
            # The reader holds one batch, and all those ahead have arrays, too.
            num_buffers=options.max_in_flight_batches + 1 if options.reuse_buffers else 0,
            structure=structure,
        )
        limits = [options.max_samples, table.current_size if options.single_pass else None]
        self._changed = Flag()  # there is more room, or the end has come
        held: dict[str, Any] = {
            "max_samples": batch_size * options.max_in_flight_batches,
            "num_held": self._num_held,
            "pause": self._wait_for_change,
        }
        self._sampler = None if make_sampler is None else make_sampler(**held)
        self._fetcher = self._sampler or SampleFetcher(
            server.channel,
            table.name,
            removes_items=table.max_times_sampled > 0,
            limit=min([limit for limit in limits if limit is not None], default=None),
            single_pass=options.single_pass,
            **held,
        )
        # Taken in this order, if several are: `_assembling`, the fetcher's lock, `_lock`.
        self._assembling = threading.Lock()  # guards the assembler
        self._lock = threading.Lock()  # guards all below; never held while waiting for the server, or decoding
        self._heard_at = time.monotonic()
        self._ready: collections.deque[Fetched | Exception] = collections.deque()
        self._stats = FetchStats()
        self._closed, self._is_ending = Flag(), False
        self._ended = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start to fetch. After an interrupt of this `stop` ends the thread, if it has begun."""
        if self._sampler is not None:
            self._sampler.start()
        self._thread = start_thread(self._run, "reverb-writer-prefetch")

    # ------------------------------------------------------------------------------------- for the reader

    def take(self, *, partial: bool = False) -> Fetched | None:
        """Return the next batch if it is ready; with `partial`, otherwise the samples that have arrived for it.

        Raises:
            ReverbWriterError: instead of a sample that could not be decoded, or because the table is gone.
            Exception: whatever a part's function has raised, or what has ended the thread, such as MemoryError.
        """
        if partial:
            uninterrupted(self._assemble_rest)  # half of it would lose samples, and their room for good
        item = None
        with self._lock:
            if self._ready:
                item = self._ready.popleft()
        self._fetcher.fill()  # also if there was nothing: an earlier call may have been interrupted before this
        self._changed.set()
        if isinstance(item, Exception):
            raise item
        return item

    @property
    def server(self) -> Server:
        """The server that the last samples came from."""
        return self._server if self._sampler is None else self._sampler.latest

    @property
    def address(self) -> str:
        """Address of the server; "" of several."""
        return self._server.address if self._sampler is None else ""

    @property
    def links(self) -> list[ServerLink]:
        """The connections to the servers from which samples may come."""
        return [self._link] if self._sampler is None else self._sampler.links

    @property
    def lost_servers(self) -> set[str]:
        """Names of the servers to which there is no connection."""
        if self._sampler is not None:
            return self._sampler.lost_servers
        return {self._server.name} if self._link.disconnected_at is not None else set()

    @property
    def is_lost(self) -> bool:
        """Whether nothing is to be waited for, as far as is known."""
        if self._sampler is not None:
            return False
        return self._ended or self._link.disconnected_at is not None or self._server.shard.state == "lost"

    @property
    def is_forked(self) -> bool:
        """Whether this process is a forked child of the one that fetches."""
        return self._server.channel.is_forked

    def check_usable(self) -> None:
        """Raise ClosedError in a forked child, in which no thread fetches."""
        if self._server.channel.is_forked:
            self._server.channel.check_usable()

    @property
    def has_ended(self) -> bool:
        """Whether no more samples will arrive."""
        return self._ended

    @property
    def is_stopped(self) -> bool:
        """Whether `stop` was called, or the thread has ended: no more samples are asked for."""
        return self._closed.is_set() or self._ended

    @property
    def is_closing(self) -> bool:
        """Whether `stop_asking` was called, as when the dataset is closed."""
        return self._is_ending

    def stats(self) -> FetchStats:
        """Return the counters so far; in a forked child, those that need no lock."""
        if self.is_forked:
            return FetchStats(**vars(self._stats))
        with self._lock:
            stats = FetchStats(**vars(self._stats))
            stats.ready_samples = len(self._arrived) + self._num_assembled() + self._num_ready()[0]
            stats.cache_bytes = self._assembler.cache_bytes
            stats.decoded_chunks = self._assembler.num_decoded_chunks
            stats.foreign_items = self._assembler.num_foreign
        stats.in_flight_samples = self._fetcher.num_in_flight
        stats.unasked_samples = self._fetcher.num_unasked
        stats.received_bytes = self._fetcher.num_bytes
        stats.reconnects, stats.server_restarts = self._link.reconnects, self._link.server_restarts
        stats.left_out_servers = int(self._link.disconnected_at is not None)
        if self._sampler is not None:
            self._sampler.count(stats)
        return stats

    def stop_asking(self, max_silence_s: float = 0.0, until: float = -math.inf) -> None:
        """Ask for no more samples. If sampling removes items, wait for the samples in flight.

        Gives up at `until` of `time.monotonic()`, or when none has arrived for `max_silence_s` seconds.
        """
        self._is_ending = True
        self._fetcher.stop_asking()
        self._changed.set()
        began_at = time.monotonic()  # until now the thread may have waited for room instead of reading
        while self._fetcher.removes_items and self._fetcher.num_in_flight:
            left_s = min(until, max(self._heard_at, began_at) + max_silence_s) - time.monotonic()
            if left_s <= 0 or self._closed.wait(left_s + 0.001):
                break

    def stop(self) -> None:
        """Have the thread end, without waiting for it; batches that are ready can still be taken. Idempotent."""
        self._closed.set()
        self._changed.set()
        self._fetcher.stop()

    def join(self, timeout_s: float) -> None:
        """Wait for the thread to end after `stop`; after `timeout_s` seconds it counts as ended, and ends by itself."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        self._ended = True

    # ----------------------------------------------------------------------------------------- the thread

    def _run(self) -> None:
        try:
            if self._link.info is None and self._sampler is None:
                self._link.reconnect(ServerUnavailableError(f"no answer of {self.address} yet."), self._closed)
            fetch_until_closed(
                self._fetch,
                reconnect=lambda error: self._link.reconnect(error, self._closed),
                report=self._report,
                closed=self._closed,
            )
        except ClosedError:
            pass
        except Exception as error:  # noqa: BLE001  # the reader raises it: a dataset that just ends looks complete
            if not isinstance(error, ReverbWriterError):
                _LOG.exception("The thread that fetches samples of `%s` has ended.", self._table)
            self._ready.append(error)
        finally:
            self._ended = True  # before the reader wakes: the thread is alive for a moment more
            self._wake()

    def _fetch(self) -> None:
        """Read one connection until it is lost, or until everything that was to be fetched has arrived."""
        try:
            while not self._fetcher.is_done:
                if self._fetcher.ask():
                    self._read()
                    while self._make_parts() and self._arrived:
                        with self._assembling:
                            self._add_arrived()
        finally:
            self._stats.lost_samples += self._fetcher.end()

    def _read(self) -> None:
        """Read a message. In `_fetch`, the list would keep all its bytes in memory while the next one is read."""
        samples = self._fetcher.read()
        self._heard_at = time.monotonic()
        self._stats.received_samples += len(samples)
        with self._assembling:
            self._arrived += samples

    def _make_parts(self) -> bool:
        """Make all parts of the last batch, as they are taken; until then, no sample is assembled.

        Returns:
            Whether all are made. If not, the dataset is being closed: the samples in flight are to be read, and `take`
            makes the parts.
        """
        while self._parts and not self._closed.is_set():
            if len(self._ready) >= self._max_ready:
                if self._is_ending:
                    break
                self._wait_for_change(None)
                continue
            with self._assembling:
                if self._parts:
                    self._finish_batch()
            self._wake()
        return not self._parts

    def _wait_for_change(self, pause_s: float | None) -> None:
        self._changed.wait(pause_s)
        self._changed.clear()

    def _add_arrived(self) -> None:
        """Add samples that have arrived to the batch, as many as it lacks."""
        num_missing = self._batch_size - self._assembler.num_samples
        samples, self._arrived = self._arrived[:num_missing], self._arrived[num_missing:]
        errors = self._assembler.add(samples)
        skipped = (UnsafeDataError, FormatError) if self._skip_unsafe else ()
        reported = [error for error in errors if not isinstance(error, skipped)]
        with self._lock:
            self._ready.extend(reported)
            self._stats.skipped_samples += len(errors) - len(reported)
        self._fetcher.accept(len(samples))
        is_full = self._assembler.num_samples == self._batch_size
        if is_full:
            self._finish_batch()
        if is_full or reported:
            self._wake()

    def _finish_batch(self) -> None:
        """Make a batch, or its next part, of the samples that were assembled; the caller holds `_assembling`."""
        if not self._parts:
            with self._lock:
                try:
                    if self._finish is None:
                        self._ready.append(self._assembler.take())
                    else:
                        self._parts.extend(self._finish(self.address, self._assembler))
                except Exception as error:  # noqa: BLE001  # the reader raises it
                    self._assembler.begin_next()
                    self._ready.append(error)
            if not self._parts:
                return
        make, info = self._parts[0]  # it stays there until it is made: an interrupt of the reader loses nothing
        try:  # without the lock: a reader's function takes its time, and may ask for `stats()`
            item: Fetched | Exception = (make(), info)
        except Exception as error:  # noqa: BLE001  # of the reader's function; the reader raises it
            if len(self._parts) == 1:
                self._assembler.begin_next()
            item = error
        with self._lock:
            self._parts.popleft()
            self._ready.append(item)

    def _assemble_rest(self) -> None:
        """Make a batch of the samples that have arrived, or the next part of one, unless one is ready."""
        with self._assembling:
            if not self._ready and not self._parts and self._arrived:
                self._add_arrived()
            if not self._ready and (self._parts or self._assembler.num_samples):
                self._finish_batch()

    def _num_held(self) -> int:
        """Return how many samples have arrived and were not taken, with the errors that were not."""
        with self._lock:
            return self._num_assembled() + sum(self._num_ready())

    def _num_assembled(self) -> int:
        """Return how many samples are in no batch that is ready."""
        return sum([len(info) for _, info in self._parts]) if self._parts else self._assembler.num_samples

    def _num_ready(self) -> tuple[int, int]:
        """Return how many samples are in batches that are ready, and how many errors are."""
        ready = self._ready.copy()
        sizes = [len(item[1]) for item in ready if not isinstance(item, Exception)]
        return sum(sizes), len(ready) - len(sizes)

    def _report(self, error: ReverbWriterError) -> None:
        """Have the reader raise what ended a stream; return when it has, so that endless damage costs nothing."""
        self._ready.append(error)
        self._wake()
        while not self._closed.is_set():
            with self._lock:
                if all(item is not error for item in self._ready):
                    break
            self._wait_for_change(None)
        self._closed.wait(RETRY_S)
