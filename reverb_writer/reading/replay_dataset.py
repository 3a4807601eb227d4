"""Batches of a replay table, for any learner.

    server a -> ThreadFetcher \
    server b -> ThreadFetcher  > the next that is ready, in turn -> collate -> Batch(data, info)

A dataset fetches ahead in the background, at most `max_in_flight_batches` batches a server, and no wait is without end:
a time-out names what keeps samples from coming.

Source: TF-Agents 0.19, `ReverbReplayBuffer.as_dataset`; Reverb 0.14, `TrajectoryDataset`.
"""

from __future__ import annotations

import contextlib
import functools
import time
import types
import weakref
from collections.abc import Iterator
from dataclasses import fields
from typing import Any, Literal

from reverb_writer.arguments import check_timeout, integer
from reverb_writer.client.client import as_client
from reverb_writer.decoding.batch_assembler import MAX_SAMPLE_BYTES
from reverb_writer.errors import ReplayTimeoutError, ServerUnavailableError, SpecError
from reverb_writer.protocol.table_specs import packer
from reverb_writer.reading.batches import Batch, Collate
from reverb_writer.reading.batches import collate as make_batch
from reverb_writer.reading.fetch_options import FetchOptions
from reverb_writer.reading.fetchers import (
    check_end,
    picklable_client,
    request_infos,
    shut_down,
    start_sources,
    stop_sources,
)
from reverb_writer.reading.priority_updates import PriorityUpdates
from reverb_writer.reading.round_robin import RoundRobin
from reverb_writer.reading.stats import DatasetStats, FetchStats
from reverb_writer.reading.subsequences import SubsequenceCutter, check_same_length
from reverb_writer.reading.thread_fetcher import Fetched
from reverb_writer.reading.waiting import unchained

__all__ = ["ReplayDataset"]

_DRAIN_S = 0.25
_LEAST_S = 0.05  # for what a call asks of a server, although its time-out has been spent on waiting


class ReplayDataset:
    """An endless iterator over batches of a table.

    Samples come in the order in which the server chooses them: with one server, FIFO, LIFO and heap tables keep theirs.
    Iterated by one thread at a time; the rest is thread-safe. A context manager. Not usable in a forked child.

    Attributes:
        table: its name.
        timeout_s: how long a batch is waited for at most, seconds.
        is_exhausted: whether an iteration has ended because nothing will come any more: after a single pass or
            `close()`, not after a time-out.

    Example:
        with rw.ReplayDataset("localhost:8000", "replay", batch_size=256) as dataset:
            for batch in dataset:
                errors = train(batch.data, batch.info.importance_weights(0.6))
                dataset.update_priorities(batch.info.keys, errors)
    """

    def __init__(
        self,
        client: Any,
        table: str,
        batch_size: int,
        *,
        max_in_flight_batches: int = 2,
        timeout_s: float | None = None,
        on_timeout: Literal["raise", "stop"] = "raise",
        collate: Collate = "error",
        num_steps: int | None = None,
        sequence_length: int | None = None,
        single_pass: bool = False,
        max_samples: int | None = None,
        skip_unsafe: bool = False,
        reuse_buffers: bool = False,
        max_cache_bytes: int = 256 << 20,
        max_sample_bytes: int = MAX_SAMPLE_BYTES,
    ) -> None:
        """Find the table and start to fetch.

        Args:
            client: a `Client`, an address or several, or a `reverb.Client`. With several servers a batch comes from one
                of them, each in its turn.
            table: its name.
            batch_size: B, samples in a batch, >= 1; pieces of samples with `num_steps`.
            max_in_flight_batches: bound on what is fetched ahead, for each server, >= 1. What is ahead is older than
                what could be sampled now, and counts as sampled for the rate limiter.
            timeout_s: how long a batch is waited for at most, seconds; None for the client's.
            on_timeout: what happens then: "raise", after which the next call goes on waiting, or "stop": the iteration
                ends with what had come, a last batch for each server. What comes later is for the next iteration.
            collate: what becomes of samples that differ in length: "error"; "pad" with zeros to the longest, with
                `info.mask`; "list", a list of B nests [T_i, ...]; "flat", leaves [T_0 + T_1 + ..., ...], of which
                `info.lengths` tells the parts.
            num_steps: cut each sample into pieces of so many steps, dropping what is left at its end; None not to.
            sequence_length: of the samples, to check `num_steps` by; None if they differ.
            single_pass: hand out each item that is in the table now, once and in order, then stop. For tables of which
                sampler and remover are "fifo" or a heap, and `max_times_sampled` is 1.
            max_samples: take exactly so many samples from the table, then stop, >= 1; what `skip_unsafe` leaves out is
                one of them. None for no end. For one server. A dataset that is opened anew, as in a `DataLoader`'s
                worker processes, takes as many again.
            skip_unsafe: leave out and count samples that raise UnsafeDataError.
            reuse_buffers: let the arrays of a batch be overwritten once the next batch is asked for, instead of giving
                each batch arrays of its own. Spares the system new memory for every batch of frames.
            max_cache_bytes: bound on decoded chunks, which spare decoding again, for each server; a quarter more is
                used to know items again, a sixteenth (16 MB at most) and 32 MB to find the contents of chunks.
            max_sample_bytes: bound on one sample, decoded.

        Raises:
            SpecError: an argument can never work.
            StructureError: there is no such table; names those that are.
            ServerUnavailableError: a server does not answer within the time-out.
        """
        given = {name: value for name, value in locals().items() if name not in ("self", "client", "table")}
        self._reopen = functools.partial(ReplayDataset, picklable_client(client), table, **given)
        self._plan = FetchOptions(
            table,
            batch_size,
            max_in_flight_batches,
            skip_unsafe,
            reuse_buffers,
            max_cache_bytes,
            max_sample_bytes,
            single_pass,
            max_samples,
        )
        self._num_steps = None if num_steps is None else integer("num_steps", num_steps, minimum=1)
        if num_steps is not None and sequence_length is not None:
            check_same_length(num_steps, integer("sequence_length", sequence_length, minimum=1))
        for argument, choice, choices in (
            ("on_timeout", on_timeout, ("raise", "stop")),
            ("collate", collate, ("error", "pad", "list", "flat")),
        ):
            if choice not in choices:
                raise SpecError(f"`{argument}` must be one of {', '.join(map(repr, choices))}, got {choice!r}.")
        self.table = table
        self._on_timeout, self._collate = on_timeout, collate
        self._client, self._owns_client = as_client(client, timeout_s)
        self.timeout_s = self._client.timeout_s if timeout_s is None else check_timeout(timeout_s)
        try:
            infos = request_infos(self._client, table, self.timeout_s)
            check_end(self._plan, infos)
            start = functools.partial(start_sources, self._client, infos, self._plan)
            self._turns = RoundRobin(table, self._plan.batch_size, start)
        except BaseException:
            if self._owns_client:
                self._client.close()
            raise
        self._pack: Any = None
        self._unpacked: Fetched | None = None
        self._stopping: list[int] | None = (
            None  # servers whose last batch is due, once a time-out has ended an iteration
        )
        self._closed = self.is_exhausted = False
        self._pieces = None if self._num_steps is None else SubsequenceCutter(self._num_steps)
        self._stats = DatasetStats()
        self._updates = PriorityUpdates(self._client, infos[0].tables[table])
        # Whoever forgets close() must not hang when the interpreter ends.
        self._finalizer = weakref.finalize(
            self, shut_down, self._turns.sources, self._updates, self._client if self._owns_client else None
        )

    # ------------------------------------------------------------------------------------------- iteration

    def __iter__(self) -> Iterator[Batch]:
        """Return the dataset itself: it goes on where it was, also after a time-out has ended an iteration."""
        self._stopping = None
        return self

    def __next__(self) -> Batch:
        """Return the next batch; after `close()` or the end of a single pass, what is left, then stop.

        Raises:
            ReplayTimeoutError: none within the time-out; names the cause with its numbers. Nothing is lost by it.
            ServerUnavailableError: likewise, and a server is gone.
            UnsafeDataError, FormatError: a sample must not or cannot be decoded; it is left out, the next call goes on.
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
        for source in self._turns.sources:
            source.check_usable()
        fetched = self._next_fetched(start) if self._pieces is None else self._next_pieces(self._pieces, start)
        if fetched is None:
            self.is_exhausted = self._stopping is None
            return None
        now = time.monotonic()
        stats = self._stats
        stats.batches += 1
        stats.samples += len(fetched.infos.keys)
        stats.wait_s += now - called_at
        stats.last_age_s = now - fetched.oldest_at
        server = self._client.shards[self._turns.latest].address
        return make_batch(fetched.columns, fetched.infos, self._pack, self._collate, server)

    def _find_pack(self, timeout_s: float) -> Any:
        """Return what makes nests. The table's structure is known once it has items: before, nobody has told it."""
        with unchained():
            return packer(self._client.shards[self._turns.latest].spec_of(self.table, timeout_s))

    def _next_fetched(self, start: float) -> Fetched | None:
        """Return the next batch of samples, or the last one, as soon as `_pack` is known; None at the end."""
        fetched = self._unpacked or self._next_taken(start)
        if fetched is not None:
            self._updates.remember_owner(fetched.infos.keys, self._turns.latest)
            if self._pack is None:
                self._unpacked = fetched  # for the next call, should the server not tell the structure now
                self._pack = self._find_pack(max(start + self.timeout_s - time.monotonic(), _LEAST_S))
        self._unpacked = None
        return fetched

    def _next_taken(self, start: float) -> Fetched | None:
        """Take the next batch, or what is left at the end of the iteration; None once it is over."""
        if self._stopping is None:
            try:
                return self._turns.next(start, self.timeout_s) or self._turns.rest()
            except (ReplayTimeoutError, ServerUnavailableError):
                if self._on_timeout == "raise":
                    raise
            self._stopping = list(range(len(self._turns.sources)))
        while self._stopping:
            fetched = self._turns.rest_of(self._stopping.pop())
            if fetched is not None:
                return fetched
        return None

    def _next_pieces(self, pieces: SubsequenceCutter, start: float) -> Fetched | None:
        """Return the next batch of pieces of samples, or the last one; None at the end."""
        oldest_at = time.monotonic()
        while pieces.num_pieces < self._plan.batch_size:
            fetched = self._next_fetched(start)
            if fetched is None:
                if not pieces.num_pieces:
                    return None
                break
            oldest_at = fetched.oldest_at
            pieces.add(fetched.columns, fetched.infos)
        return Fetched(*pieces.take(self._plan.batch_size), oldest_at)

    # ------------------------------------------------------------------------------------------ all the rest

    def update_priorities(self, keys: Any, priorities: Any) -> None:
        """Set priorities of items, soon: the learner does not wait for the server.

        Args:
            keys: [n] integers, as `batch.info.keys`; those that the table has no more are ignored by the server.
            priorities: [n], finite and >= 0. Of several for one key the last one counts.

        Raises:
            SpecError: a priority cannot be one, or there are not as many as keys. Nothing changed.
            ClosedError: after `close()`.
        """
        self._updates.put(keys, priorities)

    def flush_priorities(self, timeout_s: float | None = None) -> None:
        """Return when all priorities given so far are set, or counted in `stats().failed_priority_updates`.

        Raises:
            ReplayTimeoutError: not within `timeout_s` seconds, or the dataset's time-out.
        """
        self._updates.flush(self.timeout_s if timeout_s is None else check_timeout(timeout_s))

    def as_torch(self, device: Any = None) -> Any:
        """Return a `torch.utils.data.IterableDataset` of batches of tensors; see `views.torch.TorchDataset`.

        Args:
            device: where the tensors go; None for the CPU. For a CUDA device memory is pinned.

        With `DataLoader(dataset.as_torch(), batch_size=None, num_workers=N, multiprocessing_context="spawn")` each
        worker process opens a dataset like this one, with a client of the same servers, certificates and token. This
        dataset should be closed then: it fetches as well.
        """
        from reverb_writer.reading.views.torch import TorchDataset  # noqa: PLC0415  # brings PyTorch

        return TorchDataset(self._reopen, self, device)

    def as_jax(self, device: Any = None) -> Iterator[Batch]:
        """Return an iterator over batches of JAX arrays on `device`; None for JAX's default.

        Raises:
            SpecError: with `reuse_buffers`: JAX's arrays on a CPU may be the batch's own memory, and change with it.
        """
        if self._plan.reuses_buffers:
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
            or self._pieces is not None
            or self._collate != "error"
            or self._client.is_secured
            or self._plan.has_end
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
            batch_size=self._plan.batch_size,
            max_in_flight=self._plan.batch_size * self._plan.max_in_flight_batches,
        )

    def stats(self) -> DatasetStats:
        """Return the counters so far."""
        stats = DatasetStats(**vars(self._stats))
        for source in self._turns.sources:
            of_one = source.stats()
            for field in fields(FetchStats):
                setattr(stats, field.name, getattr(stats, field.name) + getattr(of_one, field.name))
        stats.priority_updates, stats.failed_priority_updates = self._updates.num_sent, self._updates.num_failed
        if self._closed:
            unpacked = len(self._unpacked.infos.keys) if self._unpacked else 0
            in_pieces = self._pieces.num_samples if self._pieces else 0
            stats.undelivered_samples = stats.ready_samples + unpacked + in_pieces
        return stats

    def stop(self) -> None:
        """Have the threads that fetch end, without waiting for anything. Idempotent; `close` does the rest."""
        if not any(source.is_forked for source in self._turns.sources):
            for source in self._turns.sources:
                source.stop_unless_draining()

    def close(self, timeout_s: float | None = None) -> None:
        """Stop fetching, and set the priorities that are on their way. Idempotent.

        What has come can still be iterated over, a last, smaller batch included; `stats().undelivered_samples` counts
        what is not. From tables whose items are removed after some samples, what the server has taken out already is
        read first.

        Args:
            timeout_s: how long everything that this waits for takes at most, priorities above all, seconds; None for
                the dataset's.
        """
        timeout_s = self.timeout_s if timeout_s is None else check_timeout(timeout_s)
        if self._closed or not self._finalizer.detach():
            return
        self._closed = True
        if any(source.is_forked for source in self._turns.sources):
            return
        deadline = time.monotonic() + timeout_s
        stop_sources(self._turns.sources, _DRAIN_S, timeout_s)
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
        """Return how to open a dataset like this one in another process; what this one has fetched stays here."""
        return self._reopen, ()

    def __enter__(self) -> ReplayDataset:
        """Return the dataset itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        """Close."""
        self.close()
