"""SampleStreamResponses -> samples, each with the bytes of its chunks.

A sample may be split over several entries, and entries over several messages, until `end_of_sequence`; only the first
entry has the info. Pure: no I/O.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from google.protobuf.message import DecodeError

from reverb_writer.errors import FormatError
from reverb_writer.wire import messages

__all__ = ["RawSample", "Splicer"]

_MAX_SPLIT_BYTES = 1 << 31


class RawSample(NamedTuple):
    """A sample as it came.

    Attributes:
        info: a message of `reverb_writer.sampled.Info`.
        chunks: the chunks that it needs, each the bytes of a ChunkData.
    """

    info: Any
    chunks: Sequence[bytes]


class Splicer:
    """Puts samples together that were split. Not thread-safe."""

    def __init__(self) -> None:
        """Begin between two samples."""
        self._start: Any = None  # the first entry of a sample that is not complete
        self._chunks: list[bytes] = []
        self._num_bytes = 0

    def feed(self, message: bytes) -> list[RawSample]:
        """Return the samples that a message completes, in order; maybe none.

        Raises:
            FormatError: it is no SampleStreamResponse, or a sample has no end.
        """
        try:
            entries = messages.SampledResponse.FromString(message).entries
        except DecodeError as error:
            raise FormatError(
                f"a response of {len(message)} bytes that is no SampleStreamResponse ({error})."
            ) from None
        samples = []
        for entry in entries:
            if self._start is None and entry.end_of_sequence:
                samples.append(RawSample(entry.info, entry.data))
                continue
            self._start = self._start or entry
            self._chunks.extend(entry.data)
            self._num_bytes += sum(map(len, entry.data))
            if self._num_bytes > _MAX_SPLIT_BYTES:
                raise FormatError(f"a sample of more than {_MAX_SPLIT_BYTES} bytes that has no end.")
            if entry.end_of_sequence:
                samples.append(RawSample(self._start.info, self._chunks))
                self._start, self._chunks, self._num_bytes = None, [], 0
        return samples
