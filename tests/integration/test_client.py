"""`Client` on a real server: what it writes it reads, what it tells is so, and what cannot work it says."""

from __future__ import annotations

import itertools
import math
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
from reading import fifo, read, read_column, spec
from server_process import HostedServer, ServerProcess

import reverb_writer as rw


class Pair(NamedTuple):
    left: Any
    right: Any


SIGNATURE = {
    "pair": Pair(spec((None, 2), np.float32), spec((None,), np.object_)),
    "list": [spec((3,), int)],
}


@pytest.fixture(scope="module")
def server(shared_process: ServerProcess) -> Iterator[HostedServer]:
    started = shared_process.start(
        fifo("a"),
        fifo("b"),
        fifo("late"),
        fifo("signed", signature=SIGNATURE),
        rw.TableConfig("replay", 1000, rw.Prioritized(1.0)),
        rw.TableConfig("heap", 1000, "max_heap", rate_limiter=rw.MinSize(2)),
        rw.TableConfig("pair", 1000, rate_limiter=rw.MinSize(2)),
    )
    yield started
    started.stop()


@pytest.fixture
def client(server: HostedServer) -> Iterator[rw.Client]:
    with rw.Client(server.address, timeout_s=20) as client:
        for table in client.server_info():
            client.reset(table)
        yield client


# Insert and sample.


def test_item_comes_back_leaf_by_leaf_each_with_its_own_length(client: rw.Client) -> None:
    leaves = {
        "long": np.arange(10, dtype=np.int16),
        "frame": np.arange(24, dtype=np.uint8).reshape(2, 3, 4),
        "one": np.array([[1.5 + 2j]], np.complex64),
        "swapped": np.array([1.0, 2.0], ">f8"),
        "strided": np.arange(12.0).reshape(3, 4)[::-1, ::2],
        "text": ["a", "ä\0", ""],
        "flag": [True, False],
    }
    client.insert(
        {name: np.asarray(leaf) for name, leaf in leaves.items()} | {"nest": {"x": np.zeros((1, 0))}}, {"a": 0.5}
    )
    (item,) = read(client, "a")
    expected = [np.asarray(leaves[name]) for name in sorted(leaves)]
    found = dict(zip([*sorted([*leaves, "nest"])], item.data, strict=True))
    assert found.pop("nest").shape == (1, 0)
    for want, got in zip(expected, found.values(), strict=True):
        if want.dtype.kind == "U":
            assert got.tolist() == [text.encode() for text in want.tolist()]
        else:
            assert got.dtype == want.dtype.newbyteorder("=")
            np.testing.assert_array_equal(got, want)
    assert (item.info.priority, item.info.times_sampled, item.info.probability, item.info.table_size) == (0.5, 1, 1, 1)


def test_bfloat16_comes_back(client: rw.Client) -> None:
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    client.insert(np.array([[1.5], [-3]], bfloat16), {"a": 1.0})
    (item,) = read(client, "a")
    assert item.data[0].dtype == bfloat16
    assert item.data[0].astype(float).tolist() == [[1.5], [-3]]


def test_one_insert_goes_to_several_tables_with_their_priorities(client: rw.Client) -> None:
    priorities: Any = {"a": 1, "b": np.float32(0.25)}
    client.insert([np.arange(3)], priorities)
    for table, priority in (("a", 1.0), ("b", 0.25)):
        (item,) = read(client, table)
        assert item.data[0].tolist() == [0, 1, 2]
        assert item.info.priority == priority


def test_table_s_signature_gives_the_nest_back(client: rw.Client) -> None:
    data = {"pair": Pair(np.ones((2, 2), np.float32), np.array(["x", "yz"])), "list": [np.arange(3)]}
    client.insert(data, {"signed": 1.0, "a": 1.0})
    (item,) = client.sample("signed")
    assert item.data["pair"].left.tolist() == [[1, 1], [1, 1]]
    assert item.data["pair"].right.tolist() == [b"x", b"yz"]
    assert item.data["list"][0].tolist() == [0, 1, 2]
    (item,) = read(client, "a")
    assert [column.tolist() for column in item.data] == [[0, 1, 2], [[1, 1], [1, 1]], [b"x", b"yz"]]


def test_items_come_in_order_and_exactly_as_many_as_asked_for(client: rw.Client) -> None:
    for number in range(10):
        client.insert(np.array([number]), {"a": 1.0})
    assert [sample.data[0].tolist() for sample in client.sample("a", 4)] == [[0], [1], [2], [3]]
    assert client.server_info()["a"].current_size == 6
    assert [sample.data[0].tolist() for sample in client.sample("a")] == [[4]]
    assert read_column(client, "a") == [[5], [6], [7], [8], [9]]


def test_samples_are_the_caller_s_own(client: rw.Client) -> None:
    client.insert(np.zeros(3), {"replay": 1.0})
    for times in range(1, 4):
        (sample,) = client.sample("replay")
        assert sample.data[0].tolist() == [0, 0, 0]
        assert sample.info.times_sampled == times
        sample.data[0][:] = times


def test_sample_of_many_messages_is_put_together(client: rw.Client) -> None:
    frames = np.random.default_rng(0).integers(256, size=(60, 300, 300), dtype=np.uint8)
    with rw.EpisodeObserver(client, "a", 60, chunk_length=7) as observer:
        for i, frame in enumerate(frames):
            observer({"frame": frame, "i": i}, end_of_episode=i == 59)
    (item,) = read(client, "a")
    np.testing.assert_array_equal(item.data[0], frames, strict=True)
    assert item.data[1].tolist() == list(range(60))


def test_item_larger_than_grpc_s_default_limit_is_no_matter(client: rw.Client) -> None:
    noise = np.random.default_rng(0).integers(256, size=(1, 12_000_000), dtype=np.uint8)
    client.insert(noise, {"a": 1.0})
    (item,) = read(client, "a")
    np.testing.assert_array_equal(item.data[0], noise)


def test_threads_share_a_client(client: rw.Client) -> None:
    def insert(first: int) -> None:
        for number in range(first, first + 20):
            client.insert(np.array([number]), {"a": 1.0})

    threads = [threading.Thread(target=insert, args=[100 * i]) for i in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = list(itertools.chain.from_iterable(read_column(client, "a")))
    for i in range(5):
        assert [number for number in found if number // 100 == i] == list(range(100 * i, 100 * i + 20))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"x": np.zeros(3), "y": {"z": np.float32(1)}}, r"leaf `y/z`: shape \(\), expected \[T, \.\.\.\] with T >= 1"),
        ({"x": np.zeros(3), "y": [np.zeros((0, 2))]}, r"leaf `y/0`: shape \(0, 2\), expected \[T, \.\.\.\]"),
        ({}, "at least one leaf"),
        ({"x": np.zeros(1, "M8[s]")}, "dtype datetime64"),
        ({"x": np.array([{}])}, "element of type dict"),
    ],
)
def test_data_that_is_no_item_is_refused(client: rw.Client, data: Any, message: str) -> None:
    with pytest.raises(rw.StructureError, match=message):
        client.insert(data, {"a": 1.0})
    client.insert(np.zeros(1), {"a": 1.0})
    assert read_column(client, "a") == [[0]]


@pytest.mark.parametrize("priority", [-1, math.nan, math.inf, "1", None])
def test_priority_that_is_none_is_refused(client: rw.Client, priority: Any) -> None:
    with pytest.raises(rw.SpecError, match="`priority` must be a finite number >= 0"):
        client.insert(np.zeros(1), {"a": 1.0, "b": priority})
    with pytest.raises(rw.SpecError, match="`priority` must be a finite number >= 0"):
        client.mutate_priorities("a", {1: 2.0, 2: priority})
    assert {client.server_info()[table].current_size for table in ("a", "b")} == {0}


def test_insert_into_no_table_is_refused(client: rw.Client) -> None:
    with pytest.raises(rw.SpecError, match="`priorities` must name at least one table, got none"):
        client.insert(np.zeros(1), {})


def test_unknown_table_is_named_with_those_that_there_are(client: rw.Client) -> None:
    message = "table `nope` is not on the server at .*; it has `a`, `b`, `heap`, `late`, `pair`, `replay`, `signed`"
    calls: list[Callable[[], Any]] = [
        lambda: client.insert(np.zeros(1), {"a": 1.0, "nope": 1.0}),
        lambda: next(client.sample("nope")),
        lambda: client.mutate_priorities("nope", {1: 1.0}),
        lambda: client.reset("nope"),
    ]
    for call in calls:
        with pytest.raises(rw.StructureError, match=message):
            call()
    assert client.server_info()["a"].current_size == 0


# Copies.


def test_pickled_client_is_one_of_the_same_servers(client: rw.Client) -> None:
    client.insert(np.array([7]), {"a": 1.0})
    with pickle.loads(pickle.dumps(client)) as other:  # noqa: S301  # our own bytes
        assert other.address == client.address
        assert other.timeout_s == client.timeout_s
        assert [sample.data[0].tolist() for sample in read(other, "a")] == [[7]]


def test_each_server_of_a_client_has_one_of_its_own(replay_server: Any) -> None:
    servers = [replay_server(fifo("a")) for _ in range(2)]
    with rw.Client([server.address for server in servers]) as client:
        for number, one in enumerate(client.each()):
            one.insert(np.array([number]), {"a": 1.0})
            assert one.address == servers[number].address
        assert client.server_info()["a"].current_size == 2
        assert sorted(int(sample.data[0][0]) for sample in client.sample("a", 2)) == [0, 1]


# Samples that do not come.


def test_sample_of_a_table_with_too_few_items_ends_with_its_time(client: rw.Client) -> None:
    with pytest.raises(
        rw.ReplayTimeoutError, match=r"table `pair`: 2 of 2 samples did not come within 0\.2 s.*is empty"
    ):
        list(client.sample("pair", 2, timeout_s=0.2))


def test_samples_that_came_before_the_time_was_up_are_there(client: rw.Client) -> None:
    client.insert(np.zeros(1), {"late": 1.0})
    samples = client.sample("late", 2, timeout_s=1)
    assert next(samples).data[0].tolist() == [0]
    with pytest.raises(rw.ReplayTimeoutError, match="table `late`: 1 of 2 samples did not come"):
        next(samples)


@pytest.mark.parametrize("num_samples", [0, -1, 1.0, True])
def test_number_of_samples_that_is_none_is_refused(client: rw.Client, num_samples: Any) -> None:
    with pytest.raises(rw.SpecError, match="`num_samples` must be"):
        next(client.sample("a", num_samples))


def test_samples_may_be_left_unread(client: rw.Client) -> None:
    for number in range(5):
        client.insert(np.array([number]), {"replay": 1.0})
    for _ in range(20):
        samples = client.sample("replay", 1000)
        next(samples)
        samples.close()  # type: ignore[attr-defined]  # a generator's
    assert client.server_info()["replay"].current_size == 5


# What the server tells.


def test_server_info_tells_of_every_table(client: rw.Client) -> None:
    for number in range(3):
        client.insert(np.array([number]), {"heap": float(number), "replay": 1.0})
    list(client.sample("heap", 2))
    tables = client.server_info()
    assert sorted(tables) == ["a", "b", "heap", "late", "pair", "replay", "signed"]
    heap = tables["heap"]
    assert (heap.name, heap.sampler, heap.remover, heap.max_size, heap.max_times_sampled) == (
        "heap",
        "max_heap",
        "fifo",
        1000,
        0,
    )
    assert (heap.current_size, heap.num_episodes, heap.num_deleted_episodes, heap.num_unique_samples) == (3, 3, 0, 1)
    limiter = heap.rate_limiter
    assert (limiter.samples_per_insert, limiter.min_size_to_sample, limiter.min_diff, limiter.max_diff) == (
        1,
        2,
        -math.inf,
        math.inf,
    )
    assert (limiter.num_inserts, limiter.num_samples, limiter.diff) == (3, 2, 1)
    assert (tables["replay"].sampler, tables["a"].max_times_sampled) == ("prioritized", 1)
    assert not heap.blocks_inserts()
    assert not heap.blocks_samples()
    assert tables["signed"].signature["list"] == SIGNATURE["list"]
    assert tables["signed"].signature["pair"]._asdict() == SIGNATURE["pair"]._asdict()  # type: ignore[attr-defined]
    assert tables["a"].signature is None
    assert min(heap.worker_time_ms.values()) >= 0


def test_identity_of_the_server_stays(client: rw.Client, server: HostedServer) -> None:
    with rw.Client(server.address) as other:
        assert client.request_info().state_id == other.request_info().state_id


# Priorities, reset, checkpoint.


def priorities(client: rw.Client, table: str, num_samples: int = 60) -> dict[int, float]:
    return {sample.info.key: sample.info.priority for sample in client.sample(table, num_samples)}


def test_priorities_are_changed_and_items_deleted_by_key(client: rw.Client) -> None:
    for number in range(3):
        client.insert(np.array([number]), {"replay": 1.0})
    keys = {int(sample.data[0][0]): sample.info.key for sample in client.sample("replay", 200)}
    assert sorted(keys) == [0, 1, 2]
    updates: Any = {keys[0]: 0, keys[1]: np.float32(3)}
    deletes: Any = [np.uint64(keys[2])]
    client.mutate_priorities("replay", updates, deletes)
    assert priorities(client, "replay") == {keys[1]: 3.0}
    assert client.server_info()["replay"].current_size == 2
    client.mutate_priorities("replay", deletes=list(keys.values()))
    assert client.server_info()["replay"].current_size == 0


def test_keys_that_the_table_does_not_have_are_ignored(client: rw.Client) -> None:
    client.insert(np.zeros(1), {"replay": 1.0})
    client.mutate_priorities("replay", {5: 1.0}, deletes=[6, 2**64 - 1])
    client.mutate_priorities("replay")
    assert client.server_info()["replay"].current_size == 1


@pytest.mark.parametrize("key", [-1, 2**64, 1.5, "1", None])
def test_key_that_is_none_is_refused(client: rw.Client, key: Any) -> None:
    with pytest.raises(rw.SpecError, match="`key` must be"):
        client.mutate_priorities("replay", {key: 1.0})
    with pytest.raises(rw.SpecError, match="`key` must be"):
        client.mutate_priorities("replay", deletes=[key])


def test_reset_empties_a_table(client: rw.Client) -> None:
    for table in ("a", "replay"):
        client.insert(np.zeros(1), {table: 1.0})
    client.reset("replay")
    tables = client.server_info()
    assert (tables["replay"].current_size, tables["replay"].rate_limiter.num_inserts) == (0, 0)
    assert tables["a"].current_size == 1


def test_checkpoint_gives_its_path(client: rw.Client) -> None:
    assert client.checkpoint() != client.checkpoint()


# Life and death.


def test_closed_client_says_so(server: HostedServer) -> None:
    client = rw.Client(server.address)
    client.insert(np.zeros(1), {"a": 1.0})
    client.close()
    client.close()
    calls: list[Callable[[], Any]] = [
        client.server_info,
        client.checkpoint,
        client.open_stream,
        lambda: client.insert(np.zeros(1), {"a": 1.0}),
        lambda: next(client.sample("a")),
        lambda: client.mutate_priorities("a"),
        lambda: client.reset("a"),
        lambda: rw.TrajectoryObserver(client, "a", 2),
    ]
    for call in calls:
        with pytest.raises(rw.ClosedError, match=f"the client of {server.address} is closed. Make a new one"):
            call()


def test_unused_client_can_be_closed() -> None:
    with rw.Client("localhost:1") as client:
        pass
    client.close()


@pytest.mark.parametrize("timeout_s", [0, -1, math.nan, "soon", None])
def test_time_that_is_none_is_refused(client: rw.Client, timeout_s: Any) -> None:
    if timeout_s is not None:  # which is the client's, in a call
        with pytest.raises(rw.SpecError, match="`timeout_s` must be > 0 seconds"):
            client.server_info(timeout_s)
        with pytest.raises(rw.SpecError, match="`timeout_s` must be > 0 seconds"):
            client.insert(np.zeros(1), {"a": 1.0}, timeout_s)
    with pytest.raises(rw.SpecError, match="`timeout_s` must be > 0 seconds"):
        rw.Client("localhost:8000", timeout_s=timeout_s)


def test_who_wants_to_may_wait_for_ever(server: HostedServer) -> None:
    with rw.Client(server.address, timeout_s=math.inf) as client:
        client.reset("a")
        client.insert(np.array([1]), {"a": 1.0})
        with rw.TrajectoryObserver(client, "a", 1) as observer:
            observer({"n": 2})
            observer.flush()
        assert read_column(client, "a") == [[1], [2]]


@pytest.mark.parametrize("address", ["", "localhost", "http://localhost:8000", "localhost:port", 8000, None])
def test_address_that_is_none_is_refused(address: Any) -> None:
    with pytest.raises(rw.SpecError, match="`address` must be"):
        rw.Client(address)
