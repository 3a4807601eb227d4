"""Random items for an `ItemWriter`, and the check that a table gives them back, against a list in memory."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import numpy as np
import tree
from hypothesis import strategies as st
from reading import Place

import reverb_writer as rw

DTYPES = ["?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16", ">i4", "S", "U"]
MAX_BYTES = 4_000_000  # of a leaf
Point = namedtuple("Point", ["x", "y"])  # noqa: PYI024  # a type of a program of today
FORMS: list[Any] = [lambda a, b: {"b": a, "a": b}, lambda a, b: [a, b], lambda a, b: (a, b), Point]


@st.composite
def leaves(draw: st.DrawFn) -> Any:
    """Return an array [T, ...] of 1 byte to some MB, or a single value, in some memory layout."""
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    if dtype.kind in "SU":
        texts = st.text("aé\0𝄞", max_size=5) if dtype.kind == "U" else st.binary(max_size=5)
        return np.array(draw(st.lists(texts, min_size=1, max_size=5)), object)
    shape: tuple[int, ...] = draw(st.sampled_from([(), (1,), (2, 3), (0,), (1, 1, 1)]))
    row_bytes = max(int(np.prod(shape)), 1) * dtype.itemsize
    length = draw(st.integers(1, 40) | st.integers(1, MAX_BYTES // row_bytes // 7).map(lambda n: 7 * n))
    if draw(st.integers(0, 5)) == 0:
        return dtype.newbyteorder("=").type(1)
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    array = rng.integers(0, 2 if dtype.kind == "b" else 100, (length, *shape)).astype(dtype)
    layout = draw(st.sampled_from(["C", "F", "strided"]))
    if layout == "strided":
        return np.repeat(array, 2, axis=0)[::2]
    return np.asfortranarray(array) if layout == "F" else array


@st.composite
def items(draw: st.DrawFn) -> Any:
    """Return a nest of such leaves with names."""
    parts = st.recursive(
        leaves(), lambda inner: st.builds(lambda form, a, b: form(a, b), st.sampled_from(FORMS), inner, inner)
    )
    return draw(st.dictionaries(st.sampled_from(["tokens", "log_probs", "version"]), parts, min_size=1))


def assert_round_trip(place: Place, nests: list[Any]) -> None:
    """Write items, and fail unless the tables give the same nests back, in order."""
    for table in ("a", "b"):
        place.client.reset(table)
    with rw.ItemWriter(place.client, ["a", "b"], max_in_flight_bytes=10_000_000) as writer:
        for number, nest in enumerate(nests):
            writer.write(nest, priority=number)
    for table in ("a", "b"):
        for number, (sample, nest) in enumerate(zip(place.client.sample(table, len(nests)), nests, strict=True)):
            assert sample.info.priority == number
            got, expected = tree.flatten_with_path(sample.data), tree.flatten_with_path(nest)
            assert [path for path, _ in got] == [path for path, _ in expected]
            for (path, leaf), (_, original) in zip(got, expected, strict=True):
                stored = as_bytes(original) if original.dtype == object else original
                np.testing.assert_array_equal(leaf, stored, err_msg=str(path))
                assert (leaf.dtype, leaf.shape) == (stored.dtype.newbyteorder("="), stored.shape)


def as_bytes(texts: Any) -> Any:
    """Return strings as Reverb stores them."""
    return np.array([text.encode() if isinstance(text, str) else text for text in texts], object)
