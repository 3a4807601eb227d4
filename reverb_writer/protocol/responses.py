"""Responses of a server, and whole samples with the encoded chunks that they need.

A server may split a sample over several entries and over several messages. Only the first entry has the info, and only
the last one has `end_of_sequence`. Pure: no I/O.
"""

from __future__ import annotations

import operator
from typing import Any

from google.protobuf.message import DecodeError

from reverb_writer.errors import FormatError
from reverb_writer.protocol import messages

_IS_END = operator.attrgetter("end_of_sequence")
_MAX_SPLIT_BYTES = 1 << 31
_MAX_SPLIT_PARTS = 1 << 20  # chunks and entries; each takes memory here, even an empty one


def parse(name: str, message_class: Any, reply: bytes) -> Any:
    """Return a message of a server; the name is for the error.

    Raises:
        FormatError: the bytes are not such a message.
    """
    try:
        return message_class.FromString(reply)
    except DecodeError as error:
        raise FormatError(f"{len(reply)} bytes that are not a {name} ({error}).") from None


class UnencodedSamples:
    """Samples of a server of this process, in place of the bytes of a response; `len` is how many those would be.

    Attributes:
        samples: with the attributes of `reverb_writer.sampled.Entry`.
    """

    def __init__(self, samples: list[Any], num_bytes: int) -> None:
        """Take both."""
        self.samples, self._num_bytes = samples, num_bytes

    def __len__(self) -> int:
        """Return how many bytes a response would have."""
        return self._num_bytes


class SampleReassembler:
    """Reassembles samples that the server has split over several entries. Not thread-safe."""

    def __init__(self) -> None:
        """Start between two samples."""
        self._incomplete: Any = None  # the first entry of a sample, with the chunks of all its entries so far
        self._num_bytes = self._num_parts = 0

    def feed(self, message: bytes | UnencodedSamples) -> list[Any]:
        """Return the samples that a SampleStreamResponse completes, in the server's order; the list may be empty.

        Returns:
            Messages of `reverb_writer.sampled.Entry`, each a whole sample.
        """
        if isinstance(message, UnencodedSamples):
            return message.samples
        entries = parse("SampleStreamResponse", messages.SampledResponse, message).entries
        if self._incomplete is None and all(map(_IS_END, entries)):
            return list(entries)
        return [sample for entry in entries if (sample := self._join(entry))]

    def _join(self, entry: Any) -> Any:
        """Return the sample that `entry` completes, or None."""
        if self._incomplete is None and entry.end_of_sequence:
            return entry
        self._num_bytes += sum(map(len, entry.data))
        self._num_parts += len(entry.data) + 1
        if self._num_bytes > _MAX_SPLIT_BYTES or self._num_parts > _MAX_SPLIT_PARTS:
            raise FormatError(
                f"a sample that has no end: {self._num_bytes} bytes in {self._num_parts} parts so far, expected "
                f"{_MAX_SPLIT_BYTES} in {_MAX_SPLIT_PARTS} at most."
            )
        if self._incomplete is None:
            self._incomplete = entry
        else:
            self._incomplete.data.extend(entry.data)
        if not entry.end_of_sequence:
            return None
        sample, self._incomplete = self._incomplete, None
        self._num_bytes = self._num_parts = 0
        return sample
