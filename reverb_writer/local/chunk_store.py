"""The chunks of a server, as the bytes that arrived; a chunk is kept as long as it has references.

    insert stream --keeps--+
                           +--> chunk: its bytes, and the number of references; without references it is removed
    item, stored or waiting+

Not thread-safe: `Store` has the lock.
"""

from __future__ import annotations

from collections.abc import Iterable

from reverb_writer.local.refusals import Refusal, Status
from reverb_writer.protocol.tensors import varint

_SAMPLED_CHUNK = b"\x12"  # field 2 of a SampleEntry, which sends a chunk
_CHUNK_BYTES = 400  # approximate memory of a chunk's objects, without its data


class Chunk:
    """Some steps of an episode.

    Attributes:
        key: random, unsigned 64 bits.
        episode_id: number by which a table counts episodes.
        num_tensors: number of tensors, to which items refer by index.
        encoded: its ChunkData as a field of a SampleEntry.
        num_references: number of items and streams that refer to it.
        row_bytes: per tensor, the size of a row or of each row; None until `item_size` needs it.
    """

    __slots__ = ("encoded", "episode_id", "key", "num_references", "num_tensors", "row_bytes")

    def __init__(self, key: int, episode_id: int, num_tensors: int, data: bytes | memoryview) -> None:
        """Take a copy of a ChunkData, without references."""
        self.key, self.episode_id, self.num_tensors = key, episode_id, num_tensors
        self.encoded = b"".join((_SAMPLED_CHUNK, varint(len(data)), data))
        self.num_references = 0
        self.row_bytes: list[int | list[int]] | None = None

    @property
    def data(self) -> bytes:
        """The ChunkData, without the tag of its field."""
        at = 1
        while self.encoded[at] & 0x80:
            at += 1
        return self.encoded[at + 1 :]


class ChunkStore:
    """All chunks of a server, and the memory of chunks and items.

    Attributes:
        max_bytes: bound on the memory.
        num_bytes: memory in use.
    """

    def __init__(self, max_bytes: int) -> None:
        """Begin empty."""
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._chunks: dict[int, Chunk] = {}

    def __len__(self) -> int:
        """Return the number of chunks."""
        return len(self._chunks)

    def add(self, chunk: Chunk) -> Chunk:
        """Return the stored chunk with this key, or store this one; count a new reference to it.

        Raises:
            Refusal: the chunk has no room.
        """
        known = self._chunks.get(chunk.key)
        if known is None:
            self.take(len(chunk.encoded) + _CHUNK_BYTES)
            known = self._chunks[chunk.key] = chunk
        known.num_references += 1
        return known

    def release(self, chunks: Iterable[Chunk]) -> None:
        """Count one reference less to each of these chunks; forget chunks without references."""
        for chunk in chunks:
            chunk.num_references -= 1
            if not chunk.num_references:
                del self._chunks[chunk.key]
                self.num_bytes -= len(chunk.encoded) + _CHUNK_BYTES

    def take(self, num_bytes: int) -> None:
        """Count more memory in use.

        Raises:
            Refusal: the memory would exceed `max_bytes`.
        """
        if self.num_bytes + num_bytes > self.max_bytes:
            raise Refusal(
                Status.RESOURCE_EXHAUSTED,
                f"the local server holds {self.num_bytes} of `max_bytes` {self.max_bytes} bytes, and {num_bytes} more "
                "arrived. Raise `max_bytes`, lower the `max_size` of its tables, or start reverb-writer-server.",
            )
        self.num_bytes += num_bytes

    def give_back(self, num_bytes: int) -> None:
        """Count less memory in use."""
        self.num_bytes -= num_bytes
