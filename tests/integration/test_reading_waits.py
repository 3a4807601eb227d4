"""Batches that do not come: time-outs name their cause; servers that go and come back, and several of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numbered import QUEUE, first_numbers, insert_numbers
from reading import eventually
from server_process import HostedServer

import reverb_writer as rw

StartServer = Callable[..., HostedServer]


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
        with pytest.raises(rw.ServerUnavailableError, match=r"is gone, last heard of .* Start it again"):
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
