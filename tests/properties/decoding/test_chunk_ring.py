"""A ring is a dict of decoded chunks with a memory limit, which evicts the oldest ones when it is told to."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sampled import chunk

from reverb_writer.decoding.chunks import ChunkRing, EncodedChunk, EncodedChunks
from reverb_writer.errors import FormatError

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
