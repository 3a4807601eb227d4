"""What a batch is made of: items of different lengths, and the nest that the actor wrote."""

from __future__ import annotations

import collections
from typing import Any

import numpy as np
import pytest
from kinds import contents
from numbered import QUEUE, insert_numbers, write_steps
from server_process import StartServer

import reverb_writer as rw
from reverb_writer.protocol.signatures import ArraySpec

pytestmark = contents


# Items of different lengths.


@pytest.fixture
def ragged(replay_server: StartServer) -> str:
    server = replay_server(QUEUE)
    with rw.Client(server.address) as client:
        for length in (2, 1, 3):
            client.insert({"x": np.arange(1, 1 + length), "y": np.ones((length, 2), np.float32)}, {"queue": 1.0})
    return server.address


def test_different_lengths_are_an_error_that_tells_what_to_do(ragged: str) -> None:
    with (
        rw.ReplayDataset(ragged, "queue", 3) as dataset,
        pytest.raises(rw.errors.StructureError, match=r"1 to 3 rows.*'pad'"),
    ):
        next(dataset)


def test_pad_gives_zeros_and_a_mask(ragged: str) -> None:
    with rw.ReplayDataset(ragged, "queue", 3, collate="pad") as dataset:
        (x, y), info = next(dataset)
    np.testing.assert_array_equal(x, [[1, 2, 0], [1, 0, 0], [1, 2, 3]])
    assert info.mask is not None
    np.testing.assert_array_equal(info.mask, [[1, 1, 0], [1, 0, 0], [1, 1, 1]])
    np.testing.assert_array_equal(y, np.repeat(info.mask[..., None], 2, axis=-1))
    assert info.lengths.tolist() == [2, 1, 3]


def test_list_gives_a_nest_a_sample(ragged: str) -> None:
    with rw.ReplayDataset(ragged, "queue", 3, collate="list") as dataset:
        data, _ = next(dataset)
    assert [x.tolist() for x, _ in data] == [[1, 2], [1], [1, 2, 3]]


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


def test_items_of_another_structure_are_left_out_counted_and_named_once(
    replay_server: StartServer, caplog: pytest.LogCaptureFixture
) -> None:
    server = replay_server(rw.TableConfig("replay"))
    write_steps(server.address, "replay", 8)  # items of 4 steps: 5
    with rw.ReplayDataset(server.address, "replay", 8, max_in_flight_batches=1) as dataset:
        assert next(dataset).data.keys() == {"a", "b"}
        with rw.TrajectoryObserver(server.address, "replay", 4) as observer:
            for number in range(10):
                observer({"a": np.int64(number), "b": np.zeros(2)})  # float64, not float32
        for _ in range(20):
            batch = next(dataset)
            assert {name: leaf.dtype for name, leaf in batch.data.items()} == {"a": np.int64, "b": np.float32}
            assert len(batch.info) == 8
        foreign, received = dataset.stats().foreign_items, dataset.stats().received_samples
    assert 20 < foreign < received
    (warning,) = [record.getMessage() for record in caplog.records if "another structure" in record.getMessage()]
    assert "The first item has a int64 (), b float32 (2,); the other one has a int64 (), b float64 (2,)." in warning


def test_client_samples_each_item_as_the_nest_of_its_own_spec(replay_server: StartServer) -> None:
    server = replay_server(QUEUE)
    steps: list[Any] = [{"a": np.int64(0)}, [np.float32(1), np.zeros(2)], {"a": np.int64(2)}, {"b": np.int64(3)}]
    with rw.Client(server.address) as client:
        for step in steps:
            with rw.TrajectoryObserver(client, "queue", 1) as observer:
                observer(step, end_of_episode=True)
        client.insert([np.array([4])], {"queue": 1.0})
        found = [sample.data for sample in client.sample("queue", 5)]
    assert [type(data) for data in found] == [dict, list, dict, dict, tuple]
    assert [data["a"].tolist() for data in (found[0], found[2])] == [[0], [2]]
    assert (found[1][0].tolist(), found[3]["b"].tolist(), found[4][0].tolist()) == ([1], [3], [4])


def test_items_without_a_spec_are_read_beside_those_that_have_one(replay_server: StartServer) -> None:
    server = replay_server(QUEUE)
    with rw.TrajectoryObserver(server.address, "queue", 1) as observer:
        observer({"n": np.int64(1)}, end_of_episode=True)
    insert_numbers(server.address, "queue", [2, 3])
    with rw.ReplayDataset(server.address, "queue", 3) as dataset:
        batch = next(dataset)
        assert dataset.stats().foreign_items == 0
    assert batch.data["n"].tolist() == [[1], [2], [3]]


def test_kinds_of_nodes_do_not_make_a_structure_foreign(replay_server: StartServer) -> None:
    server = replay_server(QUEUE)
    for step in ({"pair": (np.int64(1), np.int64(2))}, {"pair": [np.int64(1), np.int64(2)]}):
        with rw.TrajectoryObserver(server.address, "queue", 1) as observer:
            observer(step, end_of_episode=True)
    with rw.ReplayDataset(server.address, "queue", 2) as dataset:
        assert [leaf.tolist() for leaf in next(dataset).data["pair"]] == [[[1], [1]], [[2], [2]]]


def test_samples_keep_their_nest_when_the_table_is_reset_under_running_actors(replay_server: StartServer) -> None:
    server = replay_server(rw.TableConfig("replay"))
    with (
        rw.Client(server.address) as client,
        rw.TrajectoryObserver(server.address, "replay", 2, chunk_length=2) as observer,
        rw.ReplayDataset(server.address, "replay", 2, max_in_flight_batches=1) as dataset,
    ):
        for first in range(0, 60, 20):
            for number in range(first, first + 20):
                observer({"n": np.int64(number)}, end_of_episode=number % 10 == 9)
            observer.flush()
            assert next(dataset).data["n"].shape == (2, 2)
            assert next(client.sample("replay")).data["n"].shape == (2,)
            client.reset("replay")
        observer({"n": np.int64(60)})
        observer({"n": np.int64(61)})
        observer.flush()
        assert next(client.sample("replay")).data["n"].tolist() == [60, 61]
        with rw.ReplayDataset(server.address, "replay", 1) as another:
            assert next(another).data["n"].tolist() == [[60, 61]]


def test_time_out_names_items_of_another_structure(replay_server: StartServer) -> None:
    server = replay_server(rw.TableConfig("replay"))
    with rw.Client(server.address) as client:
        client.insert({"n": np.zeros(1)}, {"replay": 1.0}, spec={"n": ArraySpec((), np.dtype(float))})
        with rw.ReplayDataset(server.address, "replay", 1, max_in_flight_batches=1, timeout_s=3) as dataset:
            next(dataset)
            client.reset("replay")
            client.insert({"m": np.zeros(1)}, {"replay": 1.0}, spec={"m": ArraySpec((), np.dtype(float))})
            with pytest.raises(rw.errors.ReplayTimeoutError, match="of another structure were left out"):  # noqa: PT012
                for _ in range(10):  # those that were on their way come first
                    next(dataset)


def test_signature_of_the_table_counts(replay_server: StartServer) -> None:
    signature = {"n": ArraySpec((None,), np.dtype(np.int64))}
    server = replay_server(rw.TableConfig("typed", signature=signature))
    insert_numbers(server.address, "typed", [7])
    with rw.ReplayDataset(server.address, "typed", 1) as dataset:
        np.testing.assert_array_equal(next(dataset).data["n"], [[7]])
