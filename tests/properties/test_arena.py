"""An arena is a dict of decoded chunks that forgets the first ones: what it names is there, and it is bounded."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sampled import chunk

from reverb_writer.decoding.chunk_ring import Arena
from reverb_writer.decoding.encoded_chunk import SentChunk, SentChunks
from reverb_writer.errors import FormatError

MAX_BYTES = 40 * 24  # 40 rows of three floats


def sent(key: int, column: Any) -> SentChunk:
    return SentChunks([chunk(key, [column]).SerializeToString()], 1 << 20).get(key, (0,))


def check(arena: Arena, model: dict[int, Any]) -> None:
    """Compare what is there with the chunks that came; the model forgets what the arena has given up."""
    assert arena.spans.keys() <= model.keys()
    for key in model.keys() - arena.spans.keys():
        del model[key]
    occupied = np.zeros(len(arena.columns[0]), int)
    for key, (start, stop) in arena.spans.items():
        np.testing.assert_array_equal(arena.columns[0][start:stop], model[key])
        occupied[start:stop] += 1
    assert occupied.max(initial=0) <= 1
    assert len(arena.spans) == len(model)


@given(st.lists(st.integers(1, 13), max_size=60))
def test_what_is_there_is_what_was_put_there(lengths: list[int]) -> None:
    model: dict[int, Any] = {}
    lost: list[int] = []
    arena = Arena([(np.dtype(float), (3,))], MAX_BYTES, lambda: lost.append(len(model)))
    for key, length in enumerate(lengths):
        content = np.full((length, 3), key + 0.5)
        before = list(model)
        num_losses = len(lost)
        arena.put(key, sent(key, content))
        assert key in arena.spans
        model[key] = content
        check(arena, model)
        gone = [one for one in before if one not in model]
        assert gone == before[: len(gone)]  # the first ones
        assert not gone or len(lost) > num_losses  # were read before
        assert arena.num_bytes == sum(one.nbytes for one in model.values()) <= MAX_BYTES
        assert sum(map(len, model.values())) > 40 // 2 - 13 or len(model) == key + 1


def test_chunks_leave_many_at_a_time() -> None:
    losses: list[int] = []
    arena = Arena([(np.dtype(float), ())], 8 * 1000, lambda: losses.append(1))
    for key in range(200):
        arena.put(key, sent(key, np.full(12, 1.0)))
    assert 200 * 12 // 1000 <= len(losses) <= 200 * 12 // (1000 // 8) + 1
    assert len(arena.spans) * 12 > 1000 - 1000 // 8 - 2 * 12


def test_arena_is_enlarged_for_a_chunk_that_does_not_fit_and_for_chunks_that_are_named_together() -> None:
    arena = Arena([(np.dtype(float), (3,))], MAX_BYTES, lambda: None)
    model: dict[int, Any] = {}
    for key, (length, fits) in enumerate(((5, True), (40, True), (41, False), (100, False), (60, True), (30, True))):
        model[key] = np.full((length, 3), float(key))
        one = sent(key, model[key])
        assert arena.fits(one) is fits
        if not fits:
            arena.clear([one])
        assert arena.is_enlarged is (key >= 2)
        arena.put(key, one)
        check(arena, model)
        assert key in model
    arena.clear([])
    assert not arena.is_enlarged
    columns = {key: np.full((70, 3), float(key)) for key in range(3)}
    together = {key: sent(key, column) for key, column in columns.items()}
    arena.clear(together.values())
    for key, one in together.items():
        arena.put(key, one)
    check(arena, columns)
    assert len(columns) == 3


def test_characters_count_and_go_with_their_rows() -> None:
    arena = Arena([(np.dtype(object), ())], 50_000, lambda: None)
    for key in range(200):
        content = np.array([b"%03d" % key * 1000, b"%03d" % key * key], object)
        arena.put(key, sent(key, content))
        for there, (start, stop) in arena.spans.items():
            assert arena.columns[0][start:stop].tolist() == [b"%03d" % there * 1000, b"%03d" % there * there]
        assert arena.num_bytes <= 50_000
        kept = sum(len(one) for one in arena.columns[0] if one is not None)
        assert kept <= arena.num_bytes
    assert len(arena.spans) > 5


def test_damaged_chunk_leaves_nothing_behind() -> None:
    text, good = np.array([b"x" * 1000] * 3, object), np.arange(3)
    arena = Arena([(np.dtype(object), ()), (np.dtype(int), ())], 50_000, lambda: None)
    made = chunk(1, [text, good])
    made.data.tensors[1].tensor_content = made.data.tensors[1].tensor_content[:1] + b"\xff" * 24
    damaged = SentChunks([made.SerializeToString()], 1 << 20).get(1, (0, 1))
    with pytest.raises(FormatError):
        arena.put(1, damaged)
    assert arena.spans == {}
    assert arena.num_bytes == 0
    assert [one for one in arena.columns[0] if one is not None] == []
    arena.put(1, SentChunks([chunk(1, [text, good]).SerializeToString()], 1 << 20).get(1, (0, 1)))
    assert arena.spans == {1: (0, 3)}
