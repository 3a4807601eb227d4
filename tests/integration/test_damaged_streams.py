"""Messages that cannot be read, from something between a learner and its server: an error each, and reading goes on."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from numbered import QUEUE, first_numbers, insert_numbers
from relay import Relay
from server_process import StartServer
from waiting import eventually

import reverb_writer as rw

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
    with Relay(server.address, damage_first(2)) as relay, rw.ReplayDataset(relay.address, "replay", 4) as dataset:
        for _ in range(2):
            with pytest.raises(rw.errors.FormatError, match="not a SampleStreamResponse"):
                next(dataset)
        for _ in range(5):
            assert set(first_numbers(next(dataset))) <= {0, 1, 2}
        assert dataset.stats().lost_samples >= 2


def test_damage_without_end_is_told_once_a_call_and_keeps_no_one_busy(replay_server: StartServer) -> None:
    server = replay_server(rw.TableConfig("replay"))
    insert_numbers(server.address, "replay", range(3))
    with Relay(server.address, lambda _: DAMAGED) as relay, rw.ReplayDataset(relay.address, "replay", 4) as dataset:
        for num_told in range(1, 6):
            with pytest.raises(rw.errors.FormatError):
                next(dataset)
            assert relay.num_streams <= num_told + 1
        before = relay.num_streams
        time.sleep(0.5)
        assert relay.num_streams <= before + 1


@pytest.mark.parametrize("num_left", [0, 3])
def test_single_pass_ends_although_a_message_was_damaged(replay_server: StartServer, num_left: int) -> None:
    server = replay_server(QUEUE)
    insert_numbers(server.address, "queue", range(5))
    with (
        Relay(server.address, damage_first(1)) as relay,
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
