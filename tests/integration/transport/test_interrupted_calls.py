"""Ctrl-C at any moment of a call to the server: the client and its server go on as if nothing had been."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from interrupting import EachMoment, await_end_of_threads, interrupted, many_signals
from kinds import both_ways
from numbered import QUEUE, first_numbers, insert_numbers
from reading import Serve
from server_process import HostedServer
from shard_files import ShardFile
from waiting import eventually

import reverb_writer as rw
from reverb_writer.shards.server_set import ShardServer

# An interrupt in a function that Python calls when it deletes something is printed, and has no other effect.
pytestmark = [both_ways, pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")]

_AGAIN_WITHIN_S = 30.0  # a call that hangs fails; one on a busy machine does not
_STEP = {"n": np.zeros(1, np.int64)}


def insert(client: rw.Client) -> None:
    client.insert(_STEP, {"replay": 1.0}, _AGAIN_WITHIN_S)


CALLS: dict[str, Callable[[rw.Client], Any]] = {
    "server_info": lambda client: client.server_info(_AGAIN_WITHIN_S),
    "insert": insert,
    "sample": lambda client: list(client.sample("replay", 2, timeout_s=_AGAIN_WITHIN_S)),
    "mutate_priorities": lambda client: client.mutate_priorities("replay", {1: 1.0}),
}


@pytest.fixture
def client(server: HostedServer) -> Iterator[rw.Client]:
    with rw.Client(server.address) as client:
        insert(client)
        yield client


@pytest.mark.parametrize("name", CALLS)
def test_client_goes_on_after_an_interrupt_at_any_moment_of_a_call(client: rw.Client, name: str) -> None:
    call, interrupt = CALLS[name], EachMoment(None if name == "sample" else 100)
    for _ in interrupt:
        interrupt(lambda: call(client))
        if name == "sample":  # none that was on its way takes the place of another
            assert len(call(client)) == 2
        else:
            client.server_info(_AGAIN_WITHIN_S)
    assert interrupt.moment > 20
    call(client)


def test_time_out_of_an_insert_comes_although_signals_arrive_at_that_moment(serve: Serve) -> None:
    client = serve(rw.TableConfig.queue("replay", 1))
    insert(client)
    with many_signals():
        for _ in range(100):
            with pytest.raises(rw.errors.ReplayTimeoutError):
                client.insert(_STEP, {"replay": 1.0}, 0.05)


def is_closed(shard: ShardServer) -> bool:
    try:
        shard.channel.check_usable()
    except rw.errors.ClosedError:
        return True
    return False


def test_close_after_an_interrupt_at_any_moment_of_it_closes_every_connection() -> None:
    interrupt = EachMoment()
    for _ in interrupt:
        client = rw.Client(["localhost:1", "localhost:2"])
        assert not any(map(is_closed, client.shards))
        interrupt(client.close)
        client.close()
        assert all(map(is_closed, client.shards))
    assert interrupt.moment > 10


def test_dataset_follows_its_target_after_an_interrupt_at_any_moment(serve: Serve, tmp_path: Path) -> None:
    clients = [serve(rw.TableConfig("replay", 1, "fifo")) for _ in range(3)]
    for number, client in enumerate(clients):
        client.insert([np.full(1, number)], {"replay": 1.0})
    file = ShardFile(tmp_path, clients[0].address)
    interrupt = EachMoment(8)
    with (
        rw.Client(file.target) as client,
        rw.ReplayDataset(client, "replay", 1, timeout_s=_AGAIN_WITHIN_S, max_in_flight_batches=1) as dataset,
    ):
        for moment in interrupt:
            there = [1, 2] if moment % 2 else [0]
            file.tell(client, *(clients[number].address for number in there))
            interrupt(lambda: next(dataset))
            missing = set(there)

            def has_all(missing: set[int] = missing) -> bool:
                missing -= {int(next(dataset).data[0][0, 0])}
                return not missing

            eventually(has_all, patience_s=_AGAIN_WITHIN_S)
    assert interrupt.moment > 20


def test_interrupt_at_any_moment_of_a_take_loses_no_room_for_samples(serve: Serve) -> None:
    address = serve(QUEUE).address
    interrupt = EachMoment(10)
    # Room for 8 samples; and each chunk evicts another one.
    with rw.ReplayDataset(address, "queue", 4, max_cache_bytes=1, timeout_s=_AGAIN_WITHIN_S) as dataset:
        iter(dataset)  # it begins to fetch
        for _ in interrupt:
            insert_numbers(address, "queue", range(3))
            eventually(lambda: dataset.stats().ready_samples == 3)
            interrupt(dataset.poll)
            dataset.poll()
            assert dataset.stats().ready_samples == 0
        insert_numbers(address, "queue", range(8))
        eventually(lambda: dataset.stats().ready_samples == 8)
        assert first_numbers(next(dataset)) + first_numbers(next(dataset)) == list(range(8))
    assert interrupt.moment > 20


def test_poll_brings_new_weights_after_an_interrupt_at_any_moment(serve: Serve) -> None:
    client = serve(rw.TableConfig("weights", 1))
    interrupt, seen = EachMoment(), None
    with rw.Variables(client, "weights") as learner, rw.Variables(client, "weights", interval_s=0.0) as actor:

        def poll() -> int:
            nonlocal seen
            seen = actor.poll(seen)
            return 0 if seen is None else int(seen["version"])

        for moment in interrupt:
            learner.publish({"version": np.int64(moment)})
            seen = None
            for _ in range(3):  # it begins to ask, waits, and takes the answer
                interrupt(poll)
                time.sleep(0.01)
            eventually(lambda moment=moment: poll() == moment, pause_s=0.001, patience_s=_AGAIN_WITHIN_S)  # type: ignore[misc]  # a default
    assert interrupt.moment > 10


def test_priorities_are_set_after_an_interrupt_at_any_moment(client: rw.Client) -> None:
    client.reset("replay")
    insert(client)
    (sample,) = client.sample("replay")
    interrupt = EachMoment()
    with rw.ReplayDataset(client, "replay", 1, timeout_s=_AGAIN_WITHIN_S) as dataset:
        for moment in interrupt:
            dataset.flush_priorities(_AGAIN_WITHIN_S)
            interrupt(functools.partial(dataset.update_priorities, [sample.info.key], [1.0 + moment]))
            dataset.flush_priorities(_AGAIN_WITHIN_S)
    assert interrupt.moment > 20


OPEN: dict[str, Callable[[rw.Client], Any]] = {
    "observer": lambda client: rw.TrajectoryObserver(client, "replay", 1),
    "dataset": lambda client: rw.ReplayDataset(client, "replay", 1),
    "variables": lambda client: rw.Variables(client, "weights"),
    "address": lambda client: rw.TrajectoryObserver(client.address, "replay", 1),
}


@pytest.mark.parametrize("kind", OPEN)
def test_interrupt_at_any_moment_of_an_opening_leaves_no_lock_and_no_thread(serve: Serve, kind: str) -> None:
    client = serve(rw.TableConfig("replay", 1000), rw.TableConfig("weights", 1))
    interrupt = EachMoment(30)
    opened: list[Any] = []
    insert(client)
    for moment in interrupt:
        interrupt(lambda: opened.append(OPEN[kind](client)))
        while opened:
            one = opened.pop()
            interrupted(one.close, 1 + moment // 2)
            one.close()
        if moment % 5 == 0:
            OPEN[kind](client).close()
    assert interrupt.moment > 20
    client.close()
    await_end_of_threads(_AGAIN_WITHIN_S)
