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
from reverb_writer.writing.ring import StepRing
from reverb_writer.writing.step_layout import StepLayout


@dataclass(slots=True)
class Chunk:
    """Steps `start` to `stop` of an episode, all columns, encoded."""

    key: int  # the chunk's
    start: int  # step count before its first step
    stop: int  # step count after its last step
    data: bytes  # as `encode_chunk` makes it
    # the columns themselves, if a priority is a function; they are owned by the chunk
    columns: Sequence[npt.NDArray[Any]] | None = None
    held: bool = False  # whether the server has been told to keep it for later items
    counted: bool = False  # whether a request in flight already counts its bytes


class ChunkEncoder:
    """Encodes steps of any episode of an observer. Not thread-safe: only the sender uses it."""

    def __init__(self, ring: StepRing, layout: StepLayout, *, keeps_columns: bool) -> None:
        """Take where the rows are; `keeps_columns` for chunks with their columns."""
        self.layout = layout
        self._keeps_columns = keeps_columns
        self._ring = ring
        # One for each observer: a forked child must not draw the keys of its parent.
        self._random = random.Random()  # noqa: S311  # keys are no secret
        self._encoders: dict[int, list[tuple[bytes, Callable[[Any], Any]]]] = {}  # by the number of steps

    def new_key(self) -> int:
        """Return a random key for a chunk, an item or an episode."""
        return self._random.getrandbits(KEY_BITS)

    def encode(self, episode: int, start: int, rows: Any, num_padding: int) -> Chunk:
        """Encode rows of the ring and padding steps after them: the chunk of an episode that begins at step `start`.

        `rows` is an index, as `StepRing.rows` returns it, or None for padding alone.
        """
        layout = self.layout
        columns = [] if rows is None else [column[rows] for column in self._ring.columns]
        num_real = len(columns[0]) if columns else 0
        if layout.mask and columns:
            columns.append(np.ones(num_real, bool))
        if num_padding:
            padding = [
                np.full((num_padding, *shape), leaf, dtype)
                for leaf, dtype, shape in zip(layout.padding_step, layout.dtypes, layout.shapes, strict=True)
            ]
            columns = [np.concatenate(both) for both in zip(columns, padding, strict=True)] if columns else padding
        size = num_real + num_padding
        encoders = self._encoders.get(size)
        if encoders is None:
            encoders = self._encoders[size] = [tensors.encoder(column.dtype, column.shape) for column in columns]
        key = self.new_key()
        data = encode_chunk(key, episode, start & 0x3FFFFFFF, columns, encoders, layout.encoded_spec)
        kept = [np.array(column) for column in columns] if self._keeps_columns else None
        return Chunk(key, start, start + size, data, kept)
