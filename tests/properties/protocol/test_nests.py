"""Nests are taken apart and put together as dm-tree does it, and specs of them come back, whatever they are made of."""

from __future__ import annotations

import collections
from typing import Any

import numpy as np
import pytest
import tree
from hypothesis import given
from hypothesis import strategies as st

from reverb_writer.errors import StructureError
from reverb_writer.nests import check_same_leaves, common_length, flattener, named_leaves, packer, rows, structure_of
from reverb_writer.protocol.messages import StructuredValue, TensorProto
from reverb_writer.protocol.signatures import (
    NO_SPEC,
    ArraySpec,
    decode,
    decode_spec,
    encode,
    encode_spec,
    have_same_leaves,
    packer_of,
    read_spec,
    spec_tensor,
)
from reverb_writer.protocol.signatures import packer as spec_packer
from reverb_writer.steps import StepStructure

Pair = collections.namedtuple("Pair", ["right", "left"])  # noqa: PYI024  # as a user might have it

keys = st.text("abcdef", min_size=1)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    sequences = st.lists(inner, max_size=4)
    return st.dictionaries(keys, inner, max_size=4) | sequences | sequences.map(tuple) | st.builds(Pair, inner, inner)


def all_containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    dicts = st.dictionaries(keys, inner, max_size=4)
    return (
        containers(inner)
        | dicts.map(lambda nest: collections.OrderedDict(reversed(nest.items())))
        | dicts.map(lambda nest: collections.defaultdict(list, nest))
    )


nests = st.recursive(st.integers(), all_containers, max_leaves=10)
specs = st.builds(
    ArraySpec,
    st.lists(st.integers(0, 5), max_size=3).map(tuple),
    st.sampled_from([np.dtype(name) for name in ("f4", "f8", "i4", "u1", "?", "O")]),
)
nests_of_specs = st.recursive(specs, containers, max_leaves=8)


def assert_same(one: Any, other: Any) -> None:
    """Compare leaves and containers; a named tuple is one of its name and fields, of whatever class."""
    tree.assert_same_structure(one, other)
    assert tree.flatten(one) == tree.flatten(other)


@given(nests)
def test_flattened_as_dm_tree_does(nest: Any) -> None:
    assert [*flattener(structure_of(nest))(nest)] == tree.flatten(nest) == named_leaves(nest, "")[1]


@given(nests.filter(tree.flatten))
def test_steps_have_the_paths_of_dm_tree_and_arrays_that_fit_are_passed_on_as_they_are(nest: Any) -> None:
    step = tree.map_structure(lambda number: np.array(number % 100), nest)
    structure = StepStructure(step)
    assert [*structure.paths] == ["/".join(map(str, path)) for path, _ in tree.flatten_with_path(step)]
    leaves = structure.flatten(step, 0)
    assert all(mine is yours for mine, yours in zip(leaves, tree.flatten(step), strict=True))
    assert_same(structure.pack(leaves), step)


@given(nests)
def test_packed_as_dm_tree_does(nest: Any) -> None:
    leaves = list(range(len(tree.flatten(nest))))
    packed = packer(nest)(leaves)
    assert_same(packed, tree.unflatten_as(nest, leaves))
    assert type(packed) is not dict or [*packed] == [*nest]


@given(nests)
def test_rows_are_packed_as_each_row_is(nest: Any) -> None:
    columns = [[number, number + 100] for number in range(len(tree.flatten(nest)))]
    expected = [packer(nest)(list(row)) for row in zip(*columns, strict=True)]
    found = [row for row, _ in zip(rows(nest, columns), range(2), strict=False)]
    if columns:
        assert_same(found, expected)
        assert len([*rows(nest, columns)]) == 2


@pytest.mark.parametrize(
    ("paths", "expected", "message"),
    [
        (("a",), ("a", "b/0"), "Missing: `b/0`; unexpected: none."),
        (("",), ("a",), "Missing: `a`; unexpected: an array without a nest."),
        (("b", "a"), ("a", "b"), "Missing: none; unexpected: none. Their order is `b`, `a`."),
    ],
)
def test_leaves_that_differ_are_named(paths: Any, expected: Any, message: str) -> None:
    with pytest.raises(StructureError) as caught:
        check_same_leaves("here", paths, expected, "there")
    assert str(caught.value) == f"here: its leaves are not those of there. {message}"


@pytest.mark.parametrize("nest", [{}, {"a": 1}, {"a": [[1], [2]], "b": ()}])
def test_nests_without_one_length_are_refused(nest: Any) -> None:
    with pytest.raises(StructureError, match=r"`x`: leaves must be \[T, \.\.\.\] with one T for all"):
        common_length(nest, "`x`")


# Specs there and back.


@given(nests_of_specs)
def test_spec_comes_back_as_it_was_stored(nest: Any) -> None:
    assert_same(decode_spec(encode_spec(nest)), nest)
    assert_same(decode(StructuredValue.FromString(encode(nest).SerializeToString())), nest)


@given(nests_of_specs, st.booleans())
def test_spec_is_found_in_its_tensor(nest: Any, with_kinds: bool) -> None:
    tensor = TensorProto.FromString(spec_tensor(nest, with_kinds=with_kinds))
    assert [dim.size for dim in tensor.tensor_shape.dim][:1] == [1]
    encoded, has_kinds = read_spec(tensor.dtype, tensor.tensor_shape.SerializeToString(), tensor.tensor_content)
    assert (encoded, has_kinds) == (encode_spec(nest), with_kinds)
    leaves = list(range(len(tree.flatten(nest))))
    assert_same(packer_of(encoded)(leaves), spec_packer(nest)(leaves))


@given(nests_of_specs, st.data())
def test_damaged_tensor_is_no_spec_or_another_one(nest: Any, data: st.DataObject) -> None:
    tensor = TensorProto.FromString(spec_tensor(nest))
    content = bytearray(tensor.tensor_content)
    content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    encoded, _ = read_spec(tensor.dtype, tensor.tensor_shape.SerializeToString(), bytes(content))
    assert not encoded or decode_spec(encoded) is not None
    assert read_spec(1, tensor.tensor_shape.SerializeToString(), tensor.tensor_content) == NO_SPEC
    tensor.tensor_shape.dim.add(size=1)  # a spec is [1, bytes]
    assert read_spec(tensor.dtype, tensor.tensor_shape.SerializeToString(), tensor.tensor_content) == NO_SPEC


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
    pack = spec_packer({"a": ArraySpec((), np.dtype("f4"))})
    assert pack([1, 2]) == (1, 2)
    assert spec_packer(None)([1, 2]) == (1, 2)
