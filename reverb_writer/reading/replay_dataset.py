"""Batches of a replay table, for any learner.

    server -> ThreadFetcher -> RoundRobin -> collate -> Batch(data, info)

A `GlobalSampler` makes one server of several if the table is uniform or prioritized; of other tables they take turns.

A dataset fetches ahead in the background, at most `max_in_flight_batches` batches for each server. Every wait has a
time-out, whose error names what keeps samples from coming.

Source: TF-Agents 0.19, `ReverbReplayBuffer.as_dataset`; Reverb 0.14, `TrajectoryDataset`.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from reverb_writer.arguments import check_timeout, integer
from reverb_writer.client.client import Client
from reverb_writer.client.variables import Variables
from reverb_writer.decoding.batch_assembler import MAX_SAMPLE_BYTES, BatchAssembler
from reverb_writer.decoding.samples import BatchInfo, Column
from reverb_writer.errors import SpecError
from reverb_writer.reading.batches import Batch, Collate, transformed
from reverb_writer.reading.batches import collate as collated
from reverb_writer.reading.dataset import Dataset
from reverb_writer.reading.fetchers import LEAST_S
from reverb_writer.reading.policy_age import ages_of, versions_of
from reverb_writer.reading.read_options import MAX_CACHE_BYTES, OnTimeout, ReadOptions, check_choice
from reverb_writer.reading.stats import DatasetStats
from reverb_writer.reading.subsequences import check_same_length
from reverb_writer.reading.table_reader import Pack, TableReader
from reverb_writer.reading.thread_fetcher import Fetched, Part


class ReplayDataset(Dataset):
    """An endless iterator over batches of a table.

    Samples come in the order in which the server chooses them: with one server, FIFO, LIFO and heap tables keep theirs.
    Iterated by one thread at a time; the rest is thread-safe. A context manager. Not usable in a forked child.

    Attributes:
        table: its name.
        batch_size: B, samples in a batch.
        timeout_s: time-out of a batch, in seconds.

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
        connect_timeout_s: float | None = None,
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
        transform: Callable[[Batch], Batch] | None = None,
        policy: Any = None,
    ) -> None:
        """Find the table and start to fetch.

        `ReadOptions` documents the keywords that are not listed here.

        Args:
            client: a `Client`, an address or several, a `Target` or its source, or a `reverb.Client`. Several servers
                are sampled as if one had all items, if the table is uniform or prioritized; from any other table a
                batch comes from one of them, each in its turn.
            table: its name.
            batch_size: B, samples in a batch, >= 1; subsequences of samples with `num_steps`.
            collate: how samples that differ in length become a batch. "error" raises; "pad" fills up with zeros to the
                longest, with `info.mask`; "list" gives a list of B nests [T_i, ...]; "flat" gives leaves
                [T_0 + T_1 + ..., ...], and `info.lengths` tells each T_i.
            num_steps: cut each sample into subsequences of this many steps, and drop the steps left at its end; None
                for whole samples.
            sequence_length: number of steps of each sample, to check `num_steps` by; None if samples differ.
            policy: the learner's `Variables`, or a function that returns the number of its newest version: the info of
                a batch then has `policy_ages`, from the leaf `policy_version` of the steps. None for no ages.

        Raises:
            SpecError: an argument can never work.
            StructureError: there is no such table; names those that exist.
            ServerUnavailableError: a server does not answer within the time-out.
        """
        options = ReadOptions(
            max_in_flight_batches=max_in_flight_batches,
            timeout_s=timeout_s,
            connect_timeout_s=connect_timeout_s,
            on_timeout=on_timeout,
            single_pass=single_pass,
            max_samples=max_samples,
            skip_unsafe=skip_unsafe,
            reuse_buffers=reuse_buffers,
            max_cache_bytes=max_cache_bytes,
            max_sample_bytes=max_sample_bytes,
            transform=transform,
        )
        if not isinstance(table, str):
            raise SpecError(
                f"`table` must be the name of one table, got {table!r}. For several make a dataset of each, or a "
                "ContiguousDataset."
            )
        check_choice("collate", collate, ("error", "pad", "list", "flat"))
        batch_size = integer("batch_size", batch_size, minimum=1)
        num_steps = None if num_steps is None else integer("num_steps", num_steps, minimum=1)
        if num_steps is not None and sequence_length is not None:
            check_same_length(num_steps, integer("sequence_length", sequence_length, minimum=1))
        self.table, self._collate, self.batch_size = table, collate, batch_size
        self._cuts = num_steps is not None
        self._current_version = None if policy is None else _version_of(policy)
        self._policy_ages = 0.0, 0  # of the last batch: mean, maximum
        # Threads have it, so it must not refer to the dataset, which could not be garbage then.
        make_batch = functools.partial(_make_batch, collate, transform, policy is not None)
        self._make_batch = make_batch

        def make_readers(client: Client, deadline: float) -> Iterator[TableReader]:
            left_s = max(deadline - time.monotonic(), LEAST_S)
            # Subsequences are cut by the reader.
            finish = None if transform is None or self._cuts else functools.partial(_finish, make_batch)
            yield TableReader(client, table, batch_size, options, left_s, num_steps=num_steps, finish=finish)

        self._open(client, options, make_readers)
        (self._reader,) = self._readers

    def _next_batch(self, start: float) -> Batch | None:
        return self._completed(self._reader.next(start, self.timeout_s))

    def _take_batch(self, start: float, timeout_s: float) -> Batch | None:
        return self._completed(self._reader.take(start, timeout_s))

    def _completed(self, samples: Fetched | None) -> Batch | None:
        """Return samples as a batch, which the thread that fetches may have made, with the age of its policies."""
        if samples is None:
            return None
        made: Any  # columns, or a batch
        made, info = samples
        batch = (
            made
            if isinstance(made, Batch)
            else self._make_batch(made, info, self._reader.structure.pack, self._reader.server)
        )
        if self._current_version is None or batch.info.policy_versions is None:
            return batch
        ages = ages_of(batch.info.policy_versions, self._current_version())
        if (known := ages[ages >= 0]).size:
            self._policy_ages = float(known.mean()), int(known.max())
        return dataclasses.replace(batch, info=dataclasses.replace(batch.info, policy_ages=ages))

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
        self._reader.updates.put(batch_or_keys, priorities)

    def flush_priorities(self, timeout_s: float | None = None) -> None:
        """Return when all priorities given so far are set, or counted as not set.

        `stats()` has the counters, `failed_priority_updates` and `gone_priority_updates`.

        Raises:
            ReplayTimeoutError: not within `timeout_s` seconds, or the dataset's time-out.
        """
        self._reader.updates.flush(self.timeout_s if timeout_s is None else check_timeout(timeout_s))

    def as_tf(self, *, native: bool = False) -> Any:
        """Return a `tf.data.Dataset` of pairs `(data, info)`, `info` a dict; waits for the first batch.

        Args:
            native: build it on `reverb.TrajectoryDataset`, which decodes in TensorFlow's threads, and several times
                slower; see `views.tf.reverb_dataset`. This dataset should be closed then: it fetches as well.

        Raises:
            SpecError: `native` without dm-reverb, or with what it cannot do.
        """
        if not native:
            return super().as_tf()
        from reverb_writer.reading.views.tf import reverb_dataset  # noqa: PLC0415  # brings TensorFlow

        (shard, *others) = self._client.shards
        options = self._options
        if (
            others
            or self._cuts
            or self._collate != "error"
            or self._client.is_secured
            or options.has_end
            or options.transform is not None
        ):
            raise SpecError(
                "`native` is for one server without TLS, whole samples, `collate='error'`, and no `single_pass`, "
                "`max_samples` or `transform`."
            )
        info = shard.request_info(self.timeout_s).tables[self.table]
        return reverb_dataset(
            shard.address,
            self.table,
            self._reader.structure.spec(self.timeout_s),
            has_time=info.signature is not None,
            batch_size=self.batch_size,
            max_in_flight=self.batch_size * self._options.max_in_flight_batches,
        )

    def stats(self) -> DatasetStats:
        """Return the counters so far."""
        stats = self._reader.stats()
        stats.mean_policy_age, stats.max_policy_age = self._policy_ages
        return stats


def _version_of(policy: Any) -> Callable[[], int]:
    """Return a function that returns the number of the learner's newest version."""
    if isinstance(policy, Variables):
        return lambda: policy.version
    if not callable(policy):
        raise SpecError(f"`policy` must be a Variables or a function, got {type(policy).__name__}.")
    return policy  # type: ignore[no-any-return]  # what it returns is checked by its use


def _finish(make_batch: Callable[..., Batch], assembler: BatchAssembler, pack: Pack, server: str) -> list[Part]:
    """Return what the thread that fetches is to make of the samples of a batch: the batch."""
    columns, info = assembler.take()
    return [(functools.partial(make_batch, columns, info, pack, server), info)]


def _make_batch(
    collate: Collate,
    transform: Callable[[Batch], Batch] | None,
    has_policy: bool,  # for `functools.partial`
    columns: Sequence[Column],
    info: BatchInfo,
    pack: Pack,
    server: str,
) -> Batch:
    if has_policy:
        info = dataclasses.replace(info, policy_versions=versions_of(columns, pack))
    batch = collated(columns, info, pack, collate, server)
    return batch if transform is None else transformed(batch, transform)
