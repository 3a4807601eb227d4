"""Samples as columns of arrays, or as rows that are not copied yet, with the server's information about them."""

from __future__ import annotations

import collections
import contextlib
import itertools
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from reverb_writer.decoding.joined_rows import JoinedRows
from reverb_writer.errors import StructureError
from reverb_writer.nests import shapes_text
from reverb_writer.rows import PADDING
from reverb_writer.scalars import Record
from reverb_writer.slices import axes

Array = npt.NDArray[Any]

_MIN_REUSED_BYTES = 1 << 20  # arrays from this size on, whose memory glibc mostly returns
_MAX_FREE = 16
_SPARE = 8  # new memory is larger by this part, so that a batch that is a little longer fits into it later


class Column(NamedTuple):
    """One column of n samples."""

    rows: Array  # [sum(lengths), ...], the concatenated rows of all samples; owned by the caller
    lengths: npt.NDArray[np.int64]  # [n] number of rows of each sample
    is_scalar: bool  # whether each sample has one row, which readers get without time dimension

    def split(self) -> list[Array]:
        """Return each sample's rows as a view [T, ...], or [...] if the column is scalar."""
        if self.is_scalar:
            return [*self.rows]
        ends = np.cumsum(self.lengths).tolist()
        return [self.rows[start:end] for start, end in itertools.pairwise([0, *ends])]


class SampleInfo(NamedTuple):
    """The server's information about one sample.

    Attributes:
        key: key of the item, for `mutate_priorities`.
        priority: priority of the item when it was sampled.
        probability: probability of the item among the items of the table.
        table_size: number of items in the table when the item was sampled.
        times_sampled: number of samples of the item, including this one.
    """

    key: int
    priority: float
    probability: float
    table_size: int
    times_sampled: int


@dataclass(frozen=True, repr=False)
class BatchInfo(Record):
    """Information about the B samples of a batch: the fields of `SampleInfo` as arrays, and others.

    Its `repr` shows shapes instead of numbers. From `as_torch`, the arrays are tensors on the device: keys int64 with
    the same bits, numbers float32.

    Attributes:
        keys: [B] uint64, keys of the items, for `update_priorities`.
        priorities: [B] float64, priorities when the items were sampled.
        probabilities: [B] float64, probability of each item among the items of all servers.
        table_sizes: [B] int64, items in the table, on all servers, when the item was sampled.
        times_sampled: [B] int32, number of samples of the item, including this one.
        lengths: [B] int64, rows of the sample; rows of the longest leaf if leaves differ in length.
        received_at: `time.monotonic()` in seconds, when the first of the samples arrived.
        server: address of the server; "" if the samples come from several servers.
        members: [B] int64, number of the dataset that the sample is from; with a `MixedDataset` only, else None.
        versions: [B] int64, version of each sample, from a `ReplayDataset` with `max_age` or `version`; else None.
    """

    keys: npt.NDArray[np.uint64] = field(metadata=axes.SAMPLES)
    priorities: npt.NDArray[np.float64] = field(metadata=axes.SAMPLES)
    probabilities: npt.NDArray[np.float64] = field(metadata=axes.SAMPLES)
    table_sizes: npt.NDArray[np.int64] = field(metadata=axes.SAMPLES)
    times_sampled: npt.NDArray[np.int32] = field(metadata=axes.SAMPLES)
    lengths: npt.NDArray[np.int64] = field(metadata=axes.SAMPLES)
    received_at: float
    server: str = ""
    members: npt.NDArray[np.int64] | None = field(default=None, metadata=axes.SAMPLES)
    versions: npt.NDArray[np.int64] | Any = field(default=None, metadata=axes.SAMPLES)  # Any: needs no check for None

    def __len__(self) -> int:
        return len(self.keys)

    def __repr__(self) -> str:
        return shapes_text(self)

    def importance_weights(self, exponent: float = 1.0) -> npt.NDArray[np.float64]:
        """Return [B] weights that correct for sampling by priority; the largest is 1.

        They are (table size x probability) ** -exponent, divided by the largest weight. They compare samples of one
        table, on one server or on several that are sampled as one. In a mixed batch, the weights of each dataset are
        divided by the largest of that dataset.

        Args:
            exponent: beta, from 0 for no correction to 1 for a full one. `numpy.interp` can raise it during a run.

        Returns:
            An array; from `as_torch`, a tensor on its device.

        Source: Schaul et al. 2016, Prioritized Experience Replay, section 3.4.
        """
        unscaled = (self.table_sizes * self.probabilities) ** -exponent
        weights: npt.NDArray[np.float64] = unscaled + 0  # a copy in any framework
        members = self.keys * 0 if self.members is None else self.members
        for member in range(int(members.max()) + 1 if len(self) else 0):
            chosen = members == member
            if chosen.any():  # a mixed batch from `poll` may lack a dataset
                weights[chosen] = unscaled[chosen] / unscaled[chosen].max()
        return weights

    @classmethod
    def concatenate(cls, infos: Sequence[BatchInfo]) -> BatchInfo:
        """Return the information about the samples of several batches, `infos`, in order."""
        servers = {info.server for info in infos}
        server = servers.pop() if len(servers) == 1 else ""
        return axes.joined(infos, received_at=min(info.received_at for info in infos), server=server)


class ArrayMemory:
    """Memory of large arrays, which is reused when no one refers to them any more.

    glibc returns such memory to the system at once, and it takes as long to get it again as to copy the rows.
    """

    def __init__(self) -> None:
        """Start without memory."""
        self._free: collections.deque[Array] = collections.deque(maxlen=_MAX_FREE)

    def rows_like(self, source: Array, num_rows: int) -> Array:
        """Return a new array [num_rows, ...] with the dtype and the row shape of another array."""
        shape, num_bytes = (num_rows, *source.shape[1:]), num_rows * source.strides[0]
        if num_bytes < _MIN_REUSED_BYTES or source.dtype.hasobject:
            return np.empty(shape, source.dtype)
        lent: Array = np.asarray(_Lent(self._memory_of(num_bytes), self._free))
        return lent[:num_bytes].view(source.dtype).reshape(shape)

    def _memory_of(self, num_bytes: int) -> Array:
        """Return free memory of at least this and at most twice this size, or new memory."""
        with contextlib.suppress(IndexError):  # an array of another thread's may free its memory at any time
            for _ in range(len(self._free)):
                memory = self._free.pop()
                if num_bytes <= len(memory) <= 2 * num_bytes:
                    return memory
                self._free.appendleft(memory)
            self._free.popleft()  # no size fits: so there are never more than were lent at once
        return np.empty(num_bytes + num_bytes // _SPARE, np.uint8)


class PartMemory:
    """Memory of the parts of a batch, one after the other: if it has as many rows as the last batch, nothing is joined.

    Not thread-safe.
    """

    def __init__(self, memory: ArrayMemory) -> None:
        """Take large arrays from `memory`."""
        self._memory = memory
        self._num_rows: dict[int, int] = {}  # of the last batch, by column
        self._blocks: dict[int, tuple[Array, int]] = {}  # memory of all rows, and the number of rows in use

    def part(self, column: int, source: Array, num_rows: int) -> Array:
        """Return memory for the next part [num_rows, ...] of a column, like the rows of `source`."""
        block, used = self._blocks.get(column, (None, 0))
        if block is None:
            block = self._memory.rows_like(source, max(self._num_rows.get(column, 0), num_rows))
        stop = used + num_rows
        if stop > len(block) or (block.dtype, block.shape[1:]) != (source.dtype, source.shape[1:]):
            return self._memory.rows_like(source, num_rows)
        self._blocks[column] = block, stop
        return block[used:stop]

    def joined(self, column: int, parts: Sequence[Column]) -> Column:
        """Return all parts of a column as one; begin the next batch."""
        block, used = self._blocks.pop(column)
        num_rows = self._num_rows[column] = sum(len(part.rows) for part in parts)
        lengths = parts[0].lengths if len(parts) == 1 else np.concatenate([part.lengths for part in parts])
        if used == num_rows == len(block):
            return Column(block, lengths, parts[0].is_scalar)
        rows = np.concatenate([part.rows for part in parts], out=self._memory.rows_like(parts[0].rows, num_rows))
        return Column(rows, lengths, parts[0].is_scalar)

    def begin_next(self) -> None:
        """Begin the next batch without the parts of this one."""
        self._blocks.clear()


class _Lent:
    """Memory that returns when no array refers to it."""

    def __init__(self, memory: Array, free: collections.deque[Array]) -> None:
        self.__array_interface__ = memory.__array_interface__
        self._memory, self._free = memory, free

    def __del__(self) -> None:
        self._free.append(self._memory)


class SampleRows:
    """Rows of several samples that are not copied yet.

    The M rows of all samples, laid end to end, are numbered from 0 to M - 1.

    Attributes:
        info: information about the samples.
        sources: for each column, an array, and the places of the rows in it.
        kinds: such a pair for the kinds of the rows; None if the samples have no kinds.
        is_scalar: for each column, whether each sample has one row, which readers get without time dimension.
    """

    def __init__(
        self,
        sources: Sequence[tuple[Array, JoinedRows]],
        info: BatchInfo,
        kinds: tuple[Array, JoinedRows] | None = None,
        is_scalar: Sequence[bool] | None = None,
        memory: ArrayMemory | None = None,
        *,
        are_copies: bool = False,
    ) -> None:
        """Refer to rows. Without `is_scalar`, no column is scalar. Large copies get their memory from `memory`.

        If the arrays `are_copies`, they have exactly these rows in order and no other user, so a batch may have them.
        """
        self.sources, self.info, self.kinds = sources, info, kinds
        self.num_columns = len(sources)
        self.is_scalar = [False] * len(sources) if is_scalar is None else is_scalar
        self._memory, self._are_copies = memory or ArrayMemory(), are_copies

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.info)

    @property
    def lengths(self) -> list[npt.NDArray[np.int64]]:
        """The number of rows of each sample, [n], per column."""
        return [rows.lengths for _, rows in self.sources]

    @property
    def form(self) -> list[tuple[np.dtype[Any], tuple[int, ...], bool]]:
        """The dtype and row shape of each column, and whether the column is scalar."""
        arrays = [source for source, _ in self.sources]
        return [(array.dtype, array.shape[1:], bare) for array, bare in zip(arrays, self.is_scalar, strict=True)]

    def check_equal_lengths(self, *, but_scalars: bool = False) -> None:
        """Raise StructureError if the columns, `but_scalars` perhaps, differ in a sample's number of rows."""
        for number, (lengths, is_scalar) in enumerate(zip(self.lengths, self.is_scalar, strict=True)):
            if but_scalars and is_scalar:
                continue
            if lengths is not self.info.lengths and not np.array_equal(lengths, self.info.lengths):  # mostly one array
                raise StructureError(
                    f"column {number}: its number of rows differs from that of other columns, expected equal numbers "
                    "of rows that are laid end to end. A `ReplayDataset` with `collate='pad'` reads such items."
                )

    def take(self, rows: npt.NDArray[np.int64], only: Container[int] | None = None) -> list[Any]:
        """Return copies [N, ...] of rows with these numbers [N]; None for columns that are not in `only`."""
        return _taken(self.sources, rows, only)

    def take_kinds(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8] | None:
        """Return copies [N] of the kinds of rows with these numbers [N]; None if the samples have no kinds."""
        return None if self.kinds is None else _taken([self.kinds], rows)[0]

    def take_with_kinds(self, rows: npt.NDArray[np.int64]) -> tuple[list[Any], npt.NDArray[np.uint8] | None]:
        """Return copies of rows and their kinds, as `take` and `take_kinds`."""
        if self.kinds is None:
            return self.take(rows), None
        *columns, kinds = _taken([*self.sources, self.kinds], rows)
        return columns, kinds

    def copies(self) -> tuple[list[Array], npt.NDArray[np.uint8] | None]:
        """Return copies of all rows of the columns, [M, ...] each, and of their kinds, [M]."""
        return [self.copy_of(column) for column in range(self.num_columns)], self.copy_of_kinds()

    def padded(self) -> tuple[list[Array], npt.NDArray[np.uint8] | None]:
        """Return copies of the columns with padding, [n, T, ...], and of the kinds, [n, T].

        A scalar column is [n, ...]. T is the length of the longest sample in the column. Padding is zero, an
        empty string, or the kind PADDING.
        """
        kinds = None if self.kinds is None else self._padded(*self.kinds, PADDING)
        columns = [
            self._copied(source, rows)
            if is_scalar
            else self._padded(source, rows, b"" if source.dtype.kind == "O" else 0)
            for (source, rows), is_scalar in zip(self.sources, self.is_scalar, strict=True)
        ]
        return columns, kinds

    def copy_of(self, column: int) -> Array:
        """Return a copy of all rows of a column, [M, ...]."""
        return self._copied(*self.sources[column])

    def copy_of_kinds(self) -> npt.NDArray[np.uint8] | None:
        """Return a copy of the kinds of all rows, [M]; None if the samples have no kinds."""
        return None if self.kinds is None else self._copied(*self.kinds)

    def _copied(self, source: Array, rows: JoinedRows) -> Array:
        return source if self._are_copies else copied(source, rows, self._memory)

    def _padded(self, source: Array, rows: JoinedRows, padding: Any) -> Array:
        num_samples, longest = len(rows.lengths), int(rows.lengths.max())
        shape = num_samples, longest, *source.shape[1:]
        if longest * num_samples == rows.num_rows:
            return self._copied(source, rows).reshape(shape)
        out = self._memory.rows_like(source, num_samples * longest).reshape(shape)
        rows.copy_padded(source, out, padding)
        return out

    def of(self, samples: npt.NDArray[np.intp]) -> SampleRows:
        """Return the rows of some samples, by their numbers, without a copy."""
        chosen = _Once(lambda rows: rows.of(samples))
        sources = [(source, chosen(rows)) for source, rows in self.sources]
        kinds = None if self.kinds is None else (self.kinds[0], chosen(self.kinds[1]))
        return SampleRows(sources, axes.taken(self.info, samples=samples), kinds, self.is_scalar, self._memory)

    def joined(self, others: Sequence[SampleRows] = ()) -> SampleRows:
        """Return copies of these rows, and of the rows of others after them; without kinds if one run has none."""
        runs = [self, *others]
        end_to_end = _Once(lambda of: JoinedRows.end_to_end(np.concatenate([rows.lengths for rows in of])))

        def one(sources: Sequence[tuple[Array, JoinedRows]]) -> tuple[Array, JoinedRows]:
            arrays = [copied(*source, self._memory) for source in sources]
            places = end_to_end(tuple(rows for _, rows in sources))
            if len(arrays) == 1:
                return arrays[0], places
            return np.concatenate(arrays, out=self._memory.rows_like(arrays[0], places.num_rows)), places

        columns = [one(sources) for sources in zip(*(run.sources for run in runs), strict=True)]
        of_kinds = [run.kinds for run in runs if run.kinds is not None]
        kinds = one(of_kinds) if len(of_kinds) == len(runs) else None
        info = BatchInfo.concatenate([run.info for run in runs])
        return SampleRows(columns, info, kinds, self.is_scalar, self._memory, are_copies=True)


class _Once:
    """A function of hashable values that remembers its results: columns mostly share their places."""

    def __init__(self, function: Callable[[Any], JoinedRows]) -> None:
        self._function = function
        self._results: dict[Any, JoinedRows] = {}

    def __call__(self, value: Any) -> JoinedRows:
        if value not in self._results:
            self._results[value] = self._function(value)
        return self._results[value]


def copied(source: Array, rows: JoinedRows, memory: ArrayMemory) -> Array:
    """Return a copy [M, ...] of rows of an array."""
    out = memory.rows_like(source, rows.num_rows)
    rows.copy(source, out)
    return out


def _taken(
    sources: Sequence[tuple[Array, JoinedRows]],
    rows: npt.NDArray[np.int64],
    only: Container[int] | None = None,
) -> list[Any]:
    places: dict[JoinedRows, npt.NDArray[Any]] = {}  # several columns share places
    taken: list[Any] = []
    for index, (source, joined) in enumerate(sources):
        if only is not None and index not in only:
            taken.append(None)
            continue
        if joined not in places:
            places[joined] = joined.rows(rows)
        taken.append(source.take(places[joined], axis=0))
    return taken
