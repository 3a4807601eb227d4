"""Views of large messages have what protobuf reads from the same bytes, or leave the message to protobuf."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import sampled
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from reverb_writer.protocol import messages, views


@st.composite
def chunks_of_one_size(draw: st.DrawFn) -> list[bytes]:
    """Return encoded chunks, which have a short name in reports."""
    rng = np.random.default_rng(draw(st.integers(0, 100)))
    return [
        sampled.chunk(
            int(rng.integers(0, 2**64, dtype=np.uint64)),
            [rng.integers(0, 256, (3, 30_000), np.uint8) for _ in range(draw(st.integers(1, 3)))],
            delta_encoded=draw(st.booleans()),
        )
        for _ in range(draw(st.integers(1, 3)))
    ]


ITEM = sampled.together(2**64 - 1, [3], [(0, 3)], 2)


def of_entry(entry: Any) -> Any:
    return entry.info.SerializeToString(), [*map(bytes, entry.data)], entry.end_of_sequence


def of_chunk(chunk: Any) -> Any:
    tensors = [(one.dtype, one.tensor_shape, one.tensor_content, [*one.string_val]) for one in chunk.data.tensors]
    return chunk.chunk_key, chunk.sequence_range.SerializeToString(), chunk.delta_encoded, tensors


def of_request(request: Any) -> Any:
    return [*map(bytes, request.chunks)], [*request.items], [*request.keep_chunk_keys]


@settings(max_examples=30)
@given(chunks_of_one_size(), st.booleans())
def test_large_messages_are_read_as_protobuf_reads_them(chunks: list[Any], is_in_parts: bool) -> None:
    message = sampled.response(*[(ITEM, [chunk]) for chunk in chunks])
    if is_in_parts:
        made = messages.SampleStreamResponse.FromString(message)
        first = made.entries[0]
        part = made.entries.add(data=first.data)
        assert not part.end_of_sequence
        message = made.SerializeToString()
    entries = views.entries_of(message)
    assert entries is not None
    expected = messages.SampledResponse.FromString(message).entries
    assert [*map(of_entry, entries)] == [*map(of_entry, expected)]
    for entry in entries:
        for encoded in entry.data:
            chunk = views.chunk_of(encoded)
            assert chunk is not None
            assert of_chunk(chunk) == of_chunk(messages.SampledChunk.FromString(bytes(encoded)))


@settings(max_examples=30)
@given(chunks_of_one_size(), st.lists(st.integers(0, 2**64 - 1), max_size=3))
def test_large_requests_are_read_as_protobuf_reads_them(chunks: list[Any], keys: list[int]) -> None:
    message = messages.InsertStreamRequest(chunks=chunks, items=[ITEM] * 2, keep_chunk_keys=keys).SerializeToString()
    request = views.request_of(message)
    assert request is not None
    assert of_request(request) == of_request(messages.StoredRequest.FromString(message))


def test_an_info_in_two_parts_is_merged() -> None:
    large = sampled.chunk(1, [np.random.default_rng(0).integers(0, 256, 70_000, np.uint8)]).SerializeToString()
    entry = messages.SampledResponse().entries.add(data=[large], end_of_sequence=True)
    entry.info.item.key = 5
    info = messages.SampledInfo(probability=0.5).SerializeToString()
    fields = entry.SerializeToString() + b"\x0a" + bytes([len(info)]) + info
    message = b"\x0a" + varint(len(fields)) + fields
    (found,) = views.entries_of(message) or []
    assert (found.info.item.key, found.info.probability) == (5, 0.5)
    assert of_entry(found) == of_entry(messages.SampledResponse.FromString(message).entries[0])


def varint(number: int) -> bytes:
    """Return a number of three bytes."""
    return bytes([number & 0x7F | 0x80, number >> 7 & 0x7F | 0x80, number >> 14])


LARGE_CHUNK = sampled.chunk(7, [np.arange(40_000, dtype="u2"), np.zeros(40_000)]).SerializeToString()


@pytest.mark.parametrize(
    "more",
    [
        b"\x08\x05",  # the key again
        b"\x0a\x01\x00",  # field 1, as bytes
        b"\x4d\x00\x00\x00\x00",  # an unknown field of four bytes
        b"\xfa\x01\x00",  # an unknown field with a high number
        b"\x2a\x00",  # the data again
        b"\x2a\x7f\x00",  # bytes that are missing
        b"\x30\xff",  # half a varint
        b"\x30" + b"\xff" * 12,  # a varint without an end
    ],
)
def test_unusual_forms_are_left_to_protobuf(more: bytes) -> None:
    assert views.chunk_of(LARGE_CHUNK) is not None
    assert views.chunk_of(LARGE_CHUNK + more) is None


def test_many_tiny_fields_are_left_to_protobuf_before_they_take_memory() -> None:
    message = b"\x0a\x00" * 200_000
    tracemalloc.start()
    try:
        assert views.entries_of(message) is None
        assert views.request_of(message) is None
        assert views.chunk_of(message) is None
        assert tracemalloc.get_traced_memory()[1] < 4_000_000
    finally:
        tracemalloc.stop()


READERS: list[tuple[Any, Any, Callable[[Any], Any]]] = [
    (views.entries_of, messages.SampledResponse, lambda found: [*map(of_entry, getattr(found, "entries", found))]),
    (views.request_of, messages.StoredRequest, of_request),
    (views.chunk_of, messages.SampledChunk, of_chunk),
]


def test_mutated_messages_are_read_as_protobuf_reads_them_or_left_to_it() -> None:
    rng = random.Random(0)  # noqa: S311  # to be repeated, not secret
    message = sampled.response((ITEM, [messages.ChunkData.FromString(LARGE_CHUNK)]))
    insert = messages.InsertStreamRequest(items=[ITEM], keep_chunk_keys=[1, 2])
    insert.chunks.add().ParseFromString(LARGE_CHUNK)
    request = insert.SerializeToString()
    num_viewed = 0
    for _ in range(5000):
        mutated = bytearray(rng.choice((message, request, LARGE_CHUNK)))
        # Mostly among the tags and lengths at the beginning and the end of the message.
        at = rng.choice((rng.randrange(120), len(mutated) - 1 - rng.randrange(40), rng.randrange(len(mutated))))
        mutated[at] = rng.randrange(256)
        encoded = bytes(mutated)
        for view, read, content in READERS:
            found = view(encoded)
            if found is None:
                continue
            num_viewed += 1
            try:
                expected = read.FromString(encoded)
            except DecodeError:
                pytest.fail(f"protobuf refuses a message of which byte {at} is {mutated[at]}, and a view reads it")
            assert content(found) == content(expected)
    assert num_viewed > 500
