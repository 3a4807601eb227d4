"""A ring is a dict of decoded chunks with a memory limit; an encoded chunk is decoded within its rows or refused."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from sampled import chunk

from reverb_writer.decoding.chunks import ChunkRing, EncodedChunk, EncodedChunks
from reverb_writer.errors import FormatError, UnsafeDataError
from reverb_writer.protocol import messages

MAX_BYTES = 40 * 24  # 40 rows of three floats


def encoded(key: int, column: Any) -> EncodedChunk:
    return EncodedChunks([chunk(key, [column]).SerializeToString()], 1 << 20).get(key, (0,))


def put(ring: ChunkRing, key: int, chunk: EncodedChunk) -> bool:
    """Put a chunk, and return whether others had to be evicted."""
    if ring.put(key, chunk):
        return False
    before = dict(ring.rows_of), ring.num_bytes
    assert not ring.put(key, chunk)
    assert (ring.rows_of, ring.num_bytes) == before  # a ring that is full does not change
    ring.evict_for(chunk)
    assert ring.put(key, chunk)
    return True


def check(ring: ChunkRing, model: dict[int, Any]) -> None:
    """Compare the ring with the model, from which the chunks that the ring has evicted are removed first."""
    assert ring.rows_of.keys() <= model.keys()
    for key in model.keys() - ring.rows_of.keys():
        del model[key]
    occupied = np.zeros(len(ring.columns[0]), int)
    for key, (start, stop) in ring.rows_of.items():
        np.testing.assert_array_equal(ring.columns[0][start:stop], model[key])
        occupied[start:stop] += 1
    assert occupied.max(initial=0) <= 1
    assert len(ring.rows_of) == len(model)


@given(st.lists(st.integers(1, 13), max_size=60))
def test_ring_has_the_chunks_that_were_put_last(lengths: list[int]) -> None:
    model: dict[int, Any] = {}
    ring = ChunkRing([(np.dtype(float), (3,))], MAX_BYTES)
    for key, length in enumerate(lengths):
        content = np.full((length, 3), key + 0.5)
        before = list(model)
        had_to_evict = put(ring, key, encoded(key, content))
        assert key in ring.rows_of
        model[key] = content
        check(ring, model)
        gone = [one for one in before if one not in model]
        assert gone == before[: len(gone)]  # the oldest ones
        assert bool(gone) == had_to_evict
        assert ring.num_bytes == sum(one.nbytes for one in model.values()) <= MAX_BYTES
        assert sum(map(len, model.values())) > 40 // 2 - 13 or len(model) == key + 1


def test_many_chunks_are_evicted_at_a_time() -> None:
    ring = ChunkRing([(np.dtype(float), ())], 8 * 1000)
    num_evictions = sum(put(ring, key, encoded(key, np.full(12, 1.0))) for key in range(200))
    assert 200 * 12 // 1000 <= num_evictions <= 200 * 12 // (1000 // 8) + 1
    assert len(ring.rows_of) * 12 > 1000 - 1000 // 8 - 2 * 12


def test_ring_has_room_for_a_chunk_above_the_limit_and_for_the_chunks_of_one_sample() -> None:
    types = [(np.dtype(float), (3,))]
    ring, model = ChunkRing(types, MAX_BYTES), dict[int, Any]()
    for key, (length, fits) in enumerate(((5, True), (40, True), (41, False), (100, False), (60, True), (30, True))):
        array = np.full((length, 3), float(key))
        one = encoded(key, array)
        assert ring.accepts(one) is fits
        if not fits:
            ring, model = ChunkRing(types, MAX_BYTES, [one]), {}
        assert len(ring.columns[0]) == {0: 40, 1: 40, 2: 41}.get(key, 100)
        model[key] = array
        put(ring, key, one)
        check(ring, model)
        assert key in model
    columns = {key: np.full((70, 3), float(key)) for key in range(3)}
    together = {key: encoded(key, column) for key, column in columns.items()}
    ring = ChunkRing(types, MAX_BYTES, [*together.values()])
    for key, one in together.items():
        put(ring, key, one)
    check(ring, columns)
    assert len(columns) == 3


def test_characters_count_and_are_freed_with_their_rows() -> None:
    ring = ChunkRing([(np.dtype(object), ())], 50_000)
    for key in range(200):
        content = np.array([b"%03d" % key * 1000, b"%03d" % key * key], object)
        put(ring, key, encoded(key, content))
        for cached, (start, stop) in ring.rows_of.items():
            assert ring.columns[0][start:stop].tolist() == [b"%03d" % cached * 1000, b"%03d" % cached * cached]
        assert ring.num_bytes <= 50_000
        kept = sum(len(one) for one in ring.columns[0] if one is not None)
        assert kept <= ring.num_bytes
    assert len(ring.rows_of) > 5


def test_damaged_chunk_is_not_in_the_ring() -> None:
    text, good = np.array([b"x" * 1000] * 3, object), np.arange(3)
    ring = ChunkRing([(np.dtype(object), ()), (np.dtype(int), ())], 50_000)
    made = chunk(1, [text, good])
    made.data.tensors[1].tensor_content = made.data.tensors[1].tensor_content[:1] + b"\xff" * 24
    damaged = EncodedChunks([made.SerializeToString()], 1 << 20).get(1, (0, 1))
    with pytest.raises(FormatError):
        ring.put(1, damaged)
    assert ring.rows_of == {}
    assert ring.num_bytes == 0
    assert [one for one in ring.columns[0] if one is not None] == []
    ring.put(1, EncodedChunks([chunk(1, [text, good]).SerializeToString()], 1 << 20).get(1, (0, 1)))
    assert ring.rows_of == {1: (0, 3)}


def test_new_ring_of_strings_writes_a_fraction_of_its_memory() -> None:
    """NumPy writes each pointer of a new array of strings; all of 64 MB took 25 ms for each look at a table."""
    ring = ChunkRing([(np.dtype(object), ())], 64 << 20)
    assert ring.columns[0].nbytes <= 8 << 20


# Encoded chunks, however they are damaged.


KEY_BYTES = 2  # tag and a key below 128
COLUMNS = [np.arange(5), np.arange(5 * 640, dtype=np.uint8).reshape(5, 640), np.ones(5, bool)]
SENT = chunk(7, COLUMNS).SerializeToString()

edits = st.lists(
    st.tuples(st.integers(0, len(SENT)), st.integers(0, 4), st.binary(max_size=6)), min_size=1, max_size=3
)  # where, how many bytes go, which come


@given(edits, st.sampled_from([(0, 1, 2), (1,), (2, 0)]))
@example([(len(SENT), 0, b"\x20\x01")], (0, 1, 2))  # delta-encoded, said at the end
@example([(len(SENT), 0, b"\x2a\x02\x0a\x00")], (1,))  # one more tensor
def test_chunk_that_is_sent_again_damaged_is_refused_or_decoded_within_its_rows(
    changes: list[tuple[int, int, bytes]], indices: tuple[int, ...]
) -> None:
    damaged = SENT
    for where, num_gone, come in changes:
        damaged = damaged[:where] + come + damaged[where + num_gone :]
    for sent in (damaged, (damaged + bytes(len(SENT)))[: len(SENT)]):  # as long as before, too
        with contextlib.suppress(FormatError, UnsafeDataError):
            _decoded(EncodedChunks([sent], 1 << 20).get(7, indices))
        assert _decoded(EncodedChunks([SENT], 1 << 20).get(7, indices)) == [
            COLUMNS[index].tobytes() for index in indices
        ]


def test_block_that_is_shorter_than_its_shape_is_refused() -> None:
    made = chunk(7, [np.arange(24, dtype=np.uint8)])
    block = made.data.tensors[0].tensor_content
    shorter = b"\x14" + 5 * (b"\x0c" + bytes(4))  # announces 20 bytes, and has five pieces of four
    assert len(shorter) == len(block)
    with pytest.raises(FormatError, match="20 bytes, expected 24"):
        EncodedChunks([made.SerializeToString().replace(block, shorter)], 1 << 20).get(7, (0,))


def test_damaged_block_is_refused() -> None:
    at = SENT.index(messages.SampledChunk.FromString(SENT).data.tensors[1].tensor_content)
    for damage in (b"\xff" * 8, b"\x00" * 8):
        damaged = SENT[: at + 2] + damage + SENT[at + 10 :]
        for key, encoded in ((7, damaged), (9, b"\x08\x09" + damaged[KEY_BYTES:])):
            with pytest.raises(FormatError):
                _decoded(EncodedChunks([encoded], 1 << 20).get(key, (0, 1, 2)))


def _decoded(found: EncodedChunk) -> list[bytes]:
    columns = [np.zeros((found.length, *shape), dtype) for dtype, shape in found.schema.dtypes_and_shapes]
    stored = [column.reshape(found.length, math.prod(column.shape[1:])).view(np.uint8) for column in columns]
    found.decode_into(columns, stored, 0)
    return [column.tobytes() for column in columns]
