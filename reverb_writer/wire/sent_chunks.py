"""The chunks that came with a sample: parsed when they are asked for, decoded into the place where they will stay."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from reverb_writer.errors import FormatError, UnsafeDataError
from reverb_writer.wire import messages, tensors
from reverb_writer.wire.tensors import varint

__all__ = ["DtypesAndShapes", "SentChunk", "SentChunks"]

Array = npt.NDArray[Any]
DtypesAndShapes = Sequence[tuple[np.dtype[Any], tuple[int, ...]]]

_CHUNK_KEY = b"\x08"  # field 1, a varint
_MAX_SHARED_COLUMNS = 256


class Kind:
    """What chunks of one kind have in common. They share theirs: is it the same object, they are alike.

    Attributes:
        dtypes_and_shapes: of each column, without the time dimension.
        length: rows that all columns have. What only some have no good item names.
        num_bytes: what they occupy decoded, without the characters of strings.
        has_strings: whether there are strings.
        is_even: whether all columns have so many rows.
    """

    def __init__(self, heads: Sequence[tensors.Head]) -> None:
        """Compare the columns; a FormatError if one has no rows."""
        if not all(head.shape and head.shape[0] for head in heads):
            raise FormatError("a tensor of a chunk has no rows.")
        self.dtypes_and_shapes = [(head.dtype, head.shape[1:]) for head in heads]
        self.length = min([head.shape[0] for head in heads])
        self.is_even = all(head.shape[0] == self.length for head in heads)
        self.num_bytes = sum([head.num_bytes for head in heads])
        self.has_strings = any(head.dtype.kind == "O" for head in heads)


def _kind_of(heads: tuple[tensors.Head, ...]) -> Kind:
    return _shared_kind(heads) if len(heads) <= _MAX_SHARED_COLUMNS else Kind(heads)


_shared_kind = functools.lru_cache(maxsize=256)(Kind)


class SentChunk:
    """Some tensors of a chunk, of which all but the content is known.

    Attributes:
        kind: what chunks like this one have in common.
        length: rows.
        num_bytes: what it occupies decoded, the characters of strings included.
    """

    def __init__(self, chunk: Any, indices: Sequence[int], max_bytes: int) -> None:
        """Look at the tensors; see `SentChunks`."""
        self._delta_encoded = chunk.delta_encoded
        encoded = chunk.data.tensors
        if max(indices) >= len(encoded):
            raise FormatError(f"an item names tensor {max(indices)} of a chunk of {len(encoded)}.")
        self._tensors = [tensors.parse(encoded[index], max_bytes) for index in indices]
        self.kind = _kind_of(tuple([tensor.head for tensor in self._tensors]))
        self.length = self.kind.length
        self.num_bytes = self.kind.num_bytes
        if self.kind.has_strings:
            self.num_bytes += sum(
                len(tensor.content) + sum(map(len, tensor.strings))
                for tensor in self._tensors
                if tensor.head.dtype.kind == "O"
            )
        if self.num_bytes > max_bytes:
            raise UnsafeDataError(
                f"the chunks of a sample need {self.num_bytes} bytes, expected at most {max_bytes} more. Raise "
                "`max_sample_bytes` if you trust the writer."
            )

    def decode_into(self, columns: Sequence[Array]) -> None:
        """Decode into arrays [length, ...] of these dtypes and shapes, in C order.

        Raises:
            FormatError: a tensor is damaged.
        """
        for tensor, column in zip(self._tensors, columns, strict=True):
            if self.kind.is_even or tensor.head.shape[0] == self.length:
                tensor.decode_into(column, delta_encoded=self._delta_encoded)
            else:
                whole = np.empty(tensor.head.shape, tensor.head.dtype)
                tensor.decode_into(whole, delta_encoded=self._delta_encoded)
                column[...] = whole[: self.length]


class SentChunks:
    """The chunks of a sample, by key."""

    def __init__(self, sent: Sequence[bytes], max_bytes: int) -> None:
        """Parse nothing yet.

        Args:
            sent: the bytes of each ChunkData.
            max_bytes: bound on all tensors together that are asked for, decoded.
        """
        self._sent = list(sent)
        self._parsed: dict[int, Any] = {}
        self._chunks: dict[tuple[int, Sequence[int]], SentChunk] = {}
        self._max_bytes = max_bytes

    def get(self, key: int, indices: Sequence[int]) -> SentChunk:
        """Return a chunk, as far as the tensors `indices` are concerned.

        Raises:
            FormatError: it did not come, or is damaged.
            UnsafeDataError: one of its tensors must not be decoded, or the chunks are too large together.
        """
        found = self._chunks.get((key, indices))
        if found is None:
            if key not in self._parsed:
                self._parse(key)
            found = self._chunks[key, indices] = SentChunk(self._parsed[key], indices, self._max_bytes)
            self._max_bytes -= found.num_bytes
        return found

    def _parse(self, key: int) -> None:
        """Parse the chunk that begins with its key, as every server writes it; all of them if there is none."""
        start = _CHUNK_KEY + varint(key)
        likely = [sent for sent in self._sent if sent.startswith(start)]
        try:
            for sent in likely or self._sent:
                chunk = messages.ChunkData.FromString(sent)
                self._parsed[chunk.chunk_key] = chunk
        except DecodeError as error:
            raise FormatError(f"a chunk that cannot be read ({error}).") from None
        if key not in self._parsed:
            raise FormatError(f"an item names chunk {key}, which did not come with it.")
