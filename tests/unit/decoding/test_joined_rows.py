"""Copies of ranges of rows, beside the same rows taken from lists one by one."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st

from reverb_writer.decoding.joined_rows import JoinedRows
from reverb_writer.decoding.samples import ArrayMemory, Column, PartMemory

NUM_ROWS = 2000
RANGES = st.tuples(st.integers(0, 999), st.one_of(st.integers(1, 6), st.integers(100, 1000)))
SAMPLES = st.lists(st.lists(RANGES, min_size=1, max_size=3), min_size=1, max_size=5)
SOURCES = st.sampled_from(
    [
        np.arange(NUM_ROWS, dtype=np.int32),
        np.arange(NUM_ROWS) % 3 == 0,
        np.arange(6 * NUM_ROWS, dtype=np.float32).reshape(NUM_ROWS, 3, 2),
        np.array([b"%d" % row for row in range(NUM_ROWS)], object),
        np.zeros((NUM_ROWS, 0), np.uint8),
    ]
)


def joined(samples: list[list[tuple[int, int]]]) -> JoinedRows:
    ranges = np.array([one for sample in samples for one in sample])
    counts = np.array([len(sample) for sample in samples])
    return JoinedRows(ranges[:, 0], ranges[:, 1], None if (counts == 1).all() else counts)


def places_of(samples: list[list[tuple[int, int]]]) -> list[list[int]]:
    return [[row for first, size in sample for row in range(first, first + size)] for sample in samples]


@given(SAMPLES, SOURCES, st.data())
def test_rows_are_those_of_the_ranges_in_order(
    samples: list[list[tuple[int, int]]], source: Any, data: st.DataObject
) -> None:
    rows, places = joined(samples), places_of(samples)
    chosen = data.draw(st.lists(st.integers(0, len(samples) - 1), min_size=1))
    for found, expected in ((rows, places), (rows.of(np.array(chosen)), [places[sample] for sample in chosen])):
        flat = [place for sample in expected for place in sample]
        assert found.lengths.tolist() == list(map(len, expected))
        assert found.num_rows == len(flat)
        numbers = np.array(data.draw(st.lists(st.integers(0, len(flat) - 1), max_size=5)), np.int64)
        assert found.rows(numbers).tolist() == [flat[number] for number in numbers]
        out = np.empty_like(source, shape=(len(flat), *source.shape[1:]))
        found.copy(source, out)
        assert out.tolist() == [source[place].tolist() if source.dtype != object else source[place] for place in flat]


@given(SAMPLES, SOURCES)
def test_padding_follows_the_last_row_of_each_sample(samples: list[list[tuple[int, int]]], source: Any) -> None:
    rows, places = joined(samples), places_of(samples)
    longest = max(map(len, places))
    out = np.empty_like(source, shape=(len(samples), longest, *source.shape[1:]))
    padding = b"" if source.dtype == object else 1
    rows.copy_padded(source, out, padding)
    for sample, of_sample in zip(out, places, strict=True):
        np.testing.assert_array_equal(sample[: len(of_sample)], source[of_sample])
        assert (sample[len(of_sample) :] == padding).all()


def test_adjacent_samples_of_one_array_are_end_to_end() -> None:
    rows = JoinedRows.end_to_end(np.array([2, 3]))
    assert (rows.all_rows.tolist(), rows.lengths.tolist()) == ([0, 1, 2, 3, 4], [2, 3])


def test_parts_of_a_batch_as_long_as_the_last_one_are_written_into_one_array() -> None:
    memory, source = PartMemory(ArrayMemory()), np.zeros((9, 2), np.int32)

    def batch(*sizes: int, first: int) -> Column:
        memory.begin_next()
        parts = []
        for size in sizes:
            out = memory.part(0, source, size)
            out[:] = first
            first += 1
            parts.append(Column(out, np.array([size]), is_scalar=False))
        found = memory.joined(0, parts)
        assert found.lengths.tolist() == list(sizes)
        assert found.rows[:, 1].tolist() == [number for part in parts for number in part.rows[:, 0].tolist()]
        return Column(
            found.rows, np.array([np.shares_memory(found.rows, part.rows) for part in parts]), is_scalar=False
        )

    assert not batch(2, 3, first=1).lengths.any()  # five rows, which nothing announced, are joined
    kept = batch(4, 1, first=3)
    assert kept.lengths.all()
    assert not batch(3, 1, first=5).lengths.any()  # a smaller batch has memory of its own size
    assert not batch(1, 4, first=7).lengths.any()
    assert kept.rows[:, 0].tolist() == [3, 3, 3, 3, 4]


def test_free_memory_is_used_again_by_arrays_of_about_its_size() -> None:
    memory, source = ArrayMemory(), np.zeros((1, 1 << 10), np.uint8)

    def address(array: npt.NDArray[Any]) -> int:
        return int(array.__array_interface__["data"][0])

    small, large = memory.rows_like(source, 2 << 10), memory.rows_like(source, 20 << 10)  # 2 and 20 MiB
    of_small, of_large = address(small), address(large)
    assert address(memory.rows_like(source, 20 << 10)) not in (of_small, of_large)
    del small, large
    again = memory.rows_like(source, 22 << 10)  # a tenth more
    assert address(again) == of_large
    assert again.shape == (22 << 10, 1 << 10)
    assert address(memory.rows_like(source, 2 << 10)) == of_small


def test_free_memory_of_other_sizes_is_given_back() -> None:
    memory, source = ArrayMemory(), np.zeros((1, 1 << 10), np.uint8)
    tracemalloc.start()
    try:
        for size in (1, 3, 9, 27):  # MiB, each of which fits no other
            memory.rows_like(source, size << 10)
        assert 27 << 20 < tracemalloc.get_traced_memory()[0] < 31 << 20  # an eighth more than 27 MiB, and little else
    finally:
        tracemalloc.stop()
