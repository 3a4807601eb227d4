"""Table configurations: their numbers, worked by hand, refusals, signatures, and the shares of several shards."""

from __future__ import annotations

import dataclasses
import math
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import reverb_writer as rw
from reverb_writer.errors import SpecError
from reverb_writer.protocol import messages
from reverb_writer.protocol.signatures import ArraySpec, check_signature, decode
from reverb_writer.tables import (
    MinSize,
    Prioritized,
    Queue,
    RateLimiter,
    SampleToInsertRatio,
    Selector,
    Stack,
    TableConfig,
)
from reverb_writer.tables.shares import share_of
from reverb_writer.tables.table_dicts import table_to_dict
from reverb_writer.tables.table_messages import encode_signature, read_selector, write_selector


@pytest.mark.parametrize(
    ("limiter", "balance"),
    [
        (MinSize(5), (1, 5, -math.inf, math.inf)),
        (SampleToInsertRatio(8, 100, 200), (8, 100, 600, 1000)),  # 8 x 100 = 800, 200 to either side
        (SampleToInsertRatio(8, 100, 8.0), (8, 100, 792, 808)),  # the smallest that works
        (SampleToInsertRatio(8, 100, (792, 808)), (8, 100, 792, 808)),
        (SampleToInsertRatio(0.25, 40, 1), (0.25, 40, 9, 11)),  # 0.25 x 40 = 10
        (SampleToInsertRatio(2, 10, (-30, 50)), (2, 10, -30, 50)),  # a pair is taken as it is
        (Queue(7), (1, 1, 0, 7)),
        (Stack(7), (1, 1, 0, 7)),
    ],
)
def test_rate_limiter_comes_down_to_four_numbers(limiter: RateLimiter, balance: tuple[float, ...]) -> None:
    assert limiter.balance == balance


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        (MinSize, (0,), "`min_size` must be >= 1, got 0."),
        (MinSize, (True,), "`min_size` must be an integer, got True (bool)."),
        (MinSize, (2.0,), "`min_size` must be an integer, got 2.0 (float)."),
        (Queue, (0,), "`size` must be >= 1, got 0."),
        (Stack, ("5",), "`size` must be an integer, got '5' (str)."),
        (Prioritized, (-0.5,), "`exponent` must be >= 0, got -0.5. With 0, priorities have no effect."),
        (Prioritized, (math.nan,), "`exponent` must be a finite number, got nan."),
        (SampleToInsertRatio, (0, 1, 9), "`samples_per_insert` must be > 0, got 0. Without a ratio, use MinSize."),
        (SampleToInsertRatio, (math.inf, 1, 9), "`samples_per_insert` must be a finite number, got inf."),
        (SampleToInsertRatio, (1, 0, 9), "`min_size` must be >= 1, got 0."),
        (SampleToInsertRatio, (1, 1, "9"), "`error_buffer` must be a finite number, got '9'."),
        (SampleToInsertRatio, (1, 1, (0, math.inf)), "`max_diff` must be a finite number, got inf."),
        (SampleToInsertRatio, (1, 1, (5,)), "`error_buffer` must be a number or (min_diff, max_diff), got (5,)."),
        (SampleToInsertRatio, (8, 100, 4), "must be >= max(1, `samples_per_insert`) = 8, got 4: one insert moves"),
        (SampleToInsertRatio, (0.5, 10, (0, 1.5)), "= 2, got 1.5 (0 to 1.5): one insert moves diff by 0.5"),
        (SampleToInsertRatio, (8, 100, (900, 1000)), "min_diff must be <= `samples_per_insert` x `min_size` = 8 x 100"),
    ],
)
def test_selector_or_limiter_that_cannot_work_is_refused(kind: Any, arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(SpecError, match=re.escape(message)):
        kind(*arguments)


def test_bounds_that_are_rounded_are_not_too_narrow() -> None:
    balance = SampleToInsertRatio(0.1, 13, 1).balance  # 1.3 - 1 is rounded up
    assert balance.max_diff - balance.min_diff < 2
    restored = SampleToInsertRatio(0.1, 13, (balance.min_diff, balance.max_diff))  # as from a checkpoint
    assert restored.balance == balance


def test_ratio_whose_writers_wait_for_the_first_sample_warns_with_its_numbers() -> None:
    with pytest.warns(UserWarning, match=r"max_diff 700 .* = 8 x 100 = 800: after the first 100 inserts") as told:
        SampleToInsertRatio(8, 100, (0, 700))
    assert told[0].filename == __file__


def test_numpy_numbers_are_stored_as_plain_ones() -> None:
    ratio = SampleToInsertRatio(np.float32(0.5), np.int64(10), [np.int8(-5), np.float64(7)])  # type: ignore[arg-type]
    assert repr(ratio) == "SampleToInsertRatio(samples_per_insert=0.5, min_size=10, error_buffer=(-5.0, 7.0))"
    table = TableConfig("replay", np.int16(9), max_times_sampled=np.uint8(3))  # type: ignore[arg-type]
    assert (type(table.max_size), type(table.max_times_sampled)) == (int, int)


def test_defaults_are_a_uniform_replay_of_a_million_items() -> None:
    table = TableConfig("replay")
    assert dataclasses.astuple(table) == ("replay", 1_000_000, "uniform", "fifo", (1,), 0, None)
    assert table.rate_limiter == MinSize(1)


def test_queue_and_stack_give_each_item_once() -> None:
    assert TableConfig.queue("q", 10) == TableConfig("q", 10, "fifo", "fifo", Queue(10), 1)
    assert TableConfig.stack("s", 10) == TableConfig("s", 10, "lifo", "lifo", Stack(10), 1)
    assert Queue(10) != Stack(10)
    assert TableConfig.variables("weights") == TableConfig("weights", max_size=1)
    word = TableConfig("replay", sampler="prioritized", remover="prioritized")
    assert word == TableConfig("replay", sampler=Prioritized(1), remover=Prioritized(1))


SELECTORS = "must be one of 'fifo', 'lifo', 'uniform', 'max_heap', 'min_heap', 'prioritized' or Prioritized(exponent)"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": ""}, "`name` must be a string that is not empty, got ''."),
        ({"name": 3}, "`name` must be a string that is not empty, got 3."),
        ({"max_size": 0}, "`max_size` must be >= 1, got 0."),
        ({"max_size": 2**31}, "`max_size` must be <= 2147483647, got 2147483648."),
        ({"max_times_sampled": -1}, "`max_times_sampled` must be >= 0, got -1."),
        ({"sampler": "unifrom"}, f"`sampler` {SELECTORS}, got 'unifrom'."),
        ({"remover": []}, f"`remover` {SELECTORS}, got []."),
        ({"rate_limiter": 100}, "`rate_limiter` must be a MinSize, SampleToInsertRatio, Queue or Stack, got 100."),
        ({"rate_limiter": MinSize(11), "max_size": 10}, "`min_size` must be <= `max_size`, got 11 > 10"),
        ({"rate_limiter": Queue(10)}, "`max_size` >= 10, got 'uniform', 'fifo', 0 and 1000000. Use TableConfig.queue"),
        (
            {"rate_limiter": Stack(10), "sampler": "lifo", "remover": "lifo", "max_times_sampled": 1, "max_size": 9},
            "Stack(size=10) needs `sampler` and `remover` 'lifo', `max_times_sampled` 1 and `max_size` >= 10",
        ),
    ],
)
def test_table_that_cannot_work_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=re.escape(message)):
        TableConfig(**{"name": "replay", **fields})


def test_table_of_a_program_that_trains_after_every_few_steps() -> None:
    """A batch of 64 after every 4 steps: 16 samples for each item. 8 batches of 64 are 512 samples, to either side."""
    table = TableConfig.replay("replay", 10_000, 500, 64, 4, sampler="prioritized")
    assert table == TableConfig("replay", 10_000, Prioritized(1), rate_limiter=SampleToInsertRatio(16, 500, 512))
    # A batch of 10 after every twentieth of a step: 200 samples for each item, more than 8 batches of 10.
    assert TableConfig.replay("replay", 100, 1, 10, 0.05).rate_limiter == SampleToInsertRatio(200, 1, 200)
    for arguments, message in (
        ((0, 1, 1, 1), "`buffer_size` must be >= 1, got 0."),
        ((10, 0, 1, 1), "`learning_starts` must be >= 1, got 0."),
        ((10, 11, 1, 1), "`learning_starts` must be <= `buffer_size`, got 11 > 10."),
        ((10, 1, 0, 1), "`batch_size` must be >= 1, got 0."),
        ((10, 1, 1, 0), "`train_frequency` must be > 0 items per batch, got 0."),
    ):
        with pytest.raises(SpecError, match=f"^{re.escape(message)}$"):
            TableConfig.replay("replay", *arguments)


@pytest.mark.parametrize(
    ("selector", "is_deterministic"),
    [
        ("fifo", True),
        ("lifo", True),
        ("max_heap", True),
        ("min_heap", True),
        ("uniform", False),
        (Prioritized(0.5), False),
    ],
)
def test_selector_is_told_to_clients_as_reverb_tells_it(selector: Selector, is_deterministic: bool) -> None:
    options = messages.KeyDistributionOptions()
    write_selector(selector, options)
    assert options.is_deterministic is is_deterministic
    assert read_selector(options) == selector


# Signatures and shares.


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


def test_signature_in_the_dict_of_a_table_needs_a_time_dimension_in_each_leaf() -> None:
    for leaf in (ArraySpec((), F4), ArraySpec(None, F4), None):
        with pytest.raises(SpecError, match="must be dicts and lists of ArraySpec with a time dimension, got"):
            table_to_dict(TableConfig("replay", signature={"x": ArraySpec((None, 2), F4), "y": leaf}))


def test_signature_of_tensorflow_may_have_an_unknown_rank() -> None:
    class Shape(list[int]):
        rank: int | None

    for rank, expected in ((None, None), (2, (2, 3))):
        shape = Shape((2, 3))
        shape.rank = rank
        signature = encode_signature({"x": SimpleNamespace(shape=shape, dtype=F4)})
        assert decode(signature) == {"x": ArraySpec(expected, F4)}


def test_dtype_and_number_of_leaves_are_those_of_the_signature() -> None:
    for time, got, wanted in ((None, "(3,)", "(3,)"), ((5,), "(5, 3)", "(None, 3)")):
        told = re.escape(f"leaf `leaf0`: float32 {got}, but table `replay` holds int32 {wanted} in `x`")
        with pytest.raises(rw.errors.StructureError, match=told):
            check({"x": ArraySpec((None, 3), np.dtype(np.int32))}, (3,), time=time)
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
