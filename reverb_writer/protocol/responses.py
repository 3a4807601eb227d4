"""Responses of a server, and whole samples with their encoded chunks.

A server may split a sample over several entries and several messages. Only the first entry has the info, and only the
last one has `end_of_sequence`. Pure: no I/O.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from reverb_writer.errors import FormatError
from reverb_writer.protocol import messages
from reverb_writer.protocol.views import EntryView, entries_of

_IS_END, _INFO = operator.attrgetter("end_of_sequence"), operator.attrgetter("info")
_PROBABILITY, _TABLE_SIZE = operator.attrgetter("probability"), operator.attrgetter("table_size")
_ITEM, _KEY, _PRIORITY, _TIMES_SAMPLED = map(operator.attrgetter, ("item", "key", "priority", "times_sampled"))
_MAX_SPLIT_BYTES = 1 << 31
_MAX_SPLIT_PARTS = 1 << 20  # chunks and entries; even an empty one takes memory


def parse(name: str, message_class: Any, reply: bytes) -> Any:
    """Return a server's message; raise FormatError with its `name` if the bytes cannot be parsed."""
    try:
        return message_class.FromString(reply)
    except DecodeError as error:
        raise FormatError(f"{len(reply)} bytes that are not a {name} ({error}).") from None


class Samples:
    """Whole samples in the server's order: arrays [n] of numbers, as in `BatchInfo`, and `entries`.

    Entries are from a `messages.SampledResponse`; in large responses they are views, and from a server of this process
    items, with equal attributes.
    """

    __slots__ = ("entries", "keys", "priorities", "probabilities", "table_sizes", "times_sampled")

    def __init__(
        self,
        entries: npt.NDArray[np.object_],
        keys: npt.ArrayLike,
        priorities: npt.ArrayLike,
        probabilities: npt.ArrayLike,
        table_sizes: npt.ArrayLike,
        times_sampled: npt.ArrayLike,
    ) -> None:
        """Take arrays of one length."""
        self.entries = entries
        self.keys = np.asarray(keys, np.uint64)
        self.priorities, self.probabilities = np.asarray(priorities, float), np.asarray(probabilities, float)
        self.table_sizes, self.times_sampled = np.asarray(table_sizes, np.int64), np.asarray(times_sampled, np.int32)

    @classmethod
    def of(cls, entries: Sequence[Any]) -> Samples:
        """Return the samples of these entries."""
        # Each access to a message within another one makes an object. Loops in C take a quarter less time.
        infos = list(map(_INFO, entries))
        items = list(map(_ITEM, infos))
        num = len(items)
        return cls(
            np.fromiter(entries, object, num),  # an assignment would ask each entry whether it is an array
            np.fromiter(map(_KEY, items), np.uint64, num),
            np.fromiter(map(_PRIORITY, items), float, num),
            np.fromiter(map(_PROBABILITY, infos), float, num),
            np.fromiter(map(_TABLE_SIZE, infos), np.int64, num),
            np.fromiter(map(_TIMES_SAMPLED, items), np.int32, num),
        )

    @classmethod
    def joined(cls, parts: Sequence[Samples]) -> Samples:
        """Return several samples as one."""
        filled = [part for part in parts if len(part)] or [NO_SAMPLES]
        if len(filled) == 1:
            return filled[0]
        return cls(*[np.concatenate([getattr(part, name) for part in filled]) for name in cls.__slots__])

    @property
    def numbers(self) -> Sequence[npt.NDArray[Any]]:
        """The numbers of all samples, in the order of the first fields of `BatchInfo`."""
        return self.keys, self.priorities, self.probabilities, self.table_sizes, self.times_sampled

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[Any]:
        """Return the entries."""
        return iter(self.entries)

    def __getitem__(self, index: slice | Sequence[int] | npt.NDArray[np.int64]) -> Samples:
        """Return the selected samples."""
        entries = self.entries[index].copy()  # a view would keep all entries, and each keeps its whole response
        return Samples(entries, *[numbers[index] for numbers in self.numbers])


NO_SAMPLES = Samples.of(())
"""No samples; never changed, so it may be shared."""


class UnencodedSamples:
    """Samples of a server of this process, instead of the bytes of a response; `len` is the number of these bytes."""

    def __init__(self, samples: Samples, num_bytes: int, has_waited: bool) -> None:
        """Take the samples, their number of bytes, and whether they have waited for the rate limiter."""
        self.samples, self.has_waited, self._num_bytes = samples, has_waited, num_bytes

    def __len__(self) -> int:
        """Return the number of bytes that a response would have."""
        return self._num_bytes


class SampleReassembler:
    """Reassembles samples that the server has split over several entries. Not thread-safe."""

    def __init__(self) -> None:
        """Start between two samples."""
        self._incomplete: EntryView | None = None  # the first entry of a sample, with the chunks of all entries so far
        self._num_bytes = self._num_parts = 0

    def feed(self, message: bytes | UnencodedSamples) -> Samples:
        """Return the samples that a SampleStreamResponse completes, in the server's order; maybe none."""
        if isinstance(message, UnencodedSamples):
            return message.samples
        entries: list[Any] | None = entries_of(message)
        if entries is None:
            entries = list(parse("SampleStreamResponse", messages.SampledResponse, message).entries)
        if self._incomplete is None and all(map(_IS_END, entries)):
            return Samples.of(entries)
        samples = [sample for entry in entries if (sample := self._join(entry))]
        if self._incomplete is not None:
            self._num_bytes += len(message)  # a view of one byte keeps the whole message
            if self._num_bytes > _MAX_SPLIT_BYTES or self._num_parts > _MAX_SPLIT_PARTS:
                raise FormatError(
                    f"a sample that has no end: {self._num_bytes} bytes in {self._num_parts} parts so far, expected "
                    f"at most {_MAX_SPLIT_BYTES} in {_MAX_SPLIT_PARTS}."
                )
        return Samples.of(samples)

    def _join(self, entry: Any) -> Any:
        """Return the sample that `entry` completes, or None."""
        if self._incomplete is None and entry.end_of_sequence:
            return entry
        self._num_parts += len(entry.data) + 1
        if self._incomplete is None:
            self._incomplete = EntryView(entry.info, [*entry.data], end_of_sequence=True)
        else:
            self._incomplete.data.extend(entry.data)
        if not entry.end_of_sequence:
            return None
        sample, self._incomplete = self._incomplete, None
        self._num_bytes = self._num_parts = 0
        return sample
