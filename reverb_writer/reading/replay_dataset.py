"""Batches of a replay table, for any learner.

    server a -> ThreadFetcher \
    server b -> ThreadFetcher  > RoundRobin -> collate -> Batch(data, info)

A dataset fetches ahead in the background, at most `max_in_flight_batches` batches for each server. Every wait has a
time-out, whose error names what keeps samples from coming.

Source: TF-Agents 0.19, `ReverbReplayBuffer.as_dataset`; Reverb 0.14, `TrajectoryDataset`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from reverb_writer.arguments import check_timeout, integer
from reverb_writer.client.client import Client
from reverb_writer.decoding.batch_assembler import MAX_SAMPLE_BYTES
from reverb_writer.errors import SpecError
from reverb_writer.reading.batches import Batch, Collate
from reverb_writer.reading.batches import collate as make_batch
from reverb_writer.reading.dataset import Dataset
from reverb_writer.reading.read_options import MAX_CACHE_BYTES, OnTimeout, ReadOptions, check_choice
from reverb_writer.reading.stats import DatasetStats
from reverb_writer.reading.subsequences import check_same_length
from reverb_writer.reading.table_reader import TableReader

__all__ = ["ReplayDataset"]


class ReplayDataset(Dataset):
    """An endless iterator over batches of a table.

    Samples come in the order in which the server chooses them: with one server, FIFO, LIFO and heap tables keep theirs.
    Iterated by one thread at a time; the rest is thread-safe. A context manager. Not usable in a forked child.

    Attributes:
        table: its name.
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
        options = ReadOptions(
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
        batch_size = integer("batch_size", batch_size, minimum=1)
        num_steps = None if num_steps is None else integer("num_steps", num_steps, minimum=1)
        if num_steps is not None and sequence_length is not None:
            check_same_length(num_steps, integer("sequence_length", sequence_length, minimum=1))
        self.table, self._collate, self._batch_size = table, collate, batch_size
        self._cuts = num_steps is not None

        def make_readers(client: Client, _deadline: float) -> Iterator[TableReader]:
            yield TableReader(client, table, batch_size, options, self.timeout_s, num_steps=num_steps)

        self._open(client, options, make_readers)
        (self._reader,) = self._readers

    def _next_batch(self, start: float) -> Batch | None:
        samples = self._reader.next(start, self.timeout_s)
        return samples and make_batch(*samples, self._reader.pack, self._collate, self._reader.server)

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
        """Return when all priorities given so far are set, or counted in `stats().failed_priority_updates`.

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
        if others or self._cuts or self._collate != "error" or self._client.is_secured or self._options.has_end:
            raise SpecError(
                "`native` is for one server without TLS, whole samples, `collate='error'`, and no `single_pass` or "
                "`max_samples`."
            )
        info = shard.request_info(self.timeout_s).tables[self.table]
        return reverb_dataset(
            shard.address,
            self.table,
            self._reader.spec(self.timeout_s),
            has_time=info.signature is not None,
            batch_size=self._batch_size,
            max_in_flight=self._batch_size * self._options.max_in_flight_batches,
        )

    def stats(self) -> DatasetStats:
        """Return the counters so far."""
        return self._reader.stats()
