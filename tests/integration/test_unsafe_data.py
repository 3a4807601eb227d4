"""Items that nobody should decode, in tables of real servers: a typed error for that sample alone, or a count."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numbered import insert_damaged, insert_variant, write_steps
from server_process import StartServer
from waiting import eventually

import reverb_writer as rw

QUEUE = rw.TableConfig("queue", 1000, sampler="fifo", max_times_sampled=1)


@pytest.fixture
def address(replay_server: StartServer) -> str:
    """A queue of 1, a variant, 2, 3."""
    server = replay_server(QUEUE)
    with rw.Client(server.address) as client:
        client.insert([np.array([1])], {"queue": 1.0})
        insert_variant(client, "queue")
        client.insert([np.array([2])], {"queue": 1.0})
        client.insert([np.array([3])], {"queue": 1.0})
    return server.address


def numbers(batch: Any) -> list[int]:
    return [int(number) for number in batch.data[0][:, 0]]


def test_variant_is_refused_and_the_next_call_goes_on(address: str) -> None:
    with rw.ReplayDataset(address, "queue", 3) as dataset:
        with pytest.raises(rw.errors.UnsafeDataError, match="DT_VARIANT"):
            next(dataset)
        assert numbers(next(dataset)) == [1, 2, 3]
        assert dataset.stats().skipped_samples == 0


def test_variant_is_skipped_and_counted_if_asked_for(address: str) -> None:
    with rw.ReplayDataset(address, "queue", 3, skip_unsafe=True) as dataset:
        assert numbers(next(dataset)) == [1, 2, 3]
        assert dataset.stats().skipped_samples == 1
        assert dataset.stats().received_samples == 4


def test_damaged_sample_is_skipped_and_counted_too_if_asked_for(replay_server: StartServer) -> None:
    server = replay_server(QUEUE)
    with rw.Client(server.address) as client:
        for number in range(1, 6):
            client.insert([np.array([number])], {"queue": 1.0})
            insert_damaged(client, "queue")
    with rw.ReplayDataset(server.address, "queue", 1, skip_unsafe=True, max_samples=10) as dataset:
        assert [numbers(batch) for batch in dataset] == [[1], [2], [3], [4], [5]]
        assert dataset.stats().skipped_samples == 5


def test_damaged_item_that_would_settle_the_structure_loses_no_other(replay_server: StartServer) -> None:
    """Not even of a queue, whose items come once; and it does not decide what the others look like."""
    server = replay_server(QUEUE)
    with rw.Client(server.address) as client:
        insert_damaged(client, "queue")
    write_steps(server.address, "queue", 4, length=1)
    with rw.ReplayDataset(server.address, "queue", 2, max_samples=5) as dataset:
        with pytest.raises(rw.errors.FormatError):
            next(dataset)
        found = [number for batch in dataset for number in batch.data["a"][:, 0].tolist()]
        stats = dataset.stats()
    assert found == [0, 1, 2, 3]
    assert (stats.received_samples, stats.samples, stats.lost_samples) == (5, 4, 0)


def test_errors_that_nobody_takes_are_bounded_as_samples_are(replay_server: StartServer) -> None:
    server = replay_server(rw.TableConfig("variants", 10))
    with rw.Client(server.address) as client:
        insert_variant(client, "variants")
    with rw.ReplayDataset(server.address, "variants", 2, max_in_flight_batches=3) as dataset:
        iter(dataset)  # begins to fetch
        eventually(lambda: dataset.stats().received_samples >= 6)
        for num_taken in range(1, 9):
            with pytest.raises(rw.errors.UnsafeDataError, match="DT_VARIANT"):
                next(dataset)
            eventually(lambda: dataset.stats().received_samples == 6 + num_taken)  # noqa: B023  # called at once


def test_variants_that_are_skipped_take_no_room_from_others(replay_server: StartServer) -> None:
    server = replay_server(rw.TableConfig("mixed", 10))
    with rw.Client(server.address) as client:
        insert_variant(client, "mixed")
        client.insert([np.array([1])], {"mixed": 1.0})
    with rw.ReplayDataset(server.address, "mixed", 2, max_in_flight_batches=1, skip_unsafe=True) as dataset:
        for _ in range(10):
            assert numbers(next(dataset)) == [1, 1]
        assert dataset.stats().skipped_samples > 2


def test_client_sample_refuses_a_variant(address: str) -> None:
    with rw.Client(address) as client, pytest.raises(rw.errors.UnsafeDataError, match="DT_VARIANT"):
        list(client.sample("queue", 2))


def test_sample_above_the_bound_is_refused(replay_server: StartServer) -> None:
    server = replay_server(QUEUE)
    with rw.Client(server.address) as client:
        client.insert([np.zeros((100, 1000))], {"queue": 1.0})
        client.insert([np.ones((1, 1000))], {"queue": 1.0})
    with rw.ReplayDataset(server.address, "queue", 1, max_sample_bytes=799_999) as dataset:
        with pytest.raises(rw.errors.UnsafeDataError, match="max_"):
            next(dataset)
        assert next(dataset).data[0].shape == (1, 1, 1000)
