"""Chunks of one episode: steps are copied into arrays, and full arrays become an encoded chunk."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from reverb_writer.protocol import tensors
from reverb_writer.protocol.item_encoding import KEY_BITS, encode_chunk
from reverb_writer.windows import WindowSpec


class Chunk(NamedTuple):
    """Steps `start` to `stop` of an episode, all columns of them, encoded."""

    key: int  # the chunk's
    start: int  # step count before its first step
    stop: int  # step count after its last step
    data: bytes  # as `encode_chunk` makes it
    held: bool = False  # whether the server has been told to keep it for later items
    counted: bool = False  # whether a request in flight already counts its bytes


class ChunkBuilder:
    """Builds the chunks of one episode at a time.

    Not thread-safe: its writer holds a lock, copies steps into `buffers`, and commits them by setting `fill`.

    Attributes:
        length: steps in a chunk at most.
        buffers: arrays [length, ...] of the open chunk, one for each leaf.
        fill: steps in the open chunk.
        capacity: steps at which the open chunk is full.
        num_sealed: steps of the episode that are in sealed chunks.
        sealed: sealed chunks that are still needed, in order, without gaps.
        unsent_bytes: bytes of chunks sealed since the last request.
        num_chunks: chunks sealed in all episodes.
    """

    def __init__(
        self,
        dtypes: Sequence[np.dtype[Any]],
        shapes: Sequence[tuple[int, ...]],
        specs: Sequence[WindowSpec],
        length: int,
        padding_step: Sequence[Any],
        spec: bytes = b"",
    ) -> None:
        """Begin an empty episode; `spec` is the `specs.spec_tensor` of a step, which each chunk carries."""
        for dtype in dtypes:
            tensors.dtype_number(dtype)
        self.length = length
        self.buffers: list[npt.NDArray[Any]] = list(map(np.zeros, [(length, *shape) for shape in shapes], dtypes))
        self.num_chunks = 0
        # One for each builder: a forked child must not draw the keys of its parent.
        self._random = random.Random()  # noqa: S311  # keys are no secret
        self._padding_step, self._spec = list(padding_step), spec
        self._encoders: dict[int, list[tuple[bytes, Callable[[Any], Any]]]] = {}  # by the number of steps
        self._chunk_grid = chunk_grid(specs, length)
        self.begin_episode()

    def new_key(self) -> int:
        """Return a random key for a chunk, an item or an episode."""
        return self._random.getrandbits(KEY_BITS)

    def begin_episode(self) -> None:
        """Forget the chunks; the next step is the first one of an episode."""
        self._episode = self.new_key()
        self.fill = self.num_sealed = self.unsent_bytes = 0
        self.capacity = self._chunk_grid(0)
        self.sealed: list[Chunk] = []

    def pad(self, count: int) -> None:
        """Add padding steps until the episode has `count` steps."""
        while self.num_sealed + self.fill < count:
            if self.fill == self.capacity:
                self.seal()
            for buffer, leaf in zip(self.buffers, self._padding_step, strict=True):
                buffer[self.fill] = leaf
            self.fill += 1

    def seal(self) -> None:
        """Encode the steps of the open chunk, if there are any."""
        fill = self.fill
        if not fill:
            return
        columns = self.buffers if fill == self.length else [buffer[:fill] for buffer in self.buffers]
        encoders = self._encoders.get(fill)
        if encoders is None:
            encoders = self._encoders[fill] = [tensors.encoder(column.dtype, column.shape) for column in columns]
        key, stop = self.new_key(), self.num_sealed + fill
        data = encode_chunk(key, self._episode, self.num_sealed & 0x3FFFFFFF, columns, encoders, self._spec)
        self.sealed, self.unsent_bytes, self.num_chunks, self.num_sealed, self.fill, self.capacity = (
            [*self.sealed, Chunk(key, self.num_sealed, stop, data)],
            self.unsent_bytes + len(data),
            self.num_chunks + 1,
            stop,
            0,
            self._chunk_grid(stop),
        )


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
