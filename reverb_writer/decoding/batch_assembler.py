"""Assemble batches from samples: copy the rows of many samples at a time.

    add(samples)   the `SampleDecoder` finds the rows of each sample
    rows()         the rows of all samples added so far, without a copy where possible
    take()         all samples added so far: one array per column, with the rows of all samples
    take_each()    all samples added so far, one by one; they may have any forms

A damaged or unsafe sample is left out, and changes nothing.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from reverb_writer.decoding.item_cache import ItemCache
from reverb_writer.decoding.joined_rows import JoinedRows
from reverb_writer.decoding.sample_decoder import SampleDecoder
from reverb_writer.decoding.samples import ArrayMemory, BatchInfo, Column, PartMemory, SampleInfo, SampleRows, copied
from reverb_writer.decoding.table_structure import TableStructure
from reverb_writer.errors import FormatError, ReverbWriterError, StructureError, UnsafeDataError
from reverb_writer.protocol.responses import NO_SAMPLES, Samples
from reverb_writer.protocol.signatures import packer, packer_of

MAX_SAMPLE_BYTES = 1 << 30
"""Default limit of the decoded size of a sample, in bytes."""

_READ_ONCE_BYTES = 8 << 20  # decoded chunks of items that are read once; more would leave the processor's cache

Array = npt.NDArray[Any]


class _Part(NamedTuple):
    """Copies of the rows of samples."""

    spec: bytes
    columns: list[Column]
    kinds: Array | None


class BatchAssembler:
    """Assembles samples to batches. Not thread-safe, except for the counters and `cache_bytes`.

    Attributes:
        num_foreign: samples that were left out because their structure differs from the table's.
        num_samples: samples that were added since the last `take`.
    """

    def __init__(
        self,
        max_cache_bytes: int,
        max_sample_bytes: int,
        *,
        structure: TableStructure | None = None,
        reads_once: bool = False,
    ) -> None:
        """Create an assembler without samples.

        `max_cache_bytes` is the memory limit of decoded chunks, for each of up to four layouts of items; row ranges of
        items take a quarter more. `max_sample_bytes` limits the decoded size of a sample and of the chunks that it
        needs. `structure` checks each item, and foreign items are left out. With None, items may have any forms, and
        `take_each` returns them. If each item is read once (`reads_once`), chunks are forgotten after a batch when they
        have 8 MiB: later ones get memory that is in use, because new memory costs more than the copy of its content.
        """
        self._memory = ArrayMemory()
        self._part_memory = PartMemory(self._memory)
        self._decoder = SampleDecoder(max_cache_bytes, max_sample_bytes, structure)
        self.num_foreign = 0
        self.structure = structure
        self._reads_once = reads_once
        self._received_at = 0.0  # arrival of the first sample of the batch
        self.begin_next()

    @property
    def cache_bytes(self) -> int:
        """The size of all decoded chunks in the cache."""
        return self._decoder.cache_bytes

    @property
    def num_decoded_chunks(self) -> int:
        """Chunks decoded so far; a chunk counts once for each group of columns that has a part of it."""
        return self._decoder.num_decoded_chunks

    def add(self, samples: Samples) -> list[ReverbWriterError]:
        """Add whole samples, and return an error for each that is left out: an UnsafeDataError or a FormatError."""
        if not self.num_samples:
            self._received_at = time.monotonic()
        errors: list[ReverbWriterError] = []
        items = list(map(self._decoder.known.get, samples.keys.tolist()))
        if None not in items:
            self._items += items  # type: ignore[arg-type]  # mypy does not see that None is not among them
            self.num_samples += len(samples)
        else:
            samples, errors = self._add_new(samples, items)
        # Keep numbers, not messages: a kept message would keep the whole response in memory.
        self._numbers.append(samples.numbers)
        return errors

    def _add_new(self, samples: Samples, items: list[int | None]) -> tuple[Samples, list[ReverbWriterError]]:
        """Add samples, also of new items; return the added samples, and the errors of the others.

        `items` are the numbers of the known items, None for the others.
        """
        errors: list[ReverbWriterError] = []
        left_out: list[int] = []
        decoder, let_go = self._decoder, self._let_go
        keys, at = samples.keys.tolist(), 0
        items.append(None)  # ends the last run of known items
        while at < len(keys):
            if items[at] is not None:
                stop = items.index(None, at)
                self._items += items[at:stop]  # type: ignore[arg-type]  # mypy does not see that None is not among them
                self.num_samples += stop - at
                at = stop
                continue
            key, known, num_known = keys[at], decoder.known, len(decoder.known)
            item = known.get(key)  # an earlier sample may be of the same item
            if item is None:
                try:
                    item = decoder.find(key, samples.entries[at], let_go)
                except StructureError:
                    self.num_foreign += 1
                except (UnsafeDataError, FormatError) as error:
                    errors.append(error)
                if decoder.known is not known or len(known) != num_known + 1:  # items were evicted or renumbered
                    items[at + 1 : -1] = map(decoder.known.get, keys[at + 1 :])
            if item is None:
                left_out.append(at)
            else:
                self._items.append(item)
                self.num_samples += 1
            at += 1
        return samples[np.delete(np.arange(len(keys)), left_out)] if left_out else samples, errors

    def take(self) -> tuple[list[Column], BatchInfo, Array | None]:
        """Return the columns of all samples added since the last call, their info, and the kinds of the rows.

        The kinds are uint8 [sum(lengths)]; None if a sample has none. Begin the next batch.
        """
        self._set_aside()
        parts = [part.columns for part in self._parts]
        columns = list(map(self._part_memory.joined, itertools.count(), zip(*parts, strict=True)))
        of_parts = [part.kinds for part in self._parts if part.kinds is not None]
        kinds: Array | None = np.concatenate(of_parts) if of_parts and len(of_parts) == len(self._parts) else None
        info = self._info(_longest([column.lengths for column in columns]))
        self.begin_next()
        return columns, info, kinds

    def take_each(self, signature: Any) -> list[tuple[Any, SampleInfo, Array | None]]:
        """Return the nest, the info and the kinds of each sample added since the last call; begin the next batch.

        The nests are those of the table's `signature`; if it is None, of each sample's own spec.
        """
        self._set_aside()
        parts, infos = self._parts, map(SampleInfo, *(numbers.tolist() for numbers in self._all_numbers()))
        self.begin_next()
        nests: list[Any] = []
        kinds: list[Array | None] = []
        for spec, columns, of_part in parts:
            pack = packer_of(spec) if signature is None else packer(signature)
            nests += map(pack, zip(*[column.split() for column in columns], strict=True))
            lengths = columns[0].lengths
            kinds += [None] * len(lengths) if of_part is None else Column(of_part, lengths, is_scalar=False).split()
        return list(zip(nests, infos, kinds, strict=True))

    def rows(self) -> SampleRows:
        """Return the rows of all samples added since the last `take`, without a copy where possible.

        They are valid until samples are added. Call `begin_next` when they are no longer needed.
        """
        cache = self._decoder.current
        if cache and not self._parts:
            sources = cache.rows_of(self._items)
            kinds = sources.pop() if cache.kinds_at is not None else None
            info = self._info(_longest([rows.lengths for _, rows in sources]))
            return SampleRows(sources, info, kinds, cache.layout.is_scalar, self._memory)
        columns, info, all_kinds = self.take()
        lengths_of = [column.lengths for column in columns]
        places = {id(lengths): JoinedRows.end_to_end(lengths) for lengths in [*lengths_of, info.lengths]}
        kinds = None if all_kinds is None else (all_kinds, places[id(info.lengths)])
        sources = [(column.rows, places[id(column.lengths)]) for column in columns]
        is_scalar = [column.is_scalar for column in columns]
        return SampleRows(sources, info, kinds, is_scalar, self._memory, are_copies=True)

    def lengths(self) -> npt.NDArray[np.int64]:
        """Return the number of rows of each sample added since the last `take`, in its longest column."""
        lengths = [_longest([column.lengths for column in part.columns]) for part in self._parts]
        if self._decoder.current and self._items:
            lengths.append(_longest([rows.lengths for _, rows in self._decoder.current.rows_of(self._items)]))
        return np.concatenate(lengths or [np.zeros(0, np.int64)])

    def _info(self, lengths: npt.NDArray[np.int64]) -> BatchInfo:
        keys, priorities, probabilities, table_sizes, times_sampled = self._all_numbers()
        return BatchInfo(keys, priorities, probabilities, table_sizes, times_sampled, lengths, self._received_at)

    def _all_numbers(self) -> Sequence[npt.NDArray[Any]]:
        """Return the numbers of all samples, see `Samples.numbers`."""
        numbers = self._numbers or [NO_SAMPLES.numbers]
        return numbers[0] if len(numbers) == 1 else list(map(np.concatenate, zip(*numbers, strict=True)))

    def pack(self, columns: Sequence[Any]) -> Any:
        """Return the nest of some columns; a tuple of columns if the table's structure is unknown."""
        return self.structure.pack(columns) if self.structure else tuple(columns)

    def begin_next(self) -> None:
        """Begin the next batch, without samples."""
        self._items: list[int] = []  # numbers of items in the current cache whose rows are not copied yet
        self._parts: list[_Part] = []  # copies of the rows of earlier samples
        self._numbers: list[Sequence[npt.NDArray[Any]]] = []  # numbers of the samples, see `Samples.numbers`
        self._part_memory.begin_next()
        self.num_samples = 0
        if self._reads_once:
            self._decoder.forget(_READ_ONCE_BYTES)

    def _set_aside(self) -> None:
        """Copy the rows that are only in the rings, before a ring evicts chunks or when all samples have arrived."""
        cache, items, self._items = self._decoder.current, self._items, []
        if not cache or not items:
            return
        columns = []
        sources = cache.rows_of(items)
        kinds = None
        if cache.kinds_at is not None:
            kinds = copied(*sources.pop(), self._memory)
        for number, ((source, rows), is_scalar) in enumerate(zip(sources, cache.layout.is_scalar, strict=True)):
            out = self._part_memory.part(number, source, rows.num_rows)
            rows.copy(source, out)
            columns.append(Column(out, rows.lengths, is_scalar))
        self._parts.append(_Part(cache.spec, columns, kinds))

    def _let_go(self, cache: ItemCache) -> None:
        """Copy the rows of the batch before they become invalid, because items of `cache` come next.

        Raise FormatError if these items cannot be in the batch.
        """
        current = self._decoder.current
        if cache is not current and self.structure and current and self.num_samples and cache.form != current.form:
            got, expected = (
                ", ".join(f"{dtype} {list(shape)}" for dtype, shape, _ in one.form)[:500] for one in (cache, current)
            )
            raise FormatError(
                f"an item whose columns differ from the first item of its batch: {got}, expected {expected}. Make "
                "the actors of the table agree."
            )
        self._set_aside()


def _longest(all_lengths: Sequence[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
    """Return the rows of each sample in its longest column."""
    distinct = [*{id(lengths): lengths for lengths in all_lengths}.values()]  # mostly one array
    return functools.reduce(np.maximum, distinct or [np.zeros(0, np.int64)])
