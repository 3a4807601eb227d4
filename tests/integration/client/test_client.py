"""`Client` on a real server: what it tells is so, what it writes it reads, and what cannot work it says."""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numbered import insert_items
from reading import SIGNATURE, Pair, Serve, fifo, read, read_column, spec
from server_process import HostedServer
from threads import at_once

import reverb_writer as rw
from reverb_writer.client.whole_items import one_item


def test_server_info_tells_of_every_table(client: rw.Client) -> None:
    for number in range(3):
        client.insert(np.array([number]), {"heap": float(number), "replay": 1.0})
    list(client.sample("heap", 2))
    tables = client.server_info()
    assert sorted(tables) == ["a", "b", "heap", "late", "pair", "replay", "signed"]
    heap = tables["heap"]
    assert (heap.name, heap.sampler, heap.remover) == ("heap", "max_heap", "fifo")
    assert (heap.max_size, heap.max_times_sampled) == (1000, 0)
    assert (heap.current_size, heap.num_episodes, heap.num_deleted_episodes, heap.num_unique_samples) == (3, 3, 0, 1)
    limiter = heap.rate_limiter
    assert (limiter.samples_per_insert, limiter.min_size_to_sample) == (1, 2)
    assert (limiter.min_diff, limiter.max_diff) == (-math.inf, math.inf)
    assert (limiter.num_inserts, limiter.num_samples, limiter.diff) == (3, 2, 1)
    assert (tables["replay"].sampler, tables["a"].max_times_sampled) == ("prioritized", 1)
    assert (tables["replay"].sampler_exponent, tables["replay"].remover_exponent) == (1.0, None)
    assert heap.sampler_exponent is None
    assert not heap.blocks_inserts()
    assert not heap.blocks_samples()
    assert tables["signed"].signature["list"] == SIGNATURE["list"]
    assert tables["signed"].signature["pair"]._asdict() == SIGNATURE["pair"]._asdict()  # type: ignore[attr-defined]
    assert tables["a"].signature is None
    assert min(heap.worker_time_ms.values()) >= 0


def test_priorities_are_changed_and_items_deleted_by_key_and_unknown_keys_ignored(client: rw.Client) -> None:
    for number in range(3):
        client.insert(np.array([number]), {"replay": 1.0})
    keys = {int(sample.data[0][0]): sample.info.key for sample in client.sample("replay", 200)}
    assert sorted(keys) == [0, 1, 2]
    updates: Any = {keys[0]: 0, keys[1]: np.float32(3)}
    deletes: Any = [np.uint64(keys[2])]
    client.mutate_priorities("replay", updates, deletes)
    client.mutate_priorities("replay", {5: 1.0}, deletes=[6, 2**64 - 1])
    client.mutate_priorities("replay")
    assert {sample.info.key: sample.info.priority for sample in client.sample("replay", 60)} == {keys[1]: 3.0}
    assert client.server_info()["replay"].current_size == 2
    client.mutate_priorities("replay", deletes=list(keys.values()))
    assert client.server_info()["replay"].current_size == 0
    key: Any
    for key in (-1, 2**64, 1.5, "1", None):
        with pytest.raises(rw.errors.SpecError, match="`key` must be"):
            client.mutate_priorities("replay", {key: 1.0})
        with pytest.raises(rw.errors.SpecError, match="`key` must be"):
            client.mutate_priorities("replay", deletes=[key])


def test_closed_client_says_so(server: HostedServer) -> None:
    client = rw.Client(server.address)
    assert client.address == server.address
    client.insert(np.zeros(1), {"a": 1.0})
    client.close()
    client.close()
    calls: list[Callable[[], Any]] = [
        client.server_info,
        client.checkpoint,
        lambda: client.insert(np.zeros(1), {"a": 1.0}),
        lambda: client.sample("a"),
        lambda: client.mutate_priorities("a"),
        lambda: client.reset("a"),
        lambda: rw.TrajectoryObserver(client, "a", 2),
    ]
    for call in calls:
        with pytest.raises(rw.errors.ClosedError, match=f"the client of {server.address} is closed. Make a new one"):
            call()


def test_item_comes_back_leaf_by_leaf_each_with_its_own_length_from_several_tables(client: rw.Client) -> None:
    leaves = {
        "flag": [True, False],
        "frame": np.arange(24, dtype=np.uint8).reshape(2, 3, 4),
        "long": np.arange(10, dtype=np.int16),
        "nest": np.zeros((1, 0)),
        "one": np.array([[1.5 + 2j]], np.complex64),
        "strided": np.arange(12.0).reshape(3, 4)[::-1, ::2],
        "swapped": np.array([1.0, 2.0], ">f8"),
        "text": ["a", "ä\0", ""],
    }
    arrays = {name: np.asarray(leaf) for name, leaf in leaves.items()}
    priorities: Any = {"a": 0.5, "b": np.float32(0.25)}
    client.insert({**arrays, "nest": {"x": arrays["nest"]}}, priorities)
    for table, priority in priorities.items():
        (item,) = read(client, table)
        for want, got in zip(arrays.values(), item.data, strict=True):
            if want.dtype.kind == "U":
                assert got.tolist() == [text.encode() for text in want.tolist()]
            else:
                assert got.dtype == want.dtype.newbyteorder("=")
                np.testing.assert_array_equal(got, want, strict=want.dtype.isnative)
        info = item.info
        assert (info.priority, info.times_sampled, info.probability, info.table_size) == (priority, 1, 1, 1)


def test_server_keeps_an_item_whose_key_it_knows_and_takes_the_new_priority(client: rw.Client) -> None:
    for value, priority in ((1, 0.5), (2, 0.75)):
        request = one_item([np.array([value])], [False], {"a": priority}, key=7)
        insert_items(client.shards[0].channel, request)
    (item,) = read(client, "a")
    assert (item.data[0].tolist(), item.info.key, item.info.priority, item.info.table_size) == ([1], 7, 0.75, 1)


def test_table_s_signature_gives_the_nest_back_and_another_item_is_refused_by_leaf_path(client: rw.Client) -> None:
    signed = {"pair": Pair(np.ones((2, 2), np.float32), np.array(["x", "yz"])), "list": [np.arange(3)]}
    another_dtype = "leaf `pair/left`: int64 (2, 2), but table `signed` holds float32 (None, 2) in `pair/left` (its"
    fewer = "table `signed`: its signature has 3 leaves (list/0, pair/left, pair/right), got 1 (list/0)."
    for data, message in (
        ({**signed, "pair": Pair(np.zeros((2, 2), int), np.array(["x", "yz"]))}, another_dtype),
        ({"list": [np.arange(3)]}, fewer),
    ):
        with pytest.raises(rw.errors.StructureError, match=re.escape(message)):
            client.insert(data, {"a": 1.0, "signed": 1.0})
    assert {client.server_info()[table].current_size for table in ("a", "signed")} == {0}
    client.insert(signed, {"signed": 1.0, "a": 1.0})
    (item,) = client.sample("signed")
    assert item.data["pair"].left.tolist() == [[1, 1], [1, 1]]
    assert item.data["pair"].right.tolist() == [b"x", b"yz"]
    assert item.data["list"][0].tolist() == [0, 1, 2]
    (item,) = read(client, "a")
    assert [column.tolist() for column in item.data] == [[0, 1, 2], [[1, 1], [1, 1]], [b"x", b"yz"]]


def test_items_come_in_order_exactly_as_many_as_asked_for_and_are_the_caller_s_own(client: rw.Client) -> None:
    for number in range(10):
        client.insert(np.array([number]), {"a": 1.0})
    assert [sample.data[0].tolist() for sample in client.sample("a", 4)] == [[0], [1], [2], [3]]
    assert client.server_info()["a"].current_size == 6
    assert [sample.data[0].tolist() for sample in client.sample("a")] == [[4]]
    assert read_column(client, "a") == [[5], [6], [7], [8], [9]]
    client.insert(np.zeros(3), {"replay": 1.0})
    for times in range(1, 4):
        (sample,) = client.sample("replay")
        assert sample.data[0].tolist() == [0, 0, 0]
        assert sample.info.times_sampled == times
        sample.data[0][:] = times


def test_threads_share_a_client(client: rw.Client) -> None:
    def insert(first: int) -> None:
        for number in range(first, first + 20):
            client.insert(np.array([number]), {"a": 1.0})

    at_once(*(functools.partial(insert, 100 * i) for i in range(5)))
    found = list(itertools.chain.from_iterable(read_column(client, "a")))
    for i in range(5):
        assert [number for number in found if number // 100 == i] == list(range(100 * i, 100 * i + 20))


def test_squeezed_leaf_is_compared_without_time(serve: Serve) -> None:
    client = serve(fifo("once", signature={"total": spec((), np.float64), "x": spec((None, 2), np.float32)}))
    x, squeeze = np.zeros((3, 2), np.float32), {"total": True, "x": False}
    message = r"leaf `total`: float64 \({}\), but table `once` holds float64 \(\)"
    with pytest.raises(rw.errors.StructureError, match=message.format("2,")):
        client.insert({"total": np.zeros(2), "x": x}, {"once": 1.0}, squeeze=squeeze)
    with pytest.raises(rw.errors.StructureError, match=message.format("1, 2")):
        client.insert({"total": np.zeros((1, 2)), "x": x}, {"once": 1.0})
    client.insert({"total": 1.5, "x": x}, {"once": 1.0}, squeeze=squeeze)
    (item,) = client.sample("once")
    assert item.data["total"] == 1.5
    assert item.data["x"].shape == (3, 2)


@pytest.mark.parametrize("shape", [(None, None), (None, None, None), (None, 4)])
def test_signature_may_leave_the_sizes_of_a_step_open(serve: Serve, shape: tuple[int | None, ...]) -> None:
    # Of a step, as `reverb.TimestepDataset` wants it, or with time before it.
    client = serve(fifo("open", signature={"x": spec(shape, np.float32)}))
    x = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    client.insert({"x": x}, {"open": 1.0})
    with rw.TrajectoryObserver(client, "open", 2) as observer:
        observer.extend({"x": x})
    for item in client.sample("open", 2):
        np.testing.assert_array_equal(item.data["x"], x, strict=True)
    with pytest.raises(rw.errors.StructureError, match="leaf `x`: float32"):
        client.insert({"x": x[0, 0]}, {"open": 1.0})


def test_unknown_table_is_named_with_those_that_there_are(client: rw.Client) -> None:
    message = "table `nope` is not on the server at .*; it has `a`, `b`, `heap`, `late`, `pair`, `replay`, `signed`"
    calls: list[Callable[[], Any]] = [
        lambda: client.insert(np.zeros(1), {"a": 1.0, "nope": 1.0}),
        lambda: next(client.sample("nope")),
        lambda: client.mutate_priorities("nope", {1: 1.0}),
        lambda: client.reset("nope"),
    ]
    for call in calls:
        with pytest.raises(rw.errors.StructureError, match=message):
            call()
    assert client.server_info()["a"].current_size == 0


def test_sample_of_too_few_items_ends_with_its_time_and_gives_what_came_before(client: rw.Client) -> None:
    told = r"table `pair`: 2 of 2 samples did not come within 2.0 s.*is empty"
    with pytest.raises(rw.errors.ReplayTimeoutError, match=told):
        list(client.sample("pair", 2, timeout_s=2))
    client.insert(np.zeros(1), {"late": 1.0})
    samples = client.sample("late", 2, timeout_s=3)
    assert next(samples).data[0].tolist() == [0]
    with pytest.raises(rw.errors.ReplayTimeoutError, match="table `late`: 1 of 2 samples did not come"):
        next(samples)


def test_samples_may_be_left_unread(client: rw.Client) -> None:
    for number in range(5):
        client.insert(np.array([number]), {"replay": 1.0})
    for _ in range(20):
        samples = client.sample("replay", 1000)
        next(samples)
        samples.close()  # type: ignore[attr-defined]  # a generator's
    assert client.server_info()["replay"].current_size == 5


def test_named_columns_come_back_by_name_and_others_as_a_tuple(client: rw.Client) -> None:
    given: list[Any] = [{"x": [np.ones(2), np.zeros(1)]}, Pair(np.ones(1), np.ones(2)), [np.ones(1)], np.ones(1)]
    for data in given:
        client.insert(data, {"a": 1.0})
    found = [sample.data for sample in client.sample("a", len(given))]
    assert [column.tolist() for column in found[0]["x"]] == [[1.0, 1.0], [0.0]]
    assert (type(found[1]).__name__, found[1]._fields, found[1][1].tolist()) == ("Pair", Pair._fields, [1.0, 1.0])
    assert [(type(data), data[0].tolist()) for data in found[2:]] == [(tuple, [1.0])] * 2
