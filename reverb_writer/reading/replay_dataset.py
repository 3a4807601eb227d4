"""Batches of a replay table, for any learner.

    server a -> ThreadFetcher \
    server b -> ThreadFetcher  > RoundRobin -> collate -> Batch(data, info)

A dataset fetches ahead in the background, at most `max_in_flight_batches` batches for each server. Every wait has a
time-out, whose error names what keeps samples from coming.

Source: TF-Agents 0.19, `ReverbReplayBuffer.as_dataset`; Reverb 0.14, `TrajectoryDataset`.
"""

from __future__ import annotations

import contextlib
import functools
import time
import types
import weakref
from collections.abc import Iterator
from typing import Any

from reverb_writer.arguments import check_timeout, integer
from reverb_writer.client.client import as_client
from reverb_writer.decoding.batch_assembler import MAX_SAMPLE_BYTES
from reverb_writer.decoding.samples import Samples
from reverb_writer.errors import ReplayTimeoutError, ServerUnavailableError, SpecError
from reverb_writer.protocol.table_specs import packer
from reverb_writer.reading.batches import Batch, Collate
from reverb_writer.reading.batches import collate as make_batch
from reverb_writer.reading.fetchers import (
    check_end,
    picklable_client,
    request_infos,
    shut_down,
    start_fetchers,
    stop_fetchers,
)
from reverb_writer.reading.priority_updates import PriorityUpdates
from reverb_writer.reading.read_options import MAX_CACHE_BYTES, OnTimeout, ReadOptions, check_choice
from reverb_writer.reading.round_robin import RoundRobin
from reverb_writer.reading.stats import DatasetStats
from reverb_writer.reading.subsequences import SubsequenceCutter, check_same_length
from reverb_writer.reading.waiting import unchained

__all__ = ["ReplayDataset"]

_MAX_SILENCE_S = 0.25
_LEAST_S = 0.05  # for a question to a server, even if the time-out has been spent on waiting


class ReplayDataset:
    """An endless iterator over batches of a table.

    Samples come in the order in which the server chooses them: with one server, FIFO, LIFO and heap tables keep theirs.
    Iterated by one thread at a time; the rest is thread-safe. A context manager. Not usable in a forked child.

    Attributes:
        table: its name.
        timeout_s: time-out of a batch, in seconds.
        is_exhausted: whether an iteration has ended because no more samples will come: after a single pass or
            `close()`, not after a time-out.

    Example:
        with rw.ReplayDataset("localhost:8000", "replay", batch_size=256) as dataset:
            for batch in dataset:
                errors = train(batch.data, batch.info.importance_weights(0.6))
                dataset.update_priorities(batch, errors)
    """

    def __init__(  # noqa: D417  # `ReadOptions` documents the others
        self,
        client: Any,
        table: str,
        batch_size: int,
        *,
        max_in_flight_batches: int = 2,
        timeout_s: float | None = None,
        on_timeout: OnTimeout = "raise",
        collate: Collate = "error",
        num_steps: int | None = None,
        sequence_length: int | None = None,
        single_pass: bool = False,
        max_samples: int | None = None,
        skip_unsafe: bool = False,
        reuse_buffers: bool = False,
        max_cache_bytes: int = MAX_CACHE_BYTES,
        max_sample_bytes: int = MAX_SAMPLE_BYTES,
    ) -> None:
        """Find the table and start to fetch.

        `ReadOptions` documents the keywords that are not listed here.

        Args:
            client: a `Client`, an address or several, or a `reverb.Client`. With several servers a batch comes from one
                of them, each in its turn.
            table: its name.
            batch_size: B, samples in a batch, >= 1; subsequences of samples with `num_steps`.
            collate: how samples that differ in length become a batch. "error" raises; "pad" fills up with zeros to the
                longest, with `info.mask`; "list" gives a list of B nests [T_i, ...]; "flat" gives leaves
                [T_0 + T_1 + ..., ...], and `info.lengths` tells each T_i.
            num_steps: cut each sample into subsequences of this many steps, and drop the steps left at its end; None
                for whole samples.
            sequence_length: number of steps of each sample, to check `num_steps` by; None if samples differ.

        Raises:
            SpecError: an argument can never work.
            StructureError: there is no such table; names those that exist.
            ServerUnavailableError: a server does not answer within the time-out.
        """
        options = self._options = ReadOptions(
            max_in_flight_batches=max_in_flight_batches,
            timeout_s=timeout_s,
            on_timeout=on_timeout,
            single_pass=single_pass,
            max_samples=max_samples,
            skip_unsafe=skip_unsafe,
            reuse_buffers=reuse_buffers,
            max_cache_bytes=max_cache_bytes,
            max_sample_bytes=max_sample_bytes,
        )
        if not isinstance(table, str):
            raise SpecError(
                f"`table` must be the name of one table, got {table!r}. For several make a dataset of each, or a "
                "ContiguousDataset."
            )
        check_choice("collate", collate, ("error", "pad", "list", "flat"))
        self._batch_size = integer("batch_size", batch_size, minimum=1)
        num_steps = None if num_steps is None else integer("num_steps", num_steps, minimum=1)
        if num_steps is not None and sequence_length is not None:
            check_same_length(num_steps, integer("sequence_length", sequence_length, minimum=1))
        self.table, self._collate = table, collate
        self._open_again = functools.partial(
            ReplayDataset,
            picklable_client(client),
            table,
            batch_size,
            collate=collate,
            num_steps=num_steps,
            sequence_length=sequence_length,
            **vars(options),
        )
        self._client, self._owns_client = as_client(client, options.timeout_s)
        self.timeout_s = self._client.timeout_s if options.timeout_s is None else options.timeout_s
        try:
            infos = request_infos(self._client, table, self.timeout_s)
            check_end(table, options, infos)
            start = functools.partial(start_fetchers, self._client, infos, table, self._batch_size, options)
            self._round_robin = RoundRobin(table, self._batch_size, start)
        except BaseException:
            if self._owns_client:
                self._client.close()
            raise
        self._pack: Any = None
        self._unpacked: Samples | None = None
        self._stopping: list[int] | None = (
            None  # servers whose last batch is due, once a time-out has ended an iteration
        )
        self._closed = self.is_exhausted = False
        self._cutter = None if num_steps is None else SubsequenceCutter(num_steps)
        self._stats = DatasetStats()
        self._updates = PriorityUpdates(self._client, infos[0].tables[table])
        # A dataset that is not closed must not hang the interpreter's end.
        self._finalizer = weakref.finalize(
            self, shut_down, self._round_robin.fetchers, self._updates, self._client if self._owns_client else None
        )

    # ------------------------------------------------------------------------------------------- iteration

    def __iter__(self) -> Iterator[Batch]:
        """Return the dataset itself; it continues where the last iteration ended, also after a time-out."""
        self._stopping = None
        return self

    def __next__(self) -> Batch:
        """Return the next batch; after `close()` or a single pass, a last batch of the remaining samples, then stop.

        Raises:
            ReplayTimeoutError: no batch within the time-out; names the cause with its numbers. No sample is lost.
            ServerUnavailableError: no batch within the time-out, and no server can be reached.
            UnsafeDataError, FormatError: a sample must not or cannot be decoded; it is skipped, the next call goes on.
            StructureError: samples differ in length or shape, which `collate` does not allow; or the table is gone.
            ClosedError: in a forked child.
        """
        batch = self.next_since(time.monotonic())
        if batch is None:
            raise StopIteration
        return batch

    def next_since(self, start: float) -> Batch | None:
        """Return the next batch as `next` does, or None where that stops; the time-out counts from `start`.

        Args:
            start: of `time.monotonic()`, so that one time-out covers the batches of several datasets.
        """
        called_at = time.monotonic()
        for fetcher in self._round_robin.fetchers:
            fetcher.check_usable()
        samples = self._next_samples(start) if self._cutter is None else self._next_subsequences(self._cutter, start)
        if samples is None:
            self.is_exhausted = self._stopping is None
            return None
        columns, info = samples
        now = time.monotonic()
        stats = self._stats
        stats.batches += 1
        stats.samples += len(info)
        stats.wait_s += now - called_at
        stats.last_age_s = now - info.received_at
        server = self._client.shards[self._round_robin.latest].address
        return make_batch(columns, info, self._pack, self._collate, server)

    def _find_pack(self, timeout_s: float) -> Any:
        """Return the function that makes nests. Only a table with items is sure to have its structure stored."""
        with unchained():
            return packer(self._client.shards[self._round_robin.latest].spec_of(self.table, timeout_s))

    def _next_samples(self, start: float) -> Samples | None:
        """Return the next batch of samples, or the last one, as soon as `_pack` is known; None at the end."""
        samples = self._unpacked or self._take(start)
        if samples is not None:
            self._updates.remember_owner(samples[1].keys, self._round_robin.latest)
            if self._pack is None:
                self._unpacked = samples  # for the next call, if the server does not tell the structure now
                self._pack = self._find_pack(max(start + self.timeout_s - time.monotonic(), _LEAST_S))
        self._unpacked = None
        return samples

    def _take(self, start: float) -> Samples | None:
        """Take the next batch, or the samples left at the end of the iteration; None when it is over."""
        if self._stopping is None:
            try:
                return self._round_robin.next(start, self.timeout_s) or self._round_robin.rest()
            except (ReplayTimeoutError, ServerUnavailableError):
                if self._options.on_timeout == "raise":
                    raise
            self._stopping = list(range(len(self._round_robin.fetchers)))
        while self._stopping:
            samples = self._round_robin.rest_of(self._stopping.pop())
            if samples is not None:
                return samples
        return None

    def _next_subsequences(self, cutter: SubsequenceCutter, start: float) -> Samples | None:
        """Return the next batch of subsequences of samples, or the last one; None at the end."""
        while cutter.num_pieces < self._batch_size:
            samples = self._next_samples(start)
            if samples is None:
                if not cutter.num_pieces:
                    return None
                break
            cutter.add(*samples)
        return cutter.take(self._batch_size)

    # ----------------------------------------------------------------------------------------- everything else

    def update_priorities(self, batch_or_keys: Any, priorities: Any) -> None:
        """Set priorities of items, soon: the learner does not wait for the server.

        Args:
            batch_or_keys: a batch, of any view; its info; or [n] integers, as `batch.info.keys`. The server ignores
                keys of items that it has removed.
            priorities: [n], finite and >= 0, of any framework: tensors may have gradients and be on any device. Of
                several for one key the last one counts.

        Raises:
            SpecError: a priority cannot be one, or there are not as many as keys. Nothing changed.
            ClosedError: after `close()`.
        """
        self._updates.put(batch_or_keys, priorities)

    def flush_priorities(self, timeout_s: float | None = None) -> None:
        """Return when all priorities given so far are set, or counted in `stats().failed_priority_updates`.

        Raises:
            ReplayTimeoutError: not within `timeout_s` seconds, or the dataset's time-out.
        """
        self._updates.flush(self.timeout_s if timeout_s is None else check_timeout(timeout_s))

    def as_torch(self, device: Any = None) -> Any:
        """Return a `torch.utils.data.IterableDataset` of batches of tensors; see `views.torch`.

        Args:
            device: where the tensors go; None for the CPU. For a CUDA device memory is pinned.

        With `DataLoader(dataset.as_torch(), batch_size=None, num_workers=N, multiprocessing_context="spawn")` each
        worker process opens a dataset like this one, with a client of the same servers, certificates and token. This
        dataset should be closed then: it fetches as well.
        """
        from reverb_writer.reading.views.torch import replay_view  # noqa: PLC0415  # brings PyTorch

        return replay_view(self, device)

    def as_jax(self, device: Any = None) -> Iterator[Batch]:
        """Return an iterator over batches of JAX arrays on `device`; None for JAX's default.

        Raises:
            SpecError: with `reuse_buffers`: JAX's arrays on a CPU may be the batch's own memory, and change with it.
        """
        if self._options.reuse_buffers:
            raise SpecError("`reuse_buffers` must be False for as_jax, got True: JAX's arrays may share those buffers.")
        from reverb_writer.reading.views.jax import jax_batches  # noqa: PLC0415  # brings JAX

        return jax_batches(self, device)

    def as_tf(self, *, native: bool = False) -> Any:
        """Return a `tf.data.Dataset` of pairs `(data, info)`, `info` a dict; waits for the first batch.

        Args:
            native: build it on `reverb.TrajectoryDataset`, which decodes in TensorFlow's threads, and several times
                slower; see `views.tf.reverb_dataset`. This dataset should be closed then: it fetches as well.

        Raises:
            SpecError: `native` without dm-reverb, or with what it cannot do.
        """
        from reverb_writer.reading.views.tf import reverb_dataset, tf_dataset  # noqa: PLC0415  # brings TensorFlow

        if not native:
            return tf_dataset(self)
        (shard, *others) = self._client.shards
        if (
            others
            or self._cutter is not None
            or self._collate != "error"
            or self._client.is_secured
            or self._options.has_end
        ):
            raise SpecError(
                "`native` is for one server without TLS, whole samples, `collate='error'`, and no `single_pass` or "
                "`max_samples`."
            )
        info = shard.request_info(self.timeout_s).tables[self.table]
        return reverb_dataset(
            shard.address,
            self.table,
            shard.spec_of(self.table, self.timeout_s),
            has_time=info.signature is not None,
            batch_size=self._batch_size,
            max_in_flight=self._batch_size * self._options.max_in_flight_batches,
        )

    def stats(self) -> DatasetStats:
        """Return the counters so far."""
        stats = DatasetStats(**vars(self._stats))
        for fetcher in self._round_robin.fetchers:
            stats.add(fetcher.stats())
        stats.priority_updates, stats.failed_priority_updates = self._updates.num_sent, self._updates.num_failed
        if self._closed:
            unpacked = len(self._unpacked[1]) if self._unpacked else 0
            in_pieces = self._cutter.num_samples if self._cutter else 0
            stats.undelivered_samples = stats.ready_samples + unpacked + in_pieces
        return stats

    def stop(self) -> None:
        """Have the threads that fetch end, without waiting for them. Idempotent; `close` does everything else."""
        if not any(fetcher.is_forked for fetcher in self._round_robin.fetchers):
            for fetcher in self._round_robin.fetchers:
                fetcher.stop_unless_reading()

    def close(self, timeout_s: float | None = None) -> None:
        """Stop fetching, and set the priorities that are on their way. Idempotent.

        The samples that have arrived can still be iterated over, in a last, smaller batch if need be;
        `stats().undelivered_samples` counts those that are not. If sampling removes items from the table, the samples
        in flight are read first.

        Args:
            timeout_s: time-out of the whole call, in seconds; most of it is for priorities that are not set yet. None
                for the dataset's.
        """
        timeout_s = self.timeout_s if timeout_s is None else check_timeout(timeout_s)
        if self._closed or not self._finalizer.detach():
            return
        self._closed = True
        if any(fetcher.is_forked for fetcher in self._round_robin.fetchers):
            return
        deadline = time.monotonic() + timeout_s
        stop_fetchers(self._round_robin.fetchers, _MAX_SILENCE_S, timeout_s)
        self._updates.close(max(deadline - time.monotonic(), 0.0))
        if self._pack is None:
            self._pack = packer(None)
            left_s = deadline - time.monotonic()
            if left_s > 0 and (self._unpacked or self.stats().ready_samples):
                with contextlib.suppress(ReplayTimeoutError, ServerUnavailableError):
                    self._pack = self._find_pack(left_s)
        if self._owns_client:
            self._client.close()

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how to open a dataset like this one in another process; samples fetched by this one stay here."""
        return self._open_again, ()

    def __enter__(self) -> ReplayDataset:
        """Return the dataset itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        """Close."""
        self.close()
