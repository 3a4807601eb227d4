"""Samples as columns of arrays, with the server's information about them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from reverb_writer.nests import shapes_text
from reverb_writer.scalars import Record

Array = npt.NDArray[Any]


_MAX_GROWTH = 8  # limit of the first allocation, in times the rows at hand: the other samples may be shorter


class Column(NamedTuple):
    """One column of n samples."""

    # [sum(lengths), ...], the rows of all samples, concatenated; owned by the caller. A list of arrays
    # [lengths[i], ...], one for each sample, if samples differ in dtype or in the shape of a row.
    rows: Array | list[Array]
    lengths: npt.NDArray[np.int64]  # [n] number of rows of each sample
    is_scalar: bool  # whether each sample has one row, which readers get without the time dimension

    def split(self) -> list[Array]:
        """Return each sample's rows as a view [T, ...], or [...] if the column is scalar."""
        if isinstance(self.rows, list):
            rows = self.rows
        else:
            ends = np.cumsum(self.lengths).tolist()
            rows = [self.rows[start:end] for start, end in itertools.pairwise([0, *ends])]
        return [row[0] for row in rows] if self.is_scalar else rows


class SampleInfo(NamedTuple):
    """The server's information about one sample.

    Attributes:
        key: key of the item, for `mutate_priorities`.
        priority: priority of the item when it was sampled.
        probability: probability of the item among the items of the table.
        table_size: number of items in the table when the item was sampled.
        times_sampled: how often the item has been sampled, this time included.
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
        times_sampled: [B] int32, how often the item has been sampled, this time included.
        lengths: [B] int64, rows of the sample; rows of the longest leaf if leaves differ.
        received_at: `time.monotonic()` in seconds, when the first of the samples arrived.
        server: address of the server; "" if the samples come from several servers.
        mask: [B, T] bool, True for real rows; with `collate="pad"` only, else None.
        members: [B] int64, number of the dataset that the sample is from; with a `MixedDataset` only, else None.
    """

    keys: npt.NDArray[np.uint64]
    priorities: npt.NDArray[np.float64]
    probabilities: npt.NDArray[np.float64]
    table_sizes: npt.NDArray[np.int64]
    times_sampled: npt.NDArray[np.int32]
    lengths: npt.NDArray[np.int64]
    received_at: float
    server: str = ""
    mask: npt.NDArray[np.bool_] | None = None
    members: npt.NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.keys)

    def __repr__(self) -> str:
        return shapes_text(self)

    def importance_weights(self, exponent: float = 1.0) -> npt.NDArray[np.float64]:
        """Return [B] weights that make up for sampling by priority, the largest of them 1.

        They are (table size x probability) ** -exponent, divided by the largest. They compare samples of one table, on
        one server or on several that are sampled as one. In a mixed batch, those of each dataset are divided by their
        own largest.

        Args:
            exponent: beta, 0 for none of it to 1 for all. `numpy.interp` gives one that grows.

        Returns:
            An array; from `as_torch`, a tensor on its device.

        Source: Schaul et al. 2016, Prioritized Experience Replay, section 3.4.
        """
        unscaled = (self.table_sizes * self.probabilities) ** -exponent
        weights: npt.NDArray[np.float64] = unscaled + 0  # a copy in any framework
        members = self.keys * 0 if self.members is None else self.members
        for member in range(int(members.max()) + 1 if len(self) else 0):
            chosen = members == member
            if chosen.any():  # a mixed batch of what has arrived may lack a dataset
                weights[chosen] = unscaled[chosen] / unscaled[chosen].max()
        return weights

    def map_arrays(self, convert: Callable[[Any], Any]) -> BatchInfo:
        """Return this information with `convert` applied to each array, such as a conversion to tensors."""
        arrays = {name: value for name, value in vars(self).items() if hasattr(value, "shape")}
        return dataclasses.replace(self, **{name: convert(array) for name, array in arrays.items()})

    def choose(self, index: Any) -> BatchInfo:
        """Return the information about some of the samples; `index` is any NumPy index of the first dimension."""
        arrays = {name: value for name, value in vars(self).items() if hasattr(value, "shape")}
        return dataclasses.replace(self, **{name: array[index] for name, array in arrays.items()})

    @classmethod
    def concatenate(cls, infos: Sequence[BatchInfo]) -> BatchInfo:
        """Return the information about the samples of several batches, `infos`, in order; masks have equal lengths."""
        servers = {info.server for info in infos}
        arrays: dict[str, Any] = {
            name: np.concatenate([getattr(info, name) for info in infos])
            for name, first in vars(infos[0]).items()
            if isinstance(first, np.ndarray) and all(getattr(info, name) is not None for info in infos)
        }
        received_at = min(info.received_at for info in infos)
        return BatchInfo(**arrays, received_at=received_at, server=servers.pop() if len(servers) == 1 else "")

    def split(self) -> Iterator[SampleInfo]:
        """Yield the information about each sample."""
        arrays = (self.keys, self.priorities, self.probabilities, self.table_sizes, self.times_sampled)
        yield from map(SampleInfo, *(array.tolist() for array in arrays))


def split_samples(columns: Sequence[Column], info: BatchInfo) -> Iterator[tuple[list[Array], SampleInfo]]:
    """Yield each sample's columns, [T, ...] or [...] if the column is scalar, and its information."""
    leaves = map(list, zip(*[column.split() for column in columns], strict=True))
    yield from zip(leaves, info.split(), strict=True)


class ColumnBuilder:
    """Concatenates the rows of samples; in several arrays only if samples differ in dtype or in the shape of a row."""

    def __init__(self, buffer: Array | None = None) -> None:
        """Start without rows; `buffer` is overwritten with them if their dtype, shape and number fit."""
        self._buffer = buffer
        self._arrays: list[Array] = []  # of different dtypes or shapes of rows
        self._num_rows: list[int] = []  # used of each array
        self._lengths: list[npt.NDArray[np.int64]] = []

    @property
    def largest_array(self) -> Array | None:
        """Return the largest array, which can be the buffer of another builder."""
        return max(self._arrays, key=lambda array: array.nbytes, default=None)

    def append_rows(
        self, source: Array, rows: npt.NDArray[np.intp], lengths: npt.NDArray[np.int64], batch_size: int
    ) -> None:
        """Append copies of rows.

        Args:
            source: [capacity, ...] rows of decoded chunks.
            rows: [sum(lengths)] indices into `source`, those of several samples, concatenated.
            lengths: [n] number of rows of each of these samples.
            batch_size: how many samples the whole column probably has.
        """
        self._lengths.append(lengths)
        if not self._arrays and self._buffer is None and len(lengths) >= batch_size:  # the whole column
            self._arrays.append(source.take(rows, axis=0, mode="clip"))
            self._num_rows.append(len(rows))
            return
        if not self._arrays or (self._arrays[-1].dtype, self._arrays[-1].shape[1:]) != (source.dtype, source.shape[1:]):
            likely = min(len(rows) * batch_size // len(lengths), _MAX_GROWTH * len(rows))
            self._arrays.append(self._allocate(source, max(len(rows), likely)))
            self._num_rows.append(0)
        start = self._num_rows[-1]
        stop = self._num_rows[-1] = start + len(rows)
        if stop > len(self._arrays[-1]):
            larger = self._allocate(source, max(stop, 2 * len(self._arrays[-1])))
            larger[:start] = self._arrays[-1][:start]
            self._arrays[-1] = larger
        source.take(rows, axis=0, mode="clip", out=self._arrays[-1][start:stop])

    def build(self, is_scalar: bool) -> Column:
        """Return all rows as a column."""
        arrays = [array[:num_rows] for array, num_rows in zip(self._arrays, self._num_rows, strict=True)]
        lengths = self._lengths[0] if len(self._lengths) == 1 else np.concatenate(self._lengths)
        if len(arrays) == 1:
            return Column(arrays[0], lengths, is_scalar)
        # Every array begins with the first row of a sample.
        rows: list[Array] = []
        remaining = iter(lengths.tolist())
        for array in arrays:
            at = 0
            while at < len(array):
                length = next(remaining)
                rows.append(array[at : at + length])
                at += length
        return Column(rows, lengths, is_scalar)

    def _allocate(self, source: Array, num_rows: int) -> Array:
        buffer, self._buffer = self._buffer, None
        wanted = (source.dtype, source.shape[1:])
        if buffer is not None and (buffer.dtype, buffer.shape[1:]) == wanted and len(buffer) >= num_rows:
            return buffer
        return np.empty((num_rows, *source.shape[1:]), source.dtype)
