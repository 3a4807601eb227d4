"""Batches of a replay table, for any learner.

A dataset fetches at most `max_in_flight_batches` batches ahead, in the background. Every wait has a time-out, whose
error names the cause.

Source: TF-Agents 0.19, `ReverbReplayBuffer.as_dataset`; Reverb 0.14, `TrajectoryDataset`.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from reverb_writer.arguments import integer, options_of
from reverb_writer.decoding.batch_assembler import BatchAssembler
from reverb_writer.decoding.samples import Column
from reverb_writer.errors import SpecError, StructureError
from reverb_writer.keywords import takes
from reverb_writer.reading.dataset import Dataset
from reverb_writer.reading.prefetcher import BatchMaker
from reverb_writer.reading.read_options import ReadKeywords, ReadOptions
from reverb_writer.rows import PADDING, LastRow
from reverb_writer.rows.layouts import checked_last_row
from reverb_writer.slices.batch import Batch

if TYPE_CHECKING:
    from typing_extensions import Unpack

Collate = Literal["error", "pad"]


class ReplayDataset(Dataset):
    """An endless iterator over batches of a table.

    Samples arrive in the server's order: with one server, FIFO, LIFO and heap tables keep their order. One thread at a
    time may iterate; all other methods are thread-safe. A context manager. Not usable in a forked child.

    Attributes:
        table: the table's name.
        batch_size: B, samples in a batch.
        timeout_s: time-out of a batch, in seconds.

    Example:
        with rw.ReplayDataset("localhost:8000", "replay", batch_size=256) as dataset:
            for batch in dataset:
                errors = train(batch.data, batch.info.importance_weights(0.6))
                dataset.update_priorities(batch, errors)
    """

    @takes(ReadOptions)
    def __init__(
        self,
        replay: Any,
        table: str,
        batch_size: int,
        *,
        collate: Collate = "error",
        last_row: LastRow | None = None,
        **options: Unpack[ReadKeywords],
    ) -> None:
        """Find the table; the first `next` begins to fetch.

        Args:
            replay: a `Client`, or an address, addresses or an object that `Client` takes. With several servers, a
                uniform or prioritized table is sampled as if one server had all items. From any other table, batches
                come from each server in turn.
            table: name of the table.
            batch_size: B, samples in a batch, >= 1.
            collate: treatment of samples of different lengths. "error" raises; "pad" appends zeros up to the longest
                sample, where `batch.mask` is False. For whole trajectories end to end, use a `SliceDataset` whose
                `slice_len` is the length of the longest trajectory.
            last_row: whose row the flags of an end stand on, "boundary" or "action", in items of other writers whose
                leaves do not show it; see `reverb_writer.rows`. With "action" the last row of a terminated episode is a
                transition, whose next observation repeats its own.
            **options: limits, time-outs and the end of the reading: the fields of `ReadOptions`.

        Raises:
            SpecError: an argument can never work.
            StructureError: the table does not exist; the error names the existing tables.
            ServerUnavailableError: a server does not answer within the time-out.
        """
        read_options = options_of(ReadOptions, options, self)
        if collate not in ("error", "pad"):
            raise SpecError(f"`collate` must be 'error' or 'pad', got {collate!r}.")
        self.batch_size = integer("batch_size", batch_size, minimum=1)
        self._open(
            replay,
            table,
            self.batch_size,
            read_options,
            WholeSamples(checked_last_row(last_row), pads=collate == "pad"),
        )


class WholeSamples(BatchMaker):
    """Makes a batch of whole samples."""

    def __init__(self, last_row: LastRow | None, *, pads: bool) -> None:
        """Set the `last_row` of `ReplayDataset`, and whether samples of different lengths are padded or an error."""
        self._last_row, self._pads = last_row, pads

    def make(self, samples: BatchAssembler, server: str) -> list[Batch]:
        """Return one batch; see `BatchMaker`."""
        columns, info, kinds = samples.take()
        data = samples.pack([_stacked(column, pads=self._pads) for column in columns])
        if kinds is not None:
            kinds = _stacked(Column(kinds, info.lengths, is_scalar=False), pads=self._pads, padding=PADDING)
        if server:
            info = dataclasses.replace(info, server=server)
        return [Batch(data, info, row_kinds=kinds, last_row=self._last_row)]


def _stacked(column: Column, *, pads: bool, padding: int = 0) -> Any:
    """Return rows [B, T, ...]; with `pads`, T is the longest length. Return [B, ...] if the column is scalar."""
    rows, lengths = column.rows, column.lengths
    if column.is_scalar:
        return rows
    longest = lengths.max()
    if np.count_nonzero(lengths == longest) == len(lengths):
        return rows.reshape(len(lengths), longest, *rows.shape[1:])
    if not pads:
        raise StructureError(
            f"samples of {lengths.min()} to {longest} rows in one batch, expected equal lengths. Write windows "
            "of one length, or pass `collate='pad'`."
        )
    value = b"" if rows.dtype.kind == "O" else padding
    padded = np.full((len(lengths), longest, *rows.shape[1:]), value, rows.dtype)
    padded[np.arange(longest) < lengths[:, None]] = rows
    return padded
