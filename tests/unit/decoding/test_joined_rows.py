"""Copies of ranges of rows, beside the same rows taken from lists one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from reverb_writer.decoding.joined_rows import JoinedRows

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
