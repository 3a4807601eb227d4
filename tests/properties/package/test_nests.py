"""Nests are taken apart and put together as dm-tree does it, whatever they are made of."""

from __future__ import annotations

import collections
from typing import Any

import pytest
import tree
from hypothesis import given
from hypothesis import strategies as st

from reverb_writer.errors import StructureError
from reverb_writer.nests import check_same_leaves, common_length, flattener, named_leaves, packer, rows, structure_of

Pair = collections.namedtuple("Pair", ["right", "left"])  # noqa: PYI024  # as a user might have it

keys = st.text("abcdef", min_size=1)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    dicts = st.dictionaries(keys, inner, max_size=4)
    sequences = st.lists(inner, max_size=4)
    return (
        dicts
        | dicts.map(lambda nest: collections.OrderedDict(reversed(nest.items())))
        | dicts.map(lambda nest: collections.defaultdict(list, nest))
        | sequences
        | sequences.map(tuple)
        | st.builds(Pair, inner, inner)
    )


nests = st.recursive(st.integers(), containers, max_leaves=10)


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return [*one] == [*other] and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@given(nests)
def test_flattened_as_dm_tree_does(nest: Any) -> None:
    assert [*flattener(structure_of(nest))(nest)] == tree.flatten(nest) == named_leaves(nest, "")[1]


@given(nests)
def test_packed_as_dm_tree_does(nest: Any) -> None:
    leaves = list(range(len(tree.flatten(nest))))
    packed = packer(nest)(leaves)
    assert same(packed, tree.unflatten_as(nest, leaves))
    assert type(packed) is not dict or [*packed] == [*nest]


@given(nests)
def test_rows_are_packed_as_each_row_is(nest: Any) -> None:
    columns = [[number, number + 100] for number in range(len(tree.flatten(nest)))]
    expected = [packer(nest)(list(row)) for row in zip(*columns, strict=True)]
    found = [row for row, _ in zip(rows(nest, columns), range(2), strict=False)]
    assert not columns or all(map(same, found, expected))
    assert not columns or len([*rows(nest, columns)]) == 2


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
