"""Builds one column of a batch by copying rows of decoded chunks into the array that the caller gets."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from reverb_writer.decoding.samples import Column

Array = npt.NDArray[Any]

_MAX_GROWTH = 8  # limit of the first allocation, in times the rows at hand: the other samples may be shorter


class ColumnBuilder:
    """Concatenates the rows of samples; in several arrays only if samples differ in dtype or in the shape of a row."""

    def __init__(self, buffer: Array | None = None) -> None:
        """Start without rows.

        Args:
            buffer: is overwritten with the rows if their dtype, shape and number fit.
        """
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
        lengths = np.concatenate(self._lengths)
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
