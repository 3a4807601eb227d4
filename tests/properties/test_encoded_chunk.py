"""A chunk whose contents are found without protobuf has the contents that protobuf finds, however it is damaged."""

from __future__ import annotations

import contextlib
import math
import tracemalloc

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given
from hypothesis import strategies as st
from sampled import chunk

from reverb_writer.decoding.chunk_schema import ChunkSchema
from reverb_writer.decoding.encoded_chunk import ChunkLayoutCache, EncodedChunk, EncodedChunks
from reverb_writer.errors import FormatError, UnsafeDataError
from reverb_writer.protocol import messages
from reverb_writer.protocol.chunk_layout import ExpectedTensor, find_contents, find_tensors_field
from reverb_writer.protocol.tensors import varint

KEY_BYTES = 2  # tag and a key below 128
COLUMNS = [np.arange(5), np.arange(5 * 640, dtype=np.uint8).reshape(5, 640), np.ones(5, bool)]
SENT = chunk(7, COLUMNS).SerializeToString()
SCHEMA = ChunkSchema([(t.dtype, t.tensor_shape) for t in messages.SampledChunk.FromString(SENT).data.tensors])
EXPECTED = SCHEMA.expected_tensors()

edits = st.lists(
    st.tuples(st.integers(0, len(SENT)), st.integers(0, 4), st.binary(max_size=6)), min_size=1, max_size=3
)  # where, how many bytes go, which come


def test_contents_of_a_chunk_like_the_one_before_are_found() -> None:
    at, stop, trailer = find_tensors_field(SENT, KEY_BYTES) or (0, 0, b"")
    contents = find_contents(SENT, at, stop, EXPECTED) or []
    assert [SENT[start:end] for start, end in contents] == [
        t.tensor_content for t in messages.SampledChunk.FromString(SENT).data.tensors
    ]
    assert trailer == b"\x30\x03"  # data_tensors_len, 3


@given(edits)
@example([(len(SENT), 0, b"\x20\x01")])  # delta-encoded, said at the end
@example([(len(SENT), 0, b"\x2a\x02\x0a\x00")])  # one more tensor
def test_contents_that_are_found_are_those_that_protobuf_finds(changes: list[tuple[int, int, bytes]]) -> None:
    sent = SENT
    for edited, num_gone, come in changes:
        where = max(edited, KEY_BYTES)  # the key was read before
        sent = sent[:where] + come + sent[where + num_gone :]
    field = find_tensors_field(sent, KEY_BYTES)
    if field is None or field[2] != b"\x30\x03":
        return  # no schema is cached for this trailer
    contents = find_contents(sent, field[0], field[1], EXPECTED)
    if contents is not None:
        try:
            found = messages.SampledChunk.FromString(sent)
        except DecodeError:  # the sequence range is damaged, which is not read
            return
        assert [sent[start:stop] for start, stop in contents] == [t.tensor_content for t in found.data.tensors]
        assert [(t.dtype, t.tensor_shape) for t in found.data.tensors] == [
            (t.dtype, t.tensor_shape) for t in messages.SampledChunk.FromString(SENT).data.tensors
        ]
        assert not found.delta_encoded


def test_cached_layouts_change_no_result() -> None:
    """Neither schemas, which chunks of other keys share, nor the layouts of chunks that are sent again do."""
    cache = ChunkLayoutCache()
    contents = [[np.roll(column, n) for column in COLUMNS] for n in (0, 1, 2)]
    chunks = [chunk(key, columns) for key, columns in zip((7, 8, 1 << 40), contents, strict=True)]
    same_size = chunk(7, [np.arange(5), np.ones((5, 640), np.int8), np.ones(5, np.uint8)])
    delta_encoded = chunk(9, COLUMNS, delta_encoded=True)
    for made in (same_size, *chunks, delta_encoded, *chunks):
        sent = made.SerializeToString()
        for indices in ((0, 1, 2), (0, 2, 1), (1,), (0, 1, 2)):
            found = EncodedChunks([sent], 1 << 20, cache).get(made.chunk_key, indices)
            alone = EncodedChunks([sent], 1 << 20).get(made.chunk_key, indices)
            assert found.schema is alone.schema
            assert found.is_raw == alone.is_raw
            assert found.length == alone.length == 5
            assert _decoded(found) == _decoded(alone)


def test_chunks_like_earlier_ones_and_chunks_that_are_sent_again_are_not_parsed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = ChunkLayoutCache()
    EncodedChunks([SENT], 1 << 20, cache).get(7, (0, 1, 2))
    other = chunk(8, COLUMNS).SerializeToString()
    monkeypatch.setattr(EncodedChunks, "_parse", None)
    for key, sent in ((8, other), (7, SENT), (8, other)):
        assert _decoded(EncodedChunks([sent], 1 << 20, cache).get(key, (0, 2))) == _decoded_columns((0, 2))


@given(edits, st.sampled_from([(0, 1, 2), (1,), (2, 0)]))
def test_chunk_that_is_sent_again_damaged_is_refused_or_decoded_within_its_rows(
    changes: list[tuple[int, int, bytes]], indices: tuple[int, ...]
) -> None:
    cache = ChunkLayoutCache()
    for _ in range(2):
        EncodedChunks([SENT], 1 << 20, cache).get(7, indices)
    damaged = SENT
    for where, num_gone, come in changes:
        damaged = damaged[:where] + come + damaged[where + num_gone :]
    for sent in (damaged, (damaged + bytes(len(SENT)))[: len(SENT)]):  # as long as before, too
        with contextlib.suppress(FormatError, UnsafeDataError):
            _decoded(EncodedChunks([sent], 1 << 20, cache).get(7, indices))
        assert _decoded(EncodedChunks([SENT], 1 << 20, cache).get(7, indices)) == _decoded_columns(indices)


def test_block_that_became_shorter_is_refused() -> None:
    made = chunk(7, [np.arange(24, dtype=np.uint8)])
    cache = ChunkLayoutCache()
    for _ in range(2):
        EncodedChunks([made.SerializeToString()], 1 << 20, cache).get(7, (0,))
    assert cache.layout((7, (0,)))
    block = made.data.tensors[0].tensor_content
    shorter = b"\x14" + 5 * (b"\x0c" + bytes(4))  # announces 20 bytes, and has five pieces of four
    assert len(shorter) == len(block)
    with pytest.raises(FormatError, match="20 bytes, expected 24"):
        EncodedChunks([made.SerializeToString().replace(block, shorter)], 1 << 20, cache).get(7, (0,))


def test_damaged_block_of_a_cached_schema_is_refused() -> None:
    cache = ChunkLayoutCache()
    for key in (6, 7):
        EncodedChunks([chunk(key, COLUMNS).SerializeToString()], 1 << 20, cache).get(key, (0, 1, 2))
    at = SENT.index(messages.SampledChunk.FromString(SENT).data.tensors[1].tensor_content)
    for damage in (b"\xff" * 8, b"\x00" * 8):
        damaged = SENT[: at + 2] + damage + SENT[at + 10 :]
        for key, encoded in ((7, damaged), (9, b"\x08\x09" + damaged[KEY_BYTES:])):
            with pytest.raises(FormatError):
                _decoded(EncodedChunks([encoded], 1 << 20, cache).get(key, (0, 1, 2)))


@pytest.mark.parametrize("num_indices", [1, 200])
def test_layouts_have_a_memory_limit(num_indices: int) -> None:
    cache = ChunkLayoutCache(1_000_000)
    tracemalloc.start()
    try:
        for key in range(2000):
            sent = chunk(key, [[1, 2]]).SerializeToString()
            indices = tuple([0] * num_indices)
            EncodedChunks([sent], 1 << 20, cache).get(key, indices)
        assert 100_000 < tracemalloc.get_traced_memory()[0] < 1_500_000
        assert cache.layout((1999, indices))
        assert cache.layout((1, indices)) is None
    finally:
        tracemalloc.stop()


def test_number_of_schemas_is_limited() -> None:
    cache = ChunkLayoutCache()
    chunks = [chunk(1, [np.zeros((1, width), bool)]) for width in range(1, 100)]
    for number, one in enumerate(chunks):
        one.data_tensors_len = number
        EncodedChunks([one.SerializeToString()], 1 << 20, cache).get(1, (0,))
    known = [number for number in range(1, 100) if cache.schema(b"\x30" + bytes([number]))]
    assert 1 <= len(known) <= 16
    assert known[-1] == 98
    for one in chunks:
        (sent,) = messages.SampledChunk.FromString(one.SerializeToString()).data.tensors
        cache.expected_tensors(ChunkSchema([(sent.dtype, sent.tensor_shape)]))
        assert len(cache._expected) <= 16


def test_prefixes_have_a_memory_limit_and_are_right_when_computed_again() -> None:
    expected = ExpectedTensor(3, b"", b"\x01", 1, max_bytes=10_000)
    for size in 2 * list(range(10, 400)):
        prefix = expected.prefixes.get(size) or expected.add_size(size)
        if size == 5 + 129:  # a varint of 127 takes one byte, of 128 two bytes
            assert prefix is None
            continue
        assert prefix
        length = prefix.stop - prefix.content_start
        assert prefix.prefix == b"\x0a" + varint(size) + b"\x08\x03\x12\x00\x22" + varint(length) + b"\x01"
        assert prefix.stop == 1 + len(varint(size)) + size
        assert len(expected.prefixes) <= 40


def _decoded(found: EncodedChunk) -> list[bytes]:
    columns = [np.zeros((found.length, *shape), dtype) for dtype, shape in found.schema.dtypes_and_shapes]
    stored = [column.reshape(found.length, math.prod(column.shape[1:])).view(np.uint8) for column in columns]
    found.decode_into(columns, stored, 0)
    return [column.tobytes() for column in columns]


def _decoded_columns(indices: tuple[int, ...]) -> list[bytes]:
    return [COLUMNS[index].tobytes() for index in indices]
