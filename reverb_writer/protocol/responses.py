"""What comes over streams: the keys of acknowledged items; samples, each with the bytes of its chunks.

A sample may be split over several entries, and entries over several messages, until `end_of_sequence`; only the first
entry has the info. Pure: no I/O.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from google.protobuf.message import DecodeError

from reverb_writer.errors import FormatError
from reverb_writer.protocol import messages

__all__ = ["Splicer", "acknowledged_keys"]

_MAX_SPLIT_BYTES = 1 << 31
_MAX_SPLIT_PARTS = 1 << 20  # chunks and entries; each takes memory here, however little it brings


def acknowledged_keys(reply: bytes) -> Sequence[int]:
    """Return the keys of an InsertStreamResponse.

    Raises:
        FormatError: the bytes are none.
    """
    try:
        keys: Sequence[int] = messages.InsertStreamResponse.FromString(reply).keys
    except DecodeError as error:
        raise FormatError(f"{len(reply)} bytes that are no InsertStreamResponse ({error}).") from None
    return keys


class Splicer:
    """Puts samples together that were split. Not thread-safe."""

    def __init__(self) -> None:
        """Begin between two samples."""
        self._start: Any = None  # a sample that is not complete, as far as it has come
        self._num_bytes = self._num_parts = 0

    def feed(self, message: bytes) -> list[Any]:
        """Return the samples that a message completes, in order; maybe none.

        Returns:
            Messages of `reverb_writer.sampled.Entry`, each a whole sample.

        Raises:
            FormatError: the bytes are no SampleStreamResponse, or a sample has no end.
        """
        try:
            entries = messages.SampledResponse.FromString(message).entries
        except DecodeError as error:
            raise FormatError(f"{len(message)} bytes that are no SampleStreamResponse ({error}).") from None
        if self._start is None and all(entry.end_of_sequence for entry in entries):
            return list(entries)
        return [sample for entry in entries if (sample := self._join(entry))]

    def _join(self, entry: Any) -> Any:
        """Return the sample that an entry completes, or None."""
        if self._start is None and entry.end_of_sequence:
            return entry
        self._num_bytes += sum(map(len, entry.data))
        self._num_parts += len(entry.data) + 1
        if self._num_bytes > _MAX_SPLIT_BYTES or self._num_parts > _MAX_SPLIT_PARTS:
            raise FormatError(
                f"a sample that has no end: {self._num_bytes} bytes in {self._num_parts} parts so far, expected "
                f"{_MAX_SPLIT_BYTES} in {_MAX_SPLIT_PARTS} at most."
            )
        if self._start is None:
            self._start = entry
        else:
            self._start.data.extend(entry.data)
        if not entry.end_of_sequence:
            return None
        sample, self._start = self._start, None
        self._num_bytes = self._num_parts = 0
        return sample
