"""The chunks of a server, as the bytes in which they came, each for as long as something refers to it.

    insert stream --keeps--+
                           +--> chunk: its bytes, and the number of those that refer to it; with none it is gone
    item, stored or waiting+

Not thread-safe: `Store` has the lock.
"""

from __future__ import annotations

from collections.abc import Iterable

from reverb_writer.local.refusals import Refusal, Status
from reverb_writer.protocol.tensors import varint

_SAMPLED_CHUNK = b"\x12"  # field 2 of a SampleEntry, by which a chunk goes out
_CHUNK_BYTES = 400  # what the objects that belong to a chunk take beside its data, roughly


class Chunk:
    """Some steps of an episode.

    Attributes:
        key: random, unsigned 64 bits.
        episode_id: episodes of a table are counted by it.
        num_tensors: which tensor an item means must be below.
        encoded: its ChunkData as a field of a SampleEntry.
        num_references: how many items and streams need it.
        row_bytes: of each tensor the bytes of a row, or of each row; None until `item_size` needs them.
    """

    __slots__ = ("encoded", "episode_id", "key", "num_references", "num_tensors", "row_bytes")

    def __init__(self, key: int, episode_id: int, num_tensors: int, data: bytes) -> None:
        """Take a ChunkData; nothing refers to it yet."""
        self.key, self.episode_id, self.num_tensors = key, episode_id, num_tensors
        self.encoded = b"".join((_SAMPLED_CHUNK, varint(len(data)), data))
        self.num_references = 0
        self.row_bytes: list[int | list[int]] | None = None

    @property
    def data(self) -> bytes:
        """The ChunkData alone."""
        at = 1
        while self.encoded[at] & 0x80:
            at += 1
        return self.encoded[at + 1 :]


class ChunkStore:
    """All chunks of a server, and the memory that they and the items take.

    Attributes:
        max_bytes: bound on the memory.
        num_bytes: memory taken.
    """

    def __init__(self, max_bytes: int) -> None:
        """Begin empty."""
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._chunks: dict[int, Chunk] = {}

    def __len__(self) -> int:
        """Return how many chunks there are."""
        return len(self._chunks)

    def add(self, chunk: Chunk) -> Chunk:
        """Return the chunk of that key: this one, unless there is one already. A new reference is counted.

        Raises:
            Refusal: there is no room for it.
        """
        known = self._chunks.get(chunk.key)
        if known is None:
            self.take(len(chunk.encoded) + _CHUNK_BYTES)
            known = self._chunks[chunk.key] = chunk
        known.num_references += 1
        return known

    def acquire(self, chunks: Iterable[Chunk]) -> None:
        """Count a new reference to each."""
        for chunk in chunks:
            chunk.num_references += 1

    def release(self, chunks: Iterable[Chunk]) -> None:
        """Count one reference less to each; forget those that have none left."""
        for chunk in chunks:
            chunk.num_references -= 1
            if not chunk.num_references:
                del self._chunks[chunk.key]
                self.num_bytes -= len(chunk.encoded) + _CHUNK_BYTES

    def take(self, num_bytes: int) -> None:
        """Count memory that something takes.

        Raises:
            Refusal: there is not so much left.
        """
        if self.num_bytes + num_bytes > self.max_bytes:
            raise Refusal(
                Status.RESOURCE_EXHAUSTED,
                f"the local server holds {self.num_bytes} of `max_bytes` {self.max_bytes} bytes, and {num_bytes} more "
                "came. Raise `max_bytes`, lower the `max_size` of its tables, or start reverb-writer-server.",
            )
        self.num_bytes += num_bytes

    def give_back(self, num_bytes: int) -> None:
        """Count memory that is free again."""
        self.num_bytes -= num_bytes
