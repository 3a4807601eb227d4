"""One column of a batch while it is put together: rows are copied in where they will be handed out."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from reverb_writer.decoding.samples import Column

__all__ = ["Output"]

Array = npt.NDArray[Any]

_MOST_AHEAD = 8  # times the rows that are there: who knows how long the other samples are


class Output:
    """Rows of samples, end to end; in several arrays only if the samples differ in dtype or shape."""

    def __init__(self, buffer: Array | None = None) -> None:
        """Begin without rows; `buffer` is used for them if they fit."""
        self._buffer = buffer
        self._parts: list[Array] = []
        self._num_rows: list[int] = []  # of each part
        self._lengths: list[npt.NDArray[np.int64]] = []

    @property
    def largest(self) -> Array | None:
        """The largest array, to be used again."""
        return max(self._parts, key=lambda part: part.nbytes, default=None)

    def add(self, column: Array, rows: npt.NDArray[np.intp], lengths: npt.NDArray[np.int64], batch_size: int) -> None:
        """Copy rows of `column`; they are samples of these lengths, of a batch of that size."""
        self._lengths.append(lengths)
        if not self._parts or (self._parts[-1].dtype, self._parts[-1].shape[1:]) != (column.dtype, column.shape[1:]):
            likely = min(len(rows) * batch_size // len(lengths), _MOST_AHEAD * len(rows))
            self._parts.append(self._array(column, max(len(rows), likely)))
            self._num_rows.append(0)
        start = self._num_rows[-1]
        stop = self._num_rows[-1] = start + len(rows)
        if stop > len(self._parts[-1]):
            larger = self._array(column, max(stop, 2 * len(self._parts[-1])))
            larger[:start] = self._parts[-1][:start]
            self._parts[-1] = larger
        column.take(rows, axis=0, mode="clip", out=self._parts[-1][start:stop])

    def column(self, squeezed: bool) -> Column:
        """Return what there is."""
        parts = [part[:num_rows] for part, num_rows in zip(self._parts, self._num_rows, strict=True)]
        lengths = np.concatenate(self._lengths)
        if len(parts) == 1:
            return Column(parts[0], lengths, squeezed)
        # Where dtype or shape changes, a sample begins.
        rows: list[Array] = []
        remaining = iter(lengths.tolist())
        for part in parts:
            at = 0
            while at < len(part):
                length = next(remaining)
                rows.append(part[at : at + length])
                at += length
        return Column(rows, lengths, squeezed)

    def _array(self, column: Array, num_rows: int) -> Array:
        buffer, self._buffer = self._buffer, None
        wanted = (column.dtype, column.shape[1:])
        if buffer is not None and (buffer.dtype, buffer.shape[1:]) == wanted and len(buffer) >= num_rows:
            return buffer
        return np.empty((num_rows, *column.shape[1:]), column.dtype)
