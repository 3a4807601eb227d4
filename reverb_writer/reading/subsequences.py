"""Sequences cut into shorter ones, counted out in batches. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from reverb_writer.decoding.samples import Column, SampleInfos
from reverb_writer.errors import SpecError, StructureError

__all__ = ["SubsequenceCutter", "check_same_length", "cut"]


class SubsequenceCutter:
    """Pieces of samples that wait to fill a batch. Not thread-safe.

    Attributes:
        num_pieces: how many there are.
    """

    def __init__(self, num_steps: int) -> None:
        """Start with none; each will have `num_steps` rows."""
        self.num_pieces = 0
        self._num_steps = num_steps
        self._parts: list[tuple[list[Column], SampleInfos]] = []
        self._sample_of = np.zeros(0, np.int64)  # of each piece; samples are numbered as they come
        self._next_sample = 0

    @property
    def num_samples(self) -> int:
        """How many samples they are of."""
        return len(np.unique(self._sample_of))

    def add(self, columns: Sequence[Column], infos: SampleInfos) -> None:
        """Cut samples and keep the pieces; see `cut`."""
        pieces, infos_of_pieces, sample_of = cut(columns, infos, self._num_steps)
        self._parts.append((pieces, infos_of_pieces))
        self._sample_of = np.concatenate([self._sample_of, self._next_sample + sample_of])
        self._next_sample += len(infos.keys)
        self.num_pieces += len(sample_of)

    def take(self, num_pieces: int) -> tuple[list[Column], SampleInfos]:
        """Take the first `num_pieces`, of those there are."""
        columns = [_joined(parts) for parts in zip(*(columns for columns, _ in self._parts), strict=True)]
        infos = SampleInfos.concatenate([infos for _, infos in self._parts])
        first, rest = slice(num_pieces), slice(num_pieces, None)
        self._parts = [([_pieces_of(column, rest) for column in columns], infos.choose(rest))]
        self._sample_of = self._sample_of[rest]
        self.num_pieces = len(self._sample_of)
        return [_pieces_of(column, first) for column in columns], infos.choose(first)


def check_same_length(num_steps: int, sequence_length: int) -> None:
    """Check that sequences can be cut into pieces without a rest.

    Raises:
        SpecError: they are too short, or not a multiple.
    """
    if num_steps > sequence_length:
        raise SpecError(
            f"`num_steps` > `sequence_length` ({num_steps} vs. {sequence_length}): pieces come from within."
        )
    if sequence_length % num_steps:
        raise SpecError(f"`sequence_length` {sequence_length} is not a multiple of `num_steps` {num_steps}.")


def cut(
    columns: Sequence[Column], infos: SampleInfos, num_steps: int
) -> tuple[list[Column], SampleInfos, npt.NDArray[np.int64]]:
    """Cut each sample into pieces of `num_steps` rows; what is left at its end is dropped.

    Returns:
        The pieces in order, the info of the sample that each is of, and the number of that sample among those given. A
        sample that is too short has none.

    Raises:
        StructureError: the columns of a sample differ in length, or in dtype or shape between samples.

    Source: TF-Agents 0.19, `ReverbReplayBuffer.as_dataset(num_steps)`.
    """
    sequences = [column for column in columns if not column.is_scalar]
    if not sequences or any((column.lengths != sequences[0].lengths).any() for column in sequences):
        raise StructureError("`num_steps` needs items whose leaves all have the same number of rows.")
    counts = sequences[0].lengths // num_steps
    sample_of = np.repeat(np.arange(len(counts)), counts)
    ends = np.cumsum(sequences[0].lengths)
    first_rows = np.repeat(ends - sequences[0].lengths, counts)
    piece_in_sample = np.arange(len(sample_of)) - np.repeat(np.cumsum(counts) - counts, counts)
    rows = (first_rows + piece_in_sample * num_steps)[:, None] + np.arange(num_steps)
    pieces = []
    for column in columns:
        if isinstance(column.rows, list):
            raise StructureError("`num_steps` needs items that agree in dtype and shape.")
        lengths = np.full(len(sample_of), 1 if column.is_scalar else num_steps)
        taken = column.rows[sample_of] if column.is_scalar else column.rows[rows.reshape(-1)]
        pieces.append(Column(taken, lengths, column.is_scalar))
    return pieces, infos.choose(sample_of), sample_of


def _joined(parts: Sequence[Column]) -> Column:
    if len(parts) == 1:
        return parts[0]
    lengths: npt.NDArray[np.int64] = np.concatenate([part.lengths for part in parts])
    return Column(np.concatenate([np.asarray(part.rows) for part in parts]), lengths, parts[0].is_scalar)


def _pieces_of(column: Column, which: slice) -> Column:
    """Choose among pieces, all of one length."""
    lengths = column.lengths
    size = int(lengths[0]) if len(lengths) else 1
    rows = np.asarray(column.rows)
    chosen = rows.reshape(len(lengths), size, *rows.shape[1:])[which]
    return Column(chosen.reshape(-1, *rows.shape[1:]), lengths[which], column.is_scalar)
