"""Cut sequences into shorter ones, and divide those into batches. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from reverb_writer.decoding.samples import BatchInfo, Column, Samples
from reverb_writer.errors import SpecError, StructureError


class SubsequenceCutter:
    """Subsequences of samples, kept until they fill a batch. Not thread-safe."""

    def __init__(self, num_steps: int) -> None:
        """Start with none; each will have `num_steps` rows."""
        self.num_pieces = 0  # how many subsequences are kept
        self._num_steps = num_steps
        self._parts: list[Samples] = []
        self._sample_of = np.zeros(0, np.int64)  # of each piece; samples are numbered as they come
        self._next_sample = 0

    @property
    def num_samples(self) -> int:
        """Number of samples that the kept subsequences are cut from."""
        return len(np.unique(self._sample_of))

    def add(self, columns: Sequence[Column], info: BatchInfo) -> None:
        """Cut samples and keep the subsequences; see `cut`."""
        pieces, info_of_pieces, sample_of = cut(columns, info, self._num_steps)
        self._parts.append((pieces, info_of_pieces))
        self._sample_of = np.concatenate([self._sample_of, self._next_sample + sample_of])
        self._next_sample += len(info)
        self.num_pieces += len(sample_of)

    def take(self, num_pieces: int) -> Samples:
        """Remove and return the first `num_pieces` subsequences, or all if there are fewer."""
        columns = [_joined(parts) for parts in zip(*(columns for columns, _ in self._parts), strict=True)]
        info = BatchInfo.concatenate([info for _, info in self._parts])
        first, rest = slice(num_pieces), slice(num_pieces, None)
        info_of_rest = dataclasses.replace(info.choose(rest), received_at=self._parts[-1][1].received_at)
        self._parts = [([_pieces_of(column, rest) for column in columns], info_of_rest)]
        self._sample_of = self._sample_of[rest]
        self.num_pieces = len(self._sample_of)
        return [_pieces_of(column, first) for column in columns], info.choose(first)


def check_same_length(num_steps: int, sequence_length: int) -> None:
    """Check that sequences can be cut into pieces without a rest."""
    if num_steps > sequence_length:
        raise SpecError(
            f"`num_steps` > `sequence_length` ({num_steps} vs. {sequence_length}). A subsequence cannot be longer than "
            "its sequence."
        )
    if sequence_length % num_steps:
        raise SpecError(f"`sequence_length` {sequence_length} is not a multiple of `num_steps` {num_steps}.")


def cut(
    columns: Sequence[Column], info: BatchInfo, num_steps: int
) -> tuple[list[Column], BatchInfo, npt.NDArray[np.int64]]:
    """Cut each sample into subsequences of `num_steps` rows, and drop the rows left at its end.

    Returns:
        The subsequences in order; for each, the info of the sample that it is cut from; and the number of that sample
        among those given. A sample shorter than `num_steps` has no subsequence.

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
    lengths = np.full(len(sample_of), num_steps)
    return pieces, dataclasses.replace(info.choose(sample_of), lengths=lengths), sample_of


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
