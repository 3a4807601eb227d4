"""Batches of a replay table, for any learner.

A dataset fetches at most `max_in_flight_batches` batches ahead, in the background. Every wait has a time-out, whose
error names the cause.

Source: TF-Agents 0.19, `ReverbReplayBuffer.as_dataset`; Reverb 0.14, `TrajectoryDataset`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args

from reverb_writer.arguments import integer, options_of
from reverb_writer.errors import SpecError
from reverb_writer.keywords import takes
from reverb_writer.reading.read_options import ReadKeywords, ReadOptions
from reverb_writer.reading.whole_samples import Collate, WholeSamples
from reverb_writer.replay.dataset import Dataset
from reverb_writer.rows import LastRow
from reverb_writer.rows.layouts import checked_last_row

if TYPE_CHECKING:
    from typing_extensions import Unpack


class ReplayDataset(Dataset):
    """An endless iterator over batches of a table.

    Samples arrive in the server's order: with one server, FIFO, LIFO and heap tables keep their order. One thread at a
    time may iterate; all other methods are thread-safe. A context manager. Not usable in a forked child.

    Attributes:
        table: the table's name.
        batch_size: B, samples in a batch; with `max_rows`, at most as many.
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
        max_rows: int | None = None,
        max_age: int | None = None,
        version: str = "version",
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
            collate: treatment of samples of different lengths. "error" raises. "pad" appends zeros up to the longest
                sample, where `batch.mask` is False. "pack" lays samples end to end, as a `SliceDataset` lays slices:
                leaves are [N, ...], `batch.slices` has the lengths and first rows, and leaves without a time dimension
                are [B, ...].
            max_rows: limit of the rows of a batch, >= 1, with the rows that "pad" appends. A batch is full when its
                next sample would exceed the limit. A sample of more rows is a batch by itself. None for no limit.
            max_age: largest age of a sample, in versions, >= 0: the attribute `version` less the version of the sample.
                Older samples are left out and counted as `too_old_samples`, and others take their places. None for no
                limit. With a limit, a batch is made when `next` or `poll` asks for it, and not ahead.
            version: path of the leaf with the version of a row, an integer. A sample has the smallest version of its
                rows with an action, `batch.info.versions`.
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
        if collate not in get_args(Collate):
            raise SpecError(f"`collate` must be 'error', 'pad' or 'pack', got {collate!r}.")
        if not isinstance(version, str):
            raise SpecError(f"`version` must be the path of a leaf, got {version!r}.")
        self.batch_size = integer("batch_size", batch_size, minimum=1)
        max_rows = None if max_rows is None else integer("max_rows", max_rows, minimum=1)
        max_age = None if max_age is None else integer("max_age", max_age, minimum=0)
        if collate == "pack":
            self._num_open_sizes = 1  # leaves [N, ...]
        self._maker = WholeSamples(self.batch_size, collate, checked_last_row(last_row), max_rows, max_age, version)
        self._open(replay, table, self.batch_size, read_options, self._maker)

    @property
    def version(self) -> int | None:
        """The newest version, which the learner assigns; None at first, and then no sample is too old.

        For example the number that `Variables.publish` returns. A dataset in another process has its own.
        """
        return self._maker.newest

    @version.setter
    def version(self, version: int) -> None:
        self._maker.newest = integer("version", version, minimum=0)
