"""Reading from real servers: order, structure, lengths, time-outs and their causes, restarts, several servers."""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from reading import eventually
from server_process import HostedServer

import reverb_writer as rw
from reverb_writer.structure import SPECS_TABLE, spec_key
from reverb_writer.wire.signatures import ArraySpec

StartServer = Callable[..., HostedServer]

QUEUE = rw.TableConfig("queue", 10_000, sampler="fifo", max_times_sampled=1)


def write(address: str, table: str, num_steps: int, length: int = 4, **options: Any) -> None:
    """Write one episode of steps 0, 1, 2, ... in two leaves; the second is ten times the first."""
    with rw.TrajectoryObserver(address, table, length, **options) as observer:
        for step in range(num_steps):
            observer(
                {"a": np.int64(step), "b": np.full(2, 10 * step, np.float32)}, end_of_episode=step == num_steps - 1
            )


def insert_numbers(address: str, table: str, numbers: Any, length: int = 1) -> None:
    with rw.Client(address) as client:
        for number in numbers:
            client.insert({"n": np.full(length, number, np.int64)}, {table: 1.0})


def first_numbers(batch: rw.Batch) -> list[int]:
    (leaf,) = batch.data
    return [int(number) for number in leaf[:, 0]]


# What comes.


def test_batches_are_the_windows_written(replay_server: StartServer) -> None:
    server = replay_server(rw.TableConfig("replay"))
    write(server.address, "replay", 60)
    with rw.ReplayDataset(server.address, "replay", 32) as dataset:
        batches = [next(dataset) for _ in range(8)]
    starts = set()
    for batch in batches:
        a, b = batch.data["a"], batch.data["b"]
        assert (a.dtype, a.shape, b.dtype, b.shape) == (np.int64, (32, 4), np.float32, (32, 4, 2))
        np.testing.assert_array_equal(a, a[:, :1] + np.arange(4))
        np.testing.assert_array_equal(b, np.repeat(10 * a[..., None], 2, axis=-1))
        starts |= set(a[:, 0].tolist())
        assert (batch.info.table_sizes == 57).all()
        np.testing.assert_allclose(batch.info.probabilities, 1 / 57)
        assert batch.info.lengths.tolist() == [4] * 32
        assert batch.info.mask is None
        assert batch.info.server == server.address
    assert starts <= set(range(57))
    assert len(starts) > 40


def test_batches_belong_to_the_caller(replay_server: StartServer) -> None:
    server = replay_server(rw.TableConfig("replay"))
    write(server.address, "replay", 12)
    with rw.ReplayDataset(server.address, "replay", 16) as dataset:
        for _ in range(5):
            a = next(dataset).data["a"]
            assert a.flags.c_contiguous
            assert a.flags.writeable
            np.testing.assert_array_equal(a, a[:, :1] + np.arange(4))
            a[...] = -1


@pytest.mark.parametrize(("sampler", "expected"), [("fifo", [0, 1, 2, 3, 4, 5]), ("lifo", [5, 4, 3, 2, 1, 0])])
def test_order_of_the_table_is_kept(replay_server: StartServer, sampler: Any, expected: list[int]) -> None:
    server = replay_server(rw.TableConfig("table", 10, sampler=sampler, max_times_sampled=1))
    insert_numbers(server.address, "table", range(6))
    with rw.ReplayDataset(server.address, "table", 2, max_in_flight_batches=3) as dataset:
        assert [number for _ in range(3) for number in first_numbers(next(dataset))] == expected


def test_queue_gives_everything_once_and_the_rest_at_the_end(replay_server: StartServer) -> None:
    server = replay_server(QUEUE)
    insert_numbers(server.address, "queue", range(7))
    dataset = rw.ReplayDataset(server.address, "queue", 3, timeout_s=1.0, on_timeout="stop")
    with dataset:
        assert [first_numbers(batch) for batch in dataset] == [[0, 1, 2], [3, 4, 5], [6]]
        insert_numbers(server.address, "queue", range(7, 9))
        assert [first_numbers(batch) for batch in dataset] == [[7, 8]]
    assert dataset.stats().undelivered_samples == 0


def test_what_was_fetched_can_be_read_after_close_and_is_counted(replay_server: StartServer) -> None:
    server = replay_server(QUEUE)
    insert_numbers(server.address, "queue", range(5))
    dataset = rw.ReplayDataset(server.address, "queue", 3)
    assert first_numbers(next(dataset)) == [0, 1, 2]
    dataset.close()
    assert dataset.stats().undelivered_samples == 2
    assert [first_numbers(batch) for batch in dataset] == [[3, 4]]
    assert dataset.stats().undelivered_samples == 0
    dataset.close()


def test_buffers_are_used_again_only_if_asked_for(replay_server: StartServer) -> None:
    server = replay_server(rw.TableConfig("replay"))
    write(server.address, "replay", 60)
    with rw.ReplayDataset(server.address, "replay", 16, reuse_buffers=True) as dataset:
        arrays = []
        for _ in range(20):
            a = next(dataset).data["a"]
            np.testing.assert_array_equal(a, a[:, :1] + np.arange(4))
            arrays.append(a.__array_interface__["data"][0])
        assert len(set(arrays)) <= 4
    with rw.ReplayDataset(server.address, "replay", 16) as dataset:
        batches = [next(dataset).data["a"] for _ in range(20)]
        assert len({a.__array_interface__["data"][0] for a in batches}) == 20


def test_a_learner_that_went_without_a_sample_takes_none_with_it(replay_server: StartServer) -> None:
    server = replay_server(QUEUE)
    dataset = rw.ReplayDataset(server.address, "queue", 3, timeout_s=0.3)
    with dataset, pytest.raises(rw.ReplayTimeoutError):
        next(dataset)
    with rw.Client(server.address) as client:
        with pytest.raises(rw.ReplayTimeoutError):
            next(client.sample("queue", 3, timeout_s=0.3))
        insert_numbers(server.address, "queue", range(5))
        assert client.server_info()["queue"].current_size == 5
        assert [int(sample.data[0][0]) for sample in client.sample("queue", 5)] == [0, 1, 2, 3, 4]


def test_no_more_is_fetched_ahead_than_allowed(replay_server: StartServer) -> None:
    server = replay_server(QUEUE)
    insert_numbers(server.address, "queue", range(40))
    with rw.Client(server.address) as client, rw.ReplayDataset(client, "queue", 4, max_in_flight_batches=2) as dataset:
        for taken in range(1, 4):
            next(dataset)
            stats = dataset.stats()
            assert stats.in_flight_samples + stats.ready_samples <= 8
            assert client.server_info()["queue"].rate_limiter.num_samples <= 4 * taken + 8


# Items of different lengths.


@pytest.fixture
def ragged(replay_server: StartServer) -> str:
    server = replay_server(QUEUE)
    with rw.Client(server.address) as client:
        for length in (2, 1, 3):
            client.insert({"x": np.arange(1, 1 + length), "y": np.ones((length, 2), np.float32)}, {"queue": 1.0})
    return server.address


def test_different_lengths_are_an_error_that_tells_what_to_do(ragged: str) -> None:
    with rw.ReplayDataset(ragged, "queue", 3) as dataset, pytest.raises(rw.StructureError, match=r"1 to 3 rows.*'pad'"):
        next(dataset)


def test_pad_gives_zeros_and_a_mask(ragged: str) -> None:
    with rw.ReplayDataset(ragged, "queue", 3, collate="pad") as dataset:
        (x, y), info = next(dataset)
    np.testing.assert_array_equal(x, [[1, 2, 0], [1, 0, 0], [1, 2, 3]])
    assert info.mask is not None
    np.testing.assert_array_equal(info.mask, [[1, 1, 0], [1, 0, 0], [1, 1, 1]])
    np.testing.assert_array_equal(y, np.repeat(info.mask[..., None], 2, axis=-1))
    assert info.lengths.tolist() == [2, 1, 3]


def test_flat_lays_samples_end_to_end(ragged: str) -> None:
    with rw.ReplayDataset(ragged, "queue", 3, collate="flat") as dataset:
        (x, y), info = next(dataset)
    assert x.tolist() == [1, 2, 1, 1, 2, 3]
    assert y.shape == (6, 2)
    assert info.lengths.tolist() == [2, 1, 3]


def test_list_gives_a_nest_a_sample(ragged: str) -> None:
    with rw.ReplayDataset(ragged, "queue", 3, collate="list") as dataset:
        data, _ = next(dataset)
    assert [x.tolist() for x, _ in data] == [[1, 2], [1], [1, 2, 3]]


def test_num_steps_cuts_samples_into_pieces(replay_server: StartServer) -> None:
    server = replay_server(QUEUE)
    with rw.Client(server.address) as client:
        for item in ([1, 2, 3], [10, 20, 30, 40, 50]):
            client.insert([np.array(item)], {"queue": float(len(item))})
    options: dict[str, Any] = {"num_steps": 2, "timeout_s": 1.0, "on_timeout": "stop"}
    with rw.ReplayDataset(server.address, "queue", 2, **options) as dataset:
        found = [(batch.data[0].tolist(), batch.info.priorities.tolist()) for batch in dataset]
    assert found == [([[1, 2], [10, 20]], [3.0, 5.0]), ([[30, 40]], [5.0])]


@pytest.mark.parametrize(("num_steps", "message"), [(5, r"\(5 vs. 4\)"), (3, "not a multiple")])
def test_num_steps_must_divide_the_sequence(replay_server: StartServer, num_steps: int, message: str) -> None:
    with pytest.raises(rw.SpecError, match=message):
        rw.ReplayDataset(replay_server(QUEUE).address, "queue", 2, num_steps=num_steps, sequence_length=4)


# One pass.


def test_single_pass_gives_what_is_there_in_order_and_stops(replay_server: StartServer) -> None:
    server = replay_server(QUEUE)
    insert_numbers(server.address, "queue", range(5))
    with rw.ReplayDataset(server.address, "queue", 2, single_pass=True) as dataset:
        insert_numbers(server.address, "queue", range(5, 8))
        assert [first_numbers(batch) for batch in dataset] == [[0, 1], [2, 3], [4]]


def test_single_pass_of_a_heap_goes_by_priority(replay_server: StartServer) -> None:
    server = replay_server(rw.TableConfig("heap", 10, sampler="max_heap", max_times_sampled=1))
    with rw.Client(server.address) as client:
        for number in (2, 9, 4, 7):
            client.insert({"n": np.array([number])}, {"heap": float(number)})
    with rw.ReplayDataset(server.address, "heap", 3, single_pass=True) as dataset:
        assert [first_numbers(batch) for batch in dataset] == [[9, 7, 4], [2]]


def test_single_pass_refuses_tables_without_order(replay_server: StartServer) -> None:
    server = replay_server(rw.TableConfig("uniform"), rw.TableConfig("endless", sampler="fifo"))
    with pytest.raises(rw.SpecError, match=r"sampler of `uniform` is 'uniform'"):
        rw.ReplayDataset(server.address, "uniform", 2, single_pass=True)
    with pytest.raises(rw.SpecError, match=r"`max_times_sampled` of `endless` is 0"):
        rw.ReplayDataset(server.address, "endless", 2, single_pass=True)


# Structure.


Step = collections.namedtuple("Step", ["obs", "extras"])  # noqa: PYI024


def test_learner_gets_the_nest_of_the_actor(replay_server: StartServer) -> None:
    server = replay_server(rw.TableConfig("replay"))
    step = Step(obs={"z": np.zeros(3), "a": [np.float32(1), (np.int8(2),)]}, extras=())
    with rw.TrajectoryObserver(server.address, "replay", 2) as observer:
        for _ in range(3):
            observer(step)
    with rw.ReplayDataset(server.address, "replay", 2) as dataset, rw.Client(server.address) as client:
        data = next(dataset).data
        (sample,) = client.sample("replay")
    assert type(data).__name__ == "Step"
    assert data._fields == Step._fields
    assert data.obs["z"].shape == (2, 2, 3)
    assert data.obs["a"][1][0].dtype == np.int8
    assert data.extras == ()
    assert sample.data.obs["z"].shape == (2, 3)


def test_trajectory_comes_back_as_ours_and_a_mask_beside_it(replay_server: StartServer) -> None:
    server = replay_server(rw.TableConfig("replay"))
    step = rw.Trajectory(np.int32(1), np.zeros(4), np.int64(0), (), np.int32(1), np.float32(0), np.float32(1))
    with rw.TrajectoryObserver(server.address, "replay", 2, mask=True) as observer:
        for _ in range(3):
            observer(step)
    with rw.ReplayDataset(server.address, "replay", 2) as dataset:
        trajectory, mask = next(dataset).data
    assert isinstance(trajectory, rw.Trajectory)
    assert trajectory.observation.shape == (2, 2, 4)
    assert mask.all()


def test_actor_that_differs_is_refused_with_the_leaf(replay_server: StartServer) -> None:
    server = replay_server(rw.TableConfig("replay"))
    write(server.address, "replay", 8)
    observer = rw.TrajectoryObserver(server.address, "replay", 4)
    with pytest.raises(rw.StructureError, match=r"leaf `b`: float64 \(2,\), but table `replay` was .* float32 \(2,\)"):
        observer({"a": np.int64(0), "b": np.zeros(2)})
    with pytest.raises(rw.StructureError, match=r"leaf `b`: is missing"):
        observer({"a": np.int64(0)})
    observer.close()
    with rw.Client(server.address) as client:
        assert client.server_info()["replay"].current_size == 5
        client.reset("replay")
        with rw.TrajectoryObserver(server.address, "replay", 1) as observer:
            observer({"a": np.float32(0)})
        assert client.spec_of("replay") == {"a": ArraySpec((), np.dtype(np.float32))}


def test_structures_of_many_tables_are_kept_apart(replay_server: StartServer) -> None:
    names = [f"t{i}" for i in range(12)]
    server = replay_server(*map(rw.TableConfig, names))
    with rw.Client(server.address) as client:
        for i, name in enumerate(names):
            client.store_spec(name, {f"leaf{i}": ArraySpec((i,), np.dtype(np.int64))})
        assert [client.spec_of(name) for name in names] == [
            {f"leaf{i}": ArraySpec((i,), np.dtype(np.int64))} for i in range(len(names))
        ]
        assert list(client.server_info()) == names or set(client.server_info()) == set(names)
        assert len({spec_key(name) for name in names}) == len(names)
        assert SPECS_TABLE not in client.server_info()


def test_signature_of_the_table_counts(replay_server: StartServer) -> None:
    signature = {"n": ArraySpec((None,), np.dtype(np.int64))}
    server = replay_server(rw.TableConfig("typed", signature=signature))
    insert_numbers(server.address, "typed", [7])
    with rw.ReplayDataset(server.address, "typed", 1) as dataset:
        np.testing.assert_array_equal(next(dataset).data["n"], [[7]])


# Time-outs name the cause.


def test_empty_table_is_named(replay_server: StartServer) -> None:
    server = replay_server(rw.TableConfig("replay", rate_limiter=rw.MinSize(5)))
    with rw.ReplayDataset(server.address, "replay", 2, timeout_s=0.3) as dataset:
        with pytest.raises(rw.ReplayTimeoutError, match=r"no batch within 0.3 s.*is empty.*waits for 5 more"):
            next(dataset)
        insert_numbers(server.address, "replay", range(3))
        with pytest.raises(rw.ReplayTimeoutError, match=r"has 3 items.*waits for 2 more"):
            next(dataset)
        insert_numbers(server.address, "replay", range(2))
        assert len(first_numbers(next(dataset))) == 2
    with rw.Client(server.address) as client:
        client.reset("replay")
        with pytest.raises(rw.ReplayTimeoutError, match=r"1 of 1 samples.*is empty"):
            next(client.sample("replay", 1, timeout_s=0.3))


def test_rate_limiter_that_waits_for_inserts_is_named(replay_server: StartServer) -> None:
    limiter = rw.SampleToInsertRatio(2.0, 2, (-1, 100))
    server = replay_server(rw.TableConfig("replay", rate_limiter=limiter))
    insert_numbers(server.address, "replay", range(2))
    with rw.ReplayDataset(server.address, "replay", 4, timeout_s=0.5, max_in_flight_batches=1) as dataset:
        next(dataset)
        # 2 x 2 - 5 = -1: the fifth sample was let out, each two more need one more insert.
        with pytest.raises(
            rw.ReplayTimeoutError, match=r"1 of 4 samples have come.*waits for 1 more inserts.*min_diff -1"
        ):
            next(dataset)


def test_unknown_table_is_refused_at_once(replay_server: StartServer) -> None:
    with pytest.raises(rw.StructureError, match=r"table `nothing` is not on the server .*`queue`"):
        rw.ReplayDataset(replay_server(QUEUE).address, "nothing", 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size"),
        ({"max_in_flight_batches": 0}, "max_in_flight_batches"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"on_timeout": "wait"}, "on_timeout"),
        ({"collate": "stack"}, "collate"),
        ({"num_steps": 0}, "num_steps"),
        ({"max_cache_bytes": 0}, "max_cache_bytes"),
    ],
)
def test_arguments_that_can_never_work_are_refused(
    replay_server: StartServer, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(rw.SpecError, match=message):
        rw.ReplayDataset(replay_server(QUEUE).address, "queue", **{"batch_size": 1, **options})


# Servers that go, and come back.


def test_restart_of_the_server_is_survived(lone_server: StartServer) -> None:
    server = lone_server(QUEUE)
    insert_numbers(server.address, "queue", [1, 2])
    with rw.ReplayDataset(server.address, "queue", 2) as dataset:
        assert first_numbers(next(dataset)) == [1, 2]
        server.process.kill()
        dataset.timeout_s = 1.0
        with pytest.raises(rw.ServerUnavailableError, match=r"has been gone for"):
            next(dataset)
        server.process.restart()
        insert_numbers(server.address, "queue", [3, 4])
        dataset.timeout_s = 30.0
        assert first_numbers(next(dataset)) == [3, 4]
        stats = dataset.stats()
        assert stats.reconnects >= 1
        assert stats.server_restarts == 1


def test_paused_server_is_named(lone_server: StartServer) -> None:
    server = lone_server(QUEUE)
    with rw.ReplayDataset(server.address, "queue", 2, timeout_s=0.5) as dataset:
        server.process.pause()
        with pytest.raises(rw.ReplayTimeoutError, match=r"did not answer"):
            next(dataset)
        server.process.resume()


def test_batch_outlasts_a_server_that_cannot_tell_its_structure(lone_server: StartServer) -> None:
    server = lone_server(QUEUE)
    insert_numbers(server.address, "queue", [1, 2])
    with rw.ReplayDataset(server.address, "queue", 2) as dataset:
        assert eventually(lambda: dataset.stats().ready_samples == 2)
        server.process.kill()
        dataset.timeout_s = 1.0
        with pytest.raises(rw.ServerUnavailableError):
            next(dataset)
        server.process.restart()
        dataset.timeout_s = 30.0
        assert first_numbers(next(dataset)) == [1, 2]


def test_infinite_time_out_waits(replay_server: StartServer) -> None:
    server = replay_server(QUEUE)
    with rw.ReplayDataset(server.address, "queue", 2, timeout_s=float("inf")) as dataset:
        actor = threading.Timer(0.3, insert_numbers, args=[server.address, "queue", [1, 2]])
        actor.start()
        assert first_numbers(next(dataset)) == [1, 2]
        actor.join()


def test_close_waits_for_no_server_that_is_gone(lone_server: StartServer) -> None:
    server = lone_server(QUEUE)
    dataset = rw.ReplayDataset(server.address, "queue", 2, timeout_s=float("inf"))
    server.process.kill()
    dataset.close()
    assert list(dataset) == []


def test_two_servers_are_sampled_in_turn_and_updates_go_to_the_owner(replay_server: StartServer) -> None:
    config = rw.TableConfig("table", 100, sampler=rw.Prioritized(1.0))
    servers = [replay_server(config), replay_server(config)]
    for number, server in enumerate(servers):
        insert_numbers(server.address, "table", [number] * 3)
    addresses = [server.address for server in servers]
    with rw.Client(addresses) as client:
        assert client.server_info()["table"].current_size == 6
        with rw.ReplayDataset(client, "table", 4) as dataset:
            batches = [next(dataset) for _ in range(4)]
            seen = {batch.info.server: set(first_numbers(batch)) for batch in batches}
            assert seen == {addresses[0]: {0}, addresses[1]: {1}}
            for batch in batches:
                dataset.update_priorities(batch.info.keys, np.full(4, 5.0))
            dataset.flush_priorities()
            assert dataset.stats().priority_updates == len(
                {key for batch in batches for key in batch.info.keys.tolist()}
            )
        samples = list(client.sample("table", 20))
        touched = {key for batch in batches for key in batch.info.keys.tolist()}
        assert {sample.info.priority for sample in samples if sample.info.key in touched} <= {5.0}
        assert {int(sample.data[0][0]) for sample in samples} == {0, 1}
        client.reset("table")
        assert client.server_info()["table"].current_size == 0
        with pytest.raises(rw.SpecError, match=r"this is for a client of one server"):
            rw.TrajectoryObserver(client, "table", 2)


def test_samples_of_several_servers_share_one_time_out(replay_server: StartServer) -> None:
    addresses = [replay_server(rw.TableConfig("table")).address for _ in range(2)]
    with rw.Client(addresses) as client:
        for _ in addresses:
            client.insert(np.zeros(1), {"table": 1.0})
        samples = client.sample("table", 2, timeout_s=3.0)
        next(samples)
        time.sleep(3.0)  # until the time is up, which began before
        with pytest.raises(rw.ReplayTimeoutError, match=r"1 samples did not come within 3.0 s"):
            next(samples)


# Priorities.


def test_priorities_are_set_without_waiting(replay_server: StartServer) -> None:
    server = replay_server(rw.TableConfig("table", 100, sampler=rw.Prioritized(1.0)))
    insert_numbers(server.address, "table", range(4))
    with rw.ReplayDataset(server.address, "table", 8, max_in_flight_batches=1) as dataset:
        info = next(dataset).info
        np.testing.assert_allclose(info.importance_weights(0.5), 1.0)
        key = int(info.keys[0])
        dataset.update_priorities(info.keys, np.where(info.keys == key, 3.0, 1.0))
        dataset.flush_priorities()
        with rw.Client(server.address) as client:
            samples = [sample.info for sample in client.sample("table", 200)]
        assert {sample.priority for sample in samples if sample.key == key} == {3.0}
        assert {round(sample.probability, 6) for sample in samples if sample.key == key} == {0.5}
        for keys, priorities in (([1], [-1.0]), ([1], [float("nan")]), ([1, 2], [1.0]), ([1.5], [1.0])):
            with pytest.raises(rw.SpecError):
                dataset.update_priorities(keys, priorities)
    with pytest.raises(rw.ClosedError):
        dataset.update_priorities([1], [1.0])
