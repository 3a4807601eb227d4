"""What a batch is made of: items of different lengths, and the nest that the actor wrote."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numbered import QUEUE, insert_numbers, write_steps
from reverb_writer.protocol.table_specs import SPECS_TABLE, spec_key
from server_process import HostedServer

import reverb_writer as rw
from reverb_writer.protocol.signatures import ArraySpec

StartServer = Callable[..., HostedServer]


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
    write_steps(server.address, "replay", 8)
    observer = rw.TrajectoryObserver(server.address, "replay", 4)
    with pytest.raises(
        rw.StructureError, match=r"leaf `b`: float64 \(2,\), expected float32 \(2,\) .* table `replay` was"
    ):
        observer({"a": np.int64(0), "b": np.zeros(2)})
    with pytest.raises(rw.StructureError, match="Missing: `b`; unexpected: none"):
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
