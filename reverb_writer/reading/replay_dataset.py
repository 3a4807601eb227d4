"""Batches of a replay table, for any learner.

    servers -> SampleStreams -> Mixer -> BatchAssembler -> collate, transform -> Prefetcher -> Batch(data, info)

A dataset fetches ahead in the background, at most `max_in_flight_batches` batches. Every wait has a time-out, whose
error names what keeps samples from coming.

Source: TF-Agents 0.19, `ReverbReplayBuffer.as_dataset`; Reverb 0.14, `TrajectoryDataset`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from reverb_writer.arguments import integer
from reverb_writer.client.variables import Variables
from reverb_writer.decoding.batch_assembler import MAX_SAMPLE_BYTES, BatchAssembler
from reverb_writer.decoding.table_structure import TableStructure
from reverb_writer.errors import SpecError
from reverb_writer.reading.batches import Batch, Collate
from reverb_writer.reading.batches import collate as collated
from reverb_writer.reading.dataset import Dataset
from reverb_writer.reading.policy_age import ages_of, versions_of
from reverb_writer.reading.read_options import MAX_CACHE_BYTES, ReadOptions, check_choice, check_table
from reverb_writer.reading.stats import DatasetStats


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
        collate: Collate = "error",
        single_pass: bool = False,
        max_samples: int | None = None,
        skip_unsafe: bool = False,
        reuse_buffers: bool = False,
        max_cache_bytes: int = MAX_CACHE_BYTES,
        max_sample_bytes: int = MAX_SAMPLE_BYTES,
        transform: Callable[[Batch], Batch] | None = None,
        policy: Any = None,
    ) -> None:
        """Find the table; the first `next` begins to fetch.

        `ReadOptions` documents the keywords that are not listed here.

        Args:
            client: a `Client`, an address or several, a `Target` or its source, or a `reverb.Client`. Several servers
                are sampled as if one had all items, if the table is uniform or prioritized; from any other table a
                batch comes from one of them, each in its turn.
            table: its name.
            batch_size: B, samples in a batch, >= 1.
            collate: how samples that differ in length become a batch. "error" raises; "pad" fills up with zeros to the
                longest, with `info.mask`; "list" gives a list of B nests [T_i, ...]; "flat" gives leaves
                [T_0 + T_1 + ..., ...], and `info.lengths` tells each T_i.
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
            single_pass=single_pass,
            max_samples=max_samples,
            skip_unsafe=skip_unsafe,
            reuse_buffers=reuse_buffers,
            max_cache_bytes=max_cache_bytes,
            max_sample_bytes=max_sample_bytes,
            transform=transform,
        )
        check_table(table)
        check_choice("collate", collate, ("error", "pad", "list", "flat"))
        batch_size = integer("batch_size", batch_size, minimum=1)
        self.batch_size = batch_size
        self._current_version = None if policy is None else _version_of(policy)
        self._policy_ages = 0.0, 0  # of the last batch: mean, maximum

        def make_maker(structure: TableStructure) -> WholeSamples:
            return WholeSamples(structure, collate, has_policy=policy is not None)

        self._open(client, table, batch_size, options, make_maker)

    def _completed(self, batch: Batch) -> Batch:
        """Return a batch with the age of its policies."""
        if self._current_version is None or batch.info.policy_versions is None:
            return batch
        ages = ages_of(batch.info.policy_versions, self._current_version())
        if (known := ages[ages >= 0]).size:
            self._policy_ages = float(known.mean()), int(known.max())
        return dataclasses.replace(batch, info=dataclasses.replace(batch.info, policy_ages=ages))

    def stats(self) -> DatasetStats:
        """Return the counters so far."""
        stats = super().stats()
        stats.mean_policy_age, stats.max_policy_age = self._policy_ages
        return stats


class WholeSamples:
    """Makes a batch of whole samples; a `BatchMaker`."""

    calls_user = False

    def __init__(self, structure: TableStructure, collate: Collate, *, has_policy: bool) -> None:
        """Set how; see `ReplayDataset`."""
        self._structure, self._collate, self._has_policy = structure, collate, has_policy

    def make(self, assembler: BatchAssembler, server: str) -> Iterator[tuple[Batch | None, bool]]:
        """Yield one batch; see `BatchMaker`."""
        columns, info = assembler.take()
        pack = self._structure.pack
        if self._has_policy:
            info = dataclasses.replace(info, policy_versions=versions_of(columns, pack))
        yield collated(columns, info, pack, self._collate, server), True

    def rest(self) -> None:
        """Return nothing: each batch has all samples."""


def _version_of(policy: Any) -> Callable[[], int]:
    """Return a function that returns the number of the learner's newest version."""
    if isinstance(policy, Variables):
        return lambda: policy.version
    if not callable(policy):
        raise SpecError(f"`policy` must be a Variables or a function, got {type(policy).__name__}.")
    return policy  # type: ignore[no-any-return]  # what it returns is checked by its use
