"""Rows of steps become encoded chunks."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from reverb_writer.protocol import tensors
from reverb_writer.protocol.item_encoding import KEY_BITS, encode_chunk
from reverb_writer.windows import WindowSpec
from reverb_writer.writing.ring import StepRing
from reverb_writer.writing.step_layout import StepLayout


@dataclass(slots=True)
class Chunk:
    """Steps `start` to `stop` of an episode, all columns of them, encoded."""

    key: int  # the chunk's
    start: int  # step count before its first step
    stop: int  # step count after its last step
    data: bytes  # as `encode_chunk` makes it
    # the columns themselves, if a priority is a function of them; they are owned by the chunk
    columns: Sequence[npt.NDArray[Any]] | None = None
    held: bool = False  # whether the server has been told to keep it for later items
    counted: bool = False  # whether a request in flight already counts its bytes


class ChunkEncoder:
    """Encodes steps of any episode of an observer. Not thread-safe: only the sender uses it.

    Attributes:
        layout: the columns of a step.
        num_columns: columns of a step.
    """

    def __init__(self, ring: StepRing, layout: StepLayout, *, keeps_columns: bool) -> None:
        """Take where the rows are; `keeps_columns` for chunks with their columns."""
        self.layout = layout
        self.num_columns = len(layout.dtypes)
        self._keeps_columns = keeps_columns
        self._ring = ring
        # One for each observer: a forked child must not draw the keys of its parent.
        self._random = random.Random()  # noqa: S311  # keys are no secret
        self._encoders: dict[int, list[tuple[bytes, Callable[[Any], Any]]]] = {}  # by the number of steps

    def new_key(self) -> int:
        """Return a random key for a chunk, an item or an episode."""
        return self._random.getrandbits(KEY_BITS)

    def encode(self, episode: int, start: int, rows: Any, num_padding: int) -> Chunk:
        """Encode the steps of some rows of the ring, with padding steps after them, as a chunk.

        Args:
            episode: key of the episode.
            start: step count before the first of them.
            rows: index of the rows, as `StepRing.rows` returns it; None for padding alone.
            num_padding: number of padding steps.
        """
        columns = [] if rows is None else [column[rows] for column in self._ring.columns]
        num_real = len(columns[0]) if columns else 0
        if self.layout.mask and columns:
            columns.append(np.ones(num_real, bool))
        if num_padding:
            padding = [
                np.full((num_padding, *shape), leaf, dtype)
                for leaf, dtype, shape in zip(
                    self.layout.padding_step, self.layout.dtypes, self.layout.shapes, strict=True
                )
            ]
            columns = list(map(_joined, columns, padding)) if columns else padding
        size = num_real + num_padding
        encoders = self._encoders.get(size)
        if encoders is None:
            encoders = self._encoders[size] = [tensors.encoder(column.dtype, column.shape) for column in columns]
        key = self.new_key()
        data = encode_chunk(key, episode, start & 0x3FFFFFFF, columns, encoders, self.layout.encoded_spec)
        kept = [np.array(column) for column in columns] if self._keeps_columns else None
        return Chunk(key, start, start + size, data, kept)


def _joined(column: npt.NDArray[Any], padding: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return np.concatenate([column, padding])


def chunk_grid(specs: Sequence[WindowSpec], chunk_length: int) -> Callable[[int], int]:
    """Return a function that gives the number of steps of the chunk that begins at a step count.

    If windows do not overlap, each window is one chunk, and so is each gap between two.

    >>> steps_of_chunk = chunk_grid([WindowSpec(2, 2)], 5)
    >>> steps_of_chunk(0), steps_of_chunk(3)
    (2, 1)
    """
    length, stride = specs[0].sequence_length, specs[0].stride_length
    if len(set(specs)) != 1 or length is None or length > min(stride, chunk_length):
        return lambda _: chunk_length
    covered = length

    def steps_of_chunk(start: int) -> int:
        phase = start % stride
        return min(chunk_length, (covered if phase < covered else stride) - phase)

    return steps_of_chunk
