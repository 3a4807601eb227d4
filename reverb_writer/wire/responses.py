"""SampleStreamResponses -> samples, each with the bytes of its chunks.

A sample may be split over several entries, and entries over several messages, until `end_of_sequence`; only the first
entry has the info. Pure: no I/O.
"""

from __future__ import annotations

from typing import Any

from google.protobuf.message import DecodeError

from reverb_writer.errors import FormatError
from reverb_writer.wire import messages

__all__ = ["Splicer"]

_MAX_SPLIT_BYTES = 1 << 31


class Splicer:
    """Puts samples together that were split. Not thread-safe."""

    def __init__(self) -> None:
        """Begin between two samples."""
        self._start: Any = None  # a sample that is not complete, as far as it has come
        self._num_bytes = 0

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
        if self._start is not None:
            self._num_bytes += sum(map(len, entry.data))
            if self._num_bytes > _MAX_SPLIT_BYTES:
                raise FormatError(f"a sample of more than {_MAX_SPLIT_BYTES} bytes that has no end.")
            self._start.data.extend(entry.data)
        sample = self._start or entry
        self._start = None if entry.end_of_sequence else sample
        if entry.end_of_sequence:
            self._num_bytes = 0
            return sample
        return None
