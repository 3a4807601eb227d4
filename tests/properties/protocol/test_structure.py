"""Specs there and back, and nests made of leaves in dm-tree's order."""

from __future__ import annotations

import collections
from typing import Any

import numpy as np
import pytest
import tree
from hypothesis import given
from hypothesis import strategies as st

from reverb_writer.protocol.messages import TensorProto
from reverb_writer.protocol.signatures import (
    ArraySpec,
    decode_spec,
    encode_spec,
    have_same_leaves,
    packer,
    packer_of,
    read_spec,
    spec_tensor,
)

Pair = collections.namedtuple("Pair", ["left", "right"])  # noqa: PYI024  # as a user might have it

specs = st.builds(
    ArraySpec,
    st.lists(st.integers(0, 5), max_size=3).map(tuple),
    st.sampled_from([np.dtype(name) for name in ("f4", "f8", "i4", "u1", "?", "O")]),
)
nests = st.recursive(
    specs,
    lambda inner: (
        st.dictionaries(st.text("abcdef", min_size=1), inner, max_size=4)
        | st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.builds(Pair, inner, inner)
    ),
    max_leaves=8,
)


def same(one: Any, other: Any) -> bool:
    """Compare nests; a named tuple is one of its name and fields, of whatever class."""
    if hasattr(one, "_fields"):
        return (
            type(one).__name__ == type(other).__name__ and one._fields == other._fields and all(map(same, one, other))
        )
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@given(nests)
def test_spec_comes_back_as_it_was_stored(nest: Any) -> None:
    assert same(decode_spec(encode_spec(nest)), nest)


@given(nests)
def test_spec_is_found_in_its_tensor(nest: Any) -> None:
    tensor = TensorProto.FromString(spec_tensor(nest))
    assert [dim.size for dim in tensor.tensor_shape.dim][:1] == [1]
    encoded = read_spec(tensor.dtype, tensor.tensor_shape.SerializeToString(), tensor.tensor_content)
    assert encoded == encode_spec(nest)
    leaves = list(range(len(tree.flatten(nest))))
    assert same(packer_of(encoded)(leaves), packer(nest)(leaves))


@given(nests, st.data())
def test_damaged_tensor_is_no_spec_or_another_one(nest: Any, data: st.DataObject) -> None:
    tensor = TensorProto.FromString(spec_tensor(nest))
    content = bytearray(tensor.tensor_content)
    content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    encoded = read_spec(tensor.dtype, tensor.tensor_shape.SerializeToString(), bytes(content))
    assert not encoded or decode_spec(encoded) is not None
    assert read_spec(1, tensor.tensor_shape.SerializeToString(), tensor.tensor_content) == b""


def test_what_cannot_be_described_has_no_spec(caplog: pytest.LogCaptureFixture) -> None:
    leaf = ArraySpec((), np.dtype("f4"))
    assert spec_tensor({1: leaf}) == b""
    assert spec_tensor({f"leaf {number:0500}": leaf for number in range(1000)}) == b""
    assert [record.getMessage()[:58] for record in caplog.records] == [
        "Learners will get these items as flat tuples of columns: s",
        "Learners will get these items as flat tuples of columns: a",
    ]


def test_leaves_that_differ_are_told_apart() -> None:
    leaf = ArraySpec((3,), np.dtype("u1"))
    stored = {"a": ArraySpec((), np.dtype("f4")), "b": [leaf]}
    assert have_same_leaves(stored, {**stored, "b": (leaf,)})
    for other in (
        {**stored, "b": [ArraySpec((4,), np.dtype("u1"))]},
        {**stored, "b": [ArraySpec((3,), np.dtype("i1"))]},
        {**stored, "c": leaf},
        {"b": [leaf]},
    ):
        assert not have_same_leaves(stored, other)


def test_another_number_of_columns_is_a_flat_tuple() -> None:
    pack = packer({"a": ArraySpec((), np.dtype("f4"))})
    assert pack([1, 2]) == (1, 2)
    assert packer(None)([1, 2]) == (1, 2)
