"""Whatever rows an accumulator is given, it takes those that NumPy could assign, and ends up as NumPy would have it."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import reverb_writer as rw

DTYPES = st.sampled_from([np.bool_, np.int8, np.uint8, np.int32, np.int64, np.float16, np.float32, np.float64])
SHAPES = arrays.array_shapes(min_dims=0, max_dims=2, min_side=1, max_side=3)


def rows_of(shape: tuple[int, ...]) -> st.SearchStrategy[Any]:
    """Draw rows that mostly fit a leaf of this shape."""
    fitting = st.sampled_from([shape, (1, *shape), (), (1,), tuple(1 for _ in shape)])
    return st.one_of(
        arrays.arrays(DTYPES, st.one_of(fitting, SHAPES)),
        st.one_of(st.booleans(), st.integers(-300, 300), st.floats(width=16)),
    )


@given(st.data(), DTYPES, SHAPES, st.integers(2, 4), st.booleans())
def test_a_buffered_leaf_is_filled_as_numpy_assigns(
    data: st.DataObject, dtype: Any, shape: tuple[int, ...], capacity: int, lossy: bool
) -> None:
    accumulator = rw.TrajectoryAccumulator({"x": {"leaf": np.ones((capacity, *shape), dtype)}}, lossy_casts=lossy)
    stored, slot = np.zeros((capacity, *shape), dtype), 0
    for row in data.draw(st.lists(rows_of(shape), max_size=2 * capacity)):
        before = stored.copy()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                stored[slot : slot + 1] = np.asarray(row).astype(dtype)
                fits = slot < capacity
            except ValueError:
                fits = False
        exact = np.empty((1, *shape), object)
        if fits:
            exact[:] = np.asarray(row, object)
        lossless = fits and np.array_equal(stored[slot : slot + 1], exact)
        try:
            accumulator.add("x", {"leaf": row})
        except (rw.errors.StructureError, IndexError):
            assert not (fits and (lossy or lossless))
            stored = before
        else:
            assert fits
            slot += 1
    assert accumulator.counts == {"x": slot}
    built = accumulator.build(partial=True)["x"]["leaf"]
    assert built.dtype == dtype
    np.testing.assert_array_equal(built, stored)


@given(st.lists(st.integers(0, 5), max_size=30))
def test_what_was_built_stays_as_it_was(lengths: list[int]) -> None:
    accumulator = rw.TrajectoryAccumulator({"x": np.zeros(5, np.int64), "n": np.int64(0)})
    built = []
    for rollout, length in enumerate(lengths):
        for row in range(length):
            accumulator.add("x", 10 * rollout + row + 1)
        accumulator.add("n", length)
        built.append(accumulator.build(partial=True))
    for rollout, (length, found) in enumerate(zip(lengths, built, strict=True)):
        assert found["n"] == length
        assert found["x"].tolist() == [10 * rollout + row + 1 if row < length else 0 for row in range(5)]
