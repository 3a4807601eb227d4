"""Samples that a server has split over entries and messages are reassembled."""

from __future__ import annotations

import weakref

import numpy as np
import pytest

from reverb_writer.errors import FormatError
from reverb_writer.protocol import messages, responses
from reverb_writer.protocol.responses import SampleReassembler, Samples


def response(*entries: tuple[int | None, list[bytes], bool]) -> bytes:
    """Encode entries, each with the key of its item, its chunks and whether it is the last of its sample."""
    made = messages.SampledResponse()
    for key, chunks, is_last in entries:
        entry = made.entries.add(data=chunks, end_of_sequence=is_last)
        if key is not None:
            entry.info.item.key = key
    encoded: bytes = made.SerializeToString()
    return encoded


def keys_and_chunks(samples: Samples) -> list[tuple[int, list[bytes]]]:
    return [(sample.info.item.key, list(sample.data)) for sample in samples]


def test_whole_samples_keep_their_order() -> None:
    message = response((1, [b"a"], True), (2, [b"b", b"c"], True))
    assert keys_and_chunks(SampleReassembler().feed(message)) == [(1, [b"a"]), (2, [b"b", b"c"])]


def test_sample_split_over_entries_and_messages_is_reassembled() -> None:
    reassembler = SampleReassembler()
    first = response((1, [b"a"], True), (2, [b"b"], False), (None, [b"c"], False))
    assert keys_and_chunks(reassembler.feed(first)) == [(1, [b"a"])]
    assert not reassembler.feed(response((None, [b"d"], False)))
    last = response((None, [b"e"], True), (3, [b"f"], True))
    assert keys_and_chunks(reassembler.feed(last)) == [(2, [b"b", b"c", b"d", b"e"]), (3, [b"f"])]


def test_part_of_the_samples_keeps_no_others() -> None:
    class Entry:
        """As a message, it is freed when nobody has it any more."""

    entries = np.fromiter([Entry(), Entry(), Entry()], object)
    samples = Samples(entries, *([1, 2, 3] for _ in range(5)))
    freed = weakref.ref(entries[0])
    del entries
    samples = samples[1:]
    assert (samples.keys.tolist(), freed()) == ([2, 3], None)


def test_sample_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses, "_MAX_SPLIT_BYTES", 10)
    reassembler = SampleReassembler()
    for _ in range(2):
        assert not reassembler.feed(response((None, [b"12345"], False)))
    with pytest.raises(FormatError, match="no end: 11 bytes in 6 parts so far, expected 10 in"):
        reassembler.feed(response((None, [b"1"], False)))


def test_bytes_that_are_not_a_response_are_refused() -> None:
    with pytest.raises(FormatError, match="3 bytes that are not a SampleStreamResponse"):
        SampleReassembler().feed(b"\xff\xff\xff")
