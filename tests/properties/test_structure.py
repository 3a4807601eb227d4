"""Specs there and back, and nests made of leaves in dm-tree's order."""

from __future__ import annotations

import collections
from typing import Any

import numpy as np
import pytest
import tree
from hypothesis import given
from hypothesis import strategies as st
from reverb_writer.protocol.table_specs import check_same, decode_spec, encode_spec, packer

from reverb_writer.errors import StructureError
from reverb_writer.protocol.signatures import ArraySpec

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
def test_leaves_are_packed_as_dm_tree_does(nest: Any) -> None:
    leaves = list(range(len(tree.flatten(nest))))
    assert same(packer(nest)(leaves), tree.unflatten_as(nest, leaves))


@given(nests)
def test_a_structure_agrees_with_itself(nest: Any) -> None:
    check_same("t", nest, nest)


def test_another_number_of_columns_is_a_flat_tuple() -> None:
    pack = packer({"a": ArraySpec((), np.dtype("f4"))})
    assert pack([1, 2]) == (1, 2)
    assert packer(None)([1, 2]) == (1, 2)


def test_the_leaf_that_differs_is_named() -> None:
    stored = {"a": ArraySpec((), np.dtype("f4")), "b": [ArraySpec((3,), np.dtype("u1"))]}
    with pytest.raises(
        StructureError, match=r"table `t`, leaf `b/0`: uint8 \(4,\), expected uint8 \(3,\) as in the data"
    ):
        check_same("t", stored, {"a": stored["a"], "b": [ArraySpec((4,), np.dtype("u1"))]})
    with pytest.raises(StructureError, match=r"table `t` was first written with. Missing: none; unexpected: `c`"):
        check_same("t", stored, {**stored, "c": stored["a"]})
    with pytest.raises(StructureError, match=r"Missing: `a`; unexpected: none"):
        check_same("t", stored, {"b": stored["b"]})
