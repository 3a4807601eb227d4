"""Ranges of rows of several samples in an array, and copies of these rows.

Short ranges are copied by an index of their rows, one `take` per column. Long ranges are copied as slices, because an
index takes more memory than the rows of a small leaf.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Integers = npt.NDArray[np.int64]

_MIN_SLICED_ROWS = 128  # mean length of ranges from which on a slice costs less than the index of its rows


class JoinedRows:
    """Places of the rows of n samples in an array. All M rows, laid end to end, are numbered from 0 on.

    Attributes:
        lengths: [n] rows of each sample.
    """

    def __init__(self, firsts: Integers, sizes: Integers, num_ranges: Integers | None = None) -> None:
        """Refer to ranges [R] by their first rows and sizes; None if each sample has one range, else [n] numbers."""
        self._firsts, self._sizes, self._num_ranges = firsts, sizes, num_ranges
        self._stops = sizes.cumsum()
        self._offsets = firsts - self._stops + sizes  # from numbers of rows to places
        self.lengths = sizes if num_ranges is None else np.add.reduceat(sizes, num_ranges.cumsum() - num_ranges)

    @classmethod
    def end_to_end(cls, lengths: Integers) -> JoinedRows:
        """Return all rows of an array in which samples of these lengths are laid end to end."""
        return cls(lengths.cumsum() - lengths, lengths)

    @property
    def num_rows(self) -> int:
        """M."""
        return int(self._stops[-1])

    def of(self, samples: npt.NDArray[np.intp]) -> JoinedRows:
        """Return the rows of some samples, by their numbers."""
        if self._num_ranges is None:
            return JoinedRows(self._firsts[samples], self._sizes[samples])
        num_ranges = self._num_ranges[samples]
        ranges = joined_ranges((self._num_ranges.cumsum() - self._num_ranges)[samples], num_ranges)
        return JoinedRows(self._firsts[ranges], self._sizes[ranges], num_ranges)

    @functools.cached_property
    def all_rows(self) -> npt.NDArray[np.intp]:
        """[M] places of all rows."""
        rows: npt.NDArray[np.intp] = np.arange(self._stops[-1]) + self._offsets.repeat(self._sizes)
        return rows

    def rows(self, numbers: Integers) -> npt.NDArray[np.intp]:
        """Return [N] places of rows with these numbers."""
        places: npt.NDArray[np.intp] = numbers + self._offsets[self._stops.searchsorted(numbers, "right")]
        return places

    def copy(self, source: Array, out: Array) -> None:
        """Copy all rows of an array into `out` [M, ...]."""
        if self.num_rows >= _MIN_SLICED_ROWS * len(self._sizes):
            np.concatenate([source[part] for part in self._slices], out=out)
        else:
            source.take(self.all_rows, axis=0, mode="clip", out=out)

    def copy_padded(self, source: Array, out: Array, padding: Any) -> None:
        """Copy all rows of an array into `out` [n, T, ...], and set the rows after each sample's last row."""
        num_samples, longest = out.shape[:2]
        flat = out.reshape(num_samples * longest, *out.shape[2:])
        if len(flat) >= _MIN_SLICED_ROWS * (num_samples + len(self._sizes)):
            value = np.empty((), source.dtype)
            value[()] = padding
            filling = np.broadcast_to(value, (longest, *source.shape[1:]))
            np.concatenate([*self._padded_parts(source, filling)], out=flat)
        else:
            places, of_padding = self._padded_rows
            source.take(places, axis=0, mode="clip", out=flat)
            flat[of_padding] = padding

    @functools.cached_property
    def _slices(self) -> list[slice]:
        return [*map(slice, self._firsts.tolist(), (self._firsts + self._sizes).tolist())]

    def _padded_parts(self, source: Array, filling: Array) -> Iterator[Array]:
        """Yield the ranges of each sample, and then its padding."""
        ranges = iter(self._slices)
        all_counts: Sequence[int] = [1] * len(self.lengths) if self._num_ranges is None else self._num_ranges.tolist()
        for count, length in zip(all_counts, self.lengths.tolist(), strict=True):
            for part in itertools.islice(ranges, count):
                yield source[part]
            yield filling[length:]

    @functools.cached_property
    def _padded_rows(self) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
        """The place of each row of a padded copy, any place for padding; and the numbers of the rows of padding."""
        is_real = np.arange(self.lengths.max()) < self.lengths[:, None]
        places = np.full(is_real.shape, self._firsts[0])
        places[is_real] = self.all_rows
        return places.ravel(), np.flatnonzero(~is_real)


def joined_ranges(firsts: Integers, sizes: Integers) -> npt.NDArray[np.intp]:
    """Return the numbers of several ranges, end to end.

    >>> joined_ranges(np.array([5, 2]), np.array([2, 1])).tolist()
    [5, 6, 2]
    """
    stops = sizes.cumsum()
    numbers: npt.NDArray[np.intp] = np.arange(stops[-1]) + (firsts - stops + sizes).repeat(sizes)
    return numbers
