"""Which columns a signature describes, and what each of several shards serves of a table."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import reverb_writer as rw
from reverb_writer.errors import SpecError
from reverb_writer.protocol.signatures import ArraySpec, check_signature
from reverb_writer.tables import MinSize, Prioritized, SampleToInsertRatio, TableConfig
from reverb_writer.tables.shares import share_of

F4 = np.dtype(np.float32)


def check(signature: Any, *shapes: tuple[int, ...], time: tuple[int | None, ...] | None = None) -> None:
    times = None if time is None else [time] * len(shapes)
    check_signature("replay", signature, [f"leaf{n}" for n in range(len(shapes))], [F4] * len(shapes), shapes, times)


@pytest.mark.parametrize(
    ("of_table", "time"),
    [
        ((None, 3), None),
        ((5, 3), (5,)),
        ((None, None), (5,)),
        ((None, 3), (None,)),
        ((3,), None),
        ((None,), None),
        (None, None),
    ],
)
def test_window_or_step_of_the_signature_is_taken(of_table: Any, time: Any) -> None:
    check({"x": ArraySpec(of_table, F4)}, (3,), time=time)


@pytest.mark.parametrize(
    ("of_table", "time"),
    [((None, 4), None), ((5, 3), (4,)), ((5, 4), (5,)), ((None, 3, 1), None), ((4,), None), ((), None)],
)
def test_other_shapes_are_refused_by_leaf(of_table: Any, time: Any) -> None:
    with pytest.raises(rw.errors.StructureError, match=r"leaf `leaf0`: float32 .* but table `replay` holds float32"):
        check({"x": ArraySpec(of_table, F4)}, (3,), time=time)


def test_dtype_and_number_of_leaves_are_those_of_the_signature() -> None:
    with pytest.raises(rw.errors.StructureError, match="but table `replay` holds int32"):
        check({"x": ArraySpec((None, 3), np.dtype(np.int32))}, (3,))
    with pytest.raises(rw.errors.StructureError, match=r"its signature has 1 leaves \(x\), got 2 \(leaf0, leaf1\)"):
        check({"x": ArraySpec((None, 3), F4)}, (3,), (3,))


def test_leaves_are_steps_together_or_windows_together() -> None:
    """A signature `[None, 2]` is a step of shape (?, 2) or windows of shape (2,): the other leaf tells which."""
    check({"a": ArraySpec((None, 2), F4), "b": ArraySpec((), F4)}, (7, 2), ())
    check({"a": ArraySpec((None, 2), F4), "b": ArraySpec((None,), F4)}, (2,), ())
    with pytest.raises(rw.errors.StructureError, match="leaf `leaf0`"):
        check({"a": ArraySpec((None, 2), F4), "b": ArraySpec((None,), F4)}, (7, 2), ())


def test_shares_of_a_ratio_by_hand() -> None:
    table = TableConfig("replay", 10, Prioritized(0.5), rate_limiter=SampleToInsertRatio(2, 5, (-8, 40)))
    shares = [share_of(table, shard, 4) for shard in range(4)]
    assert [share.max_size for share in shares] == [3, 3, 2, 2]
    assert {share.rate_limiter for share in shares} == {SampleToInsertRatio(2, 2, (-2, 10))}
    assert {share.sampler for share in shares} == {Prioritized(0.5)}


def test_a_queue_is_split_and_a_table_of_one_item_is_whole() -> None:
    shares = [share_of(TableConfig.queue("q", 5), shard, 2) for shard in range(2)]
    assert shares == [TableConfig.queue("q", 3), TableConfig.queue("q", 2)]
    weights = TableConfig("variables", max_size=1)
    assert share_of(weights, 3, 4) is weights


@given(max_size=st.integers(2, 10**9), shards=st.integers(1, 64), data=st.data())
def test_sizes_add_up_and_no_shard_needs_more_than_it_holds(max_size: int, shards: int, data: st.DataObject) -> None:
    min_size = data.draw(st.integers(1, max_size))
    table = TableConfig("replay", max_size, rate_limiter=MinSize(min_size))
    if max_size < shards:
        with pytest.raises(SpecError, match=rf"must be 1 or >= {shards}, got {max_size}"):
            share_of(table, 0, shards)
        return
    try:
        parts = [share_of(table, shard, shards) for shard in range(shards)]
    except SpecError:  # rounded up, the minimum is more than the smallest share
        assert -(-min_size // shards) > max_size // shards
        return
    assert sum(part.max_size for part in parts) == max_size
    assert sum(part.rate_limiter.balance.min_size for part in parts) >= min_size


def test_a_share_that_cannot_work_is_refused_with_the_table() -> None:
    table = TableConfig("replay", 100, rate_limiter=SampleToInsertRatio(8, 10, 16))
    with pytest.raises(SpecError, match=r"table `replay`: .* all 4 shards together, .*got 4: "):
        share_of(table, 0, 4)
