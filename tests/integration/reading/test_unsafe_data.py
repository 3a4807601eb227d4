"""Items that nobody should decode, and messages that cannot be read: an error for that sample alone, or a count."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from call_forwarder import CallForwarder
from numbered import QUEUE, first_numbers, insert_damaged, insert_numbers, insert_variant, write_steps
from server_process import StartServer
from waiting import eventually

import reverb_writer as rw


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


# Messages that something between a learner and its server has damaged.


DAMAGED = b"\xff" * 8


def damage_first(num_messages: int) -> Callable[[bytes], bytes]:
    """Damage the first messages of all streams together."""
    left = [DAMAGED] * num_messages

    def change(message: bytes) -> bytes:
        return left.pop() if left else message

    return change


def test_damaged_messages_are_an_error_each_and_reading_goes_on(replay_server: StartServer) -> None:
    server = replay_server(rw.TableConfig("replay"))
    insert_numbers(server.address, "replay", range(3))
    with (
        CallForwarder(server.port, change=damage_first(2)) as relay,
        rw.ReplayDataset(relay.address, "replay", 4) as dataset,
    ):
        for _ in range(2):
            with pytest.raises(rw.errors.FormatError, match="not a SampleStreamResponse"):
                next(dataset)
        for _ in range(5):
            assert set(first_numbers(next(dataset))) <= {0, 1, 2}
        assert dataset.stats().lost_samples >= 2


def test_damaged_messages_are_skipped_and_counted_too_if_asked_for(replay_server: StartServer) -> None:
    server = replay_server(rw.TableConfig("replay"))
    insert_numbers(server.address, "replay", range(3))
    with (
        CallForwarder(server.port, change=damage_first(2)) as relay,
        rw.ReplayDataset(relay.address, "replay", 4, skip_unsafe=True) as dataset,
    ):
        for batch in itertools.islice(dataset, 5):
            assert set(first_numbers(batch)) <= {0, 1, 2}
        assert dataset.stats().skipped_samples == 2
        assert dataset.stats().lost_samples >= 2


def test_messages_that_are_skipped_without_end_are_told_at_the_time_out(replay_server: StartServer) -> None:
    server = replay_server(rw.TableConfig("replay"))
    insert_numbers(server.address, "replay", range(3))
    with (
        CallForwarder(server.port, change=lambda _: DAMAGED) as relay,
        rw.ReplayDataset(relay.address, "replay", 4, skip_unsafe=True, timeout_s=1.0) as dataset,
        pytest.raises(rw.errors.ReplayTimeoutError, match=r"0 of 4 samples have arrived. \d+ were unsafe or damaged"),
    ):
        next(dataset)


def test_damage_without_end_is_told_once_a_call_and_keeps_no_one_busy(replay_server: StartServer) -> None:
    server = replay_server(rw.TableConfig("replay"))
    insert_numbers(server.address, "replay", range(3))
    with (
        CallForwarder(server.port, change=lambda _: DAMAGED) as relay,
        rw.ReplayDataset(relay.address, "replay", 4) as dataset,
    ):
        for num_told in range(1, 6):
            with pytest.raises(rw.errors.FormatError):
                next(dataset)
            assert relay.verbs.count("SampleStream") <= num_told + 1
        before = relay.verbs.count("SampleStream")
        time.sleep(0.5)
        assert relay.verbs.count("SampleStream") <= before + 1


@pytest.mark.parametrize("num_left", [0, 3])
def test_single_pass_ends_although_a_message_was_damaged(replay_server: StartServer, num_left: int) -> None:
    server = replay_server(QUEUE)
    insert_numbers(server.address, "queue", range(5))
    with (
        CallForwarder(server.port, change=damage_first(1)) as relay,
        rw.Client(server.address) as client,
        rw.ReplayDataset(relay.address, "queue", 2, single_pass=True, max_in_flight_batches=1 + num_left) as dataset,
    ):
        iter(dataset)  # begins to fetch
        eventually(lambda: dataset.stats().lost_samples > 0)
        told: list[str] = []
        found: list[int] = []
        while (batch := take(dataset, told)) is not None:
            found += first_numbers(batch)
        lost = dataset.stats().lost_samples
        assert len(told) == 1
        assert found == list(range(lost, 5))
        assert client.server_info()["queue"].current_size == 0


def take(dataset: rw.ReplayDataset, told: list[str]) -> rw.Batch | None:
    """Return the next batch; None at the end."""
    while True:
        try:
            return next(dataset, None)
        except rw.errors.FormatError as error:
            told.append(str(error))
