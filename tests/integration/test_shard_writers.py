"""Observers of several servers: whom each writes to, and how it goes to another one when its own is lost."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from call_forwarder import CallForwarder
from reading import fifo, read_column, spec
from server_process import HostedServer

import reverb_writer as rw
from reverb_writer.client.targets import rank_shards
from reverb_writer.writing import actor_shard

StartServer = Callable[..., HostedServer]
PATIENCE_S = 2.0  # longer than a busy machine keeps a server from confirming


@pytest.fixture(autouse=True)
def busy_servers_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a server that a busy machine delays count as one that answers."""
    monkeypatch.setattr(actor_shard, "_ANSWER_WITHIN_S", 20.0)


def shards_for(actor: str, servers: Sequence[HostedServer]) -> list[HostedServer]:
    """Return the servers in the order in which an actor chooses them."""
    left, order = {server.address: server for server in servers}, []
    while left:
        order.append(left.pop(rw.choose_shard(actor, list(left))))
    return order


def episode(observer: Any, first: int, num_steps: int = 3) -> None:
    for number in range(first, first + num_steps):
        observer({"n": np.int64(number)}, end_of_episode=number == first + num_steps - 1)


def write_until_it_moves(observer: Any, first: int, stride: int = 10) -> int:
    """Write episodes, `stride` numbers apart, until the observer has changed its shard; return the next number."""
    before = observer.stats().shard_changes
    while observer.stats().shard_changes == before:
        episode(observer, first)
        first += stride
        time.sleep(0.01)  # the servers need processor time, too
    return first


def numbers(server: HostedServer, table: str = "replay") -> list[list[int]]:
    with rw.Client(server.address, timeout_s=60) as client:
        return read_column(client, table)


def pairs(first: int) -> list[list[int]]:
    """Return the windows of two steps of the episode of three that begins at `first`."""
    return [[first, first + 1], [first + 1, first + 2]]


def test_each_actor_writes_to_the_shard_of_its_id(replay_server: StartServer) -> None:
    servers = [replay_server(fifo("replay")) for _ in range(3)]
    addresses = [server.address for server in servers]
    actors = [f"actor-{number}" for number in range(9)]
    for number, actor in enumerate(actors):
        with rw.TrajectoryObserver(addresses, "replay", 2, actor_id=actor) as observer:
            episode(observer, 10 * number)
            assert rw.choose_shard(actor, addresses) in repr(observer)
    for server in servers:
        mine = [number for number, actor in enumerate(actors) if rw.choose_shard(actor, addresses) == server.address]
        assert sorted(numbers(server)) == [pair for number in mine for pair in pairs(10 * number)]


@pytest.mark.parametrize("resend", [False, True])
def test_actor_goes_on_at_another_shard_when_its_own_is_lost(
    lone_server: StartServer, caplog: pytest.LogCaptureFixture, resend: bool
) -> None:
    servers = [lone_server(fifo("replay")) for _ in range(3)]
    first, second, third = shards_for("actor", servers)
    client = rw.Client([server.address for server in servers])
    options: Any = {"actor_id": "actor", "patience_s": PATIENCE_S, "resend_unconfirmed": resend}
    with client, rw.TrajectoryObserver(client, "replay", 2, **options) as observer:
        episode(observer, 0)
        observer.flush()
        first.process.kill()
        written = write_until_it_moves(observer, 10)  # at the first episode's end after the patience
        episode(observer, written)
        observer.flush()
        stats = observer.stats()
    lost = [pair for number in range(10, written, 10) for pair in pairs(number)]
    assert (stats.shard_changes, stats.items) == (1, 2 + len(lost) + 2)
    if resend:
        assert (stats.unconfirmed_items, stats.dropped_items, stats.resent_items) == (0, 0, len(lost))
        assert numbers(second) == [*lost, *pairs(written)]
    else:
        assert (stats.unconfirmed_items, stats.dropped_items, stats.resent_items) == (len(lost), len(lost), 0)
        assert numbers(second) == pairs(written)
    assert stats.items == stats.acknowledged_items + stats.dropped_items
    assert numbers(third) == []
    said = [record.getMessage() for record in caplog.records if "items were unconfirmed" in record.getMessage()]
    assert len(said) == 1
    assert f" {len(lost)} items were unconfirmed: they are {'sent again' if resend else 'dropped'}" in said[0]


def test_actor_in_mid_episode_stays_and_its_time_out_is_as_ever(lone_server: StartServer) -> None:
    servers = [lone_server(fifo("replay")) for _ in range(2)]
    first, second = shards_for("actor", servers)
    client = rw.Client([server.address for server in servers])
    options: Any = {"actor_id": "actor", "patience_s": PATIENCE_S, "max_in_flight_items": 4, "timeout_s": 5.0}
    with client, rw.TrajectoryObserver(client, "replay", 2, chunk_length=1, **options) as observer:
        observer({"n": np.int64(0)}, end_of_episode=False)
        observer({"n": np.int64(1)}, end_of_episode=False)
        observer.flush()
        first.process.kill()
        with pytest.raises(rw.ServerUnavailableError, match="items unconfirmed after"):
            observer.extend({"n": np.arange(2, 5000)})
        assert observer.stats().shard_changes == 0
        observer.reset(discard=True)  # a boundary
        assert observer.stats().shard_changes == 1
        episode(observer, 10_000)
        observer.flush()
    assert numbers(second) == pairs(10_000)


def test_actor_that_waits_for_room_between_episodes_goes_on_elsewhere(lone_server: StartServer) -> None:
    """The window in flight is full at the end of an episode: the next step would wait for the lost shard."""
    servers = [lone_server(fifo("replay")) for _ in range(2)]
    first, second = shards_for("actor", servers)
    client = rw.Client([server.address for server in servers])
    options: Any = {"actor_id": "actor", "patience_s": 1.0, "max_in_flight_items": 2}
    with client, rw.TrajectoryObserver(client, "replay", 2, **options) as observer:
        episode(observer, 0)
        observer.flush()
        first.process.kill()
        for number in range(10, 60, 10):
            episode(observer, number)
        observer.flush()
        stats = observer.stats()
    assert stats.shard_changes == 1
    found = numbers(second)
    assert found == [pair for number in range(10, 60, 10) for pair in pairs(number)][-len(found) :]
    assert len(found) == 10 - stats.unconfirmed_items
    assert found


def test_actor_that_waits_for_room_looks_again_after_it_has_found_no_other_shard(
    lone_server: StartServer, caplog: pytest.LogCaptureFixture
) -> None:
    """The other shard is up again in the middle of the wait, after the first look for it."""
    servers = [lone_server(fifo("replay")) for _ in range(2)]
    first, second = shards_for("actor", servers)
    client = rw.Client([server.address for server in servers])
    options: Any = {"actor_id": "actor", "patience_s": PATIENCE_S, "max_in_flight_items": 2, "timeout_s": 60}

    def restart_once_it_was_looked_for() -> None:
        while not any("no other one takes inserts; staying" in record.getMessage() for record in caplog.records):
            time.sleep(0.05)
        second.process.restart()

    with client, rw.TrajectoryObserver(client, "replay", 2, **options) as observer:
        episode(observer, 0)
        observer.flush()
        first.process.kill()
        second.process.kill()
        restarter = threading.Thread(target=restart_once_it_was_looked_for)
        restarter.start()
        for number in range(10, 40, 10):
            episode(observer, number)
        restarter.join()
        observer.flush()
        stats = observer.stats()
    assert (stats.shard_changes, stats.unconfirmed_items) == (1, 2)
    assert numbers(second) == [*pairs(20), *pairs(30)]


def test_actor_goes_back_to_its_shard_and_nothing_is_lost_by_it(lone_server: StartServer) -> None:
    servers = [lone_server(fifo("replay")) for _ in range(2)]
    first, second = shards_for("actor", servers)
    client = rw.Client([server.address for server in servers])
    first.process.kill()
    with client, rw.TrajectoryObserver(client, "replay", 2, actor_id="actor", patience_s=PATIENCE_S) as observer:
        episode(observer, 0)
        assert second.address in repr(observer)
        first.process.restart()
        written = write_until_it_moves(observer, 10)
        episode(observer, written)
        observer.flush()
        stats = observer.stats()
    assert (stats.shard_changes, stats.dropped_items, stats.unconfirmed_items) == (1, 0, 0)
    assert numbers(second) == [pair for number in range(0, written, 10) for pair in pairs(number)]
    assert numbers(first) == pairs(written)


def test_shard_whose_rate_limiter_blocks_is_left_for_one_that_takes_inserts(replay_server: StartServer) -> None:
    """And while all of them block, the actor stays, and nothing is dropped."""
    servers = [replay_server(rw.TableConfig.queue("replay", 4)) for _ in range(2)]
    first, second = shards_for("actor", servers)
    client = rw.Client([server.address for server in servers])
    with client, rw.TrajectoryObserver(client, "replay", 2, actor_id="actor", patience_s=PATIENCE_S) as observer:
        written = write_until_it_moves(observer, 0)
        before = observer.stats().unconfirmed_items
        assert before == 2 * (written // 10) - 4
        while observer.stats().acknowledged_items < 8:
            episode(observer, written)
            written += 10
        for number in range(written, written + 1000, 10):
            episode(observer, number)
        assert observer.stats().unconfirmed_items == before
        for server in (second, second, second, first):
            numbers(server)
        assert observer.stats().shard_changes == 1
        with pytest.raises(rw.ReplayTimeoutError):
            observer.close(0.1)


def test_shard_whose_learner_is_slow_is_not_left(replay_server: StartServer) -> None:
    """A table serves inserts in their order: while those of others are taken, ours are not lost."""
    servers = [replay_server(rw.TableConfig.queue("replay", 4)) for _ in range(2)]
    first, second = shards_for("actor", servers)
    addresses = [server.address for server in servers]
    done = threading.Event()

    def learn() -> None:
        with rw.Client(first.address, timeout_s=60) as client:
            while not done.wait(0.02):
                if client.server_info()["replay"].current_size:
                    next(client.sample("replay"))

    learner = threading.Thread(target=learn)
    with (
        rw.TrajectoryObserver(first.address, "replay", 1, timeout_s=60) as other,
        rw.TrajectoryObserver(addresses, "replay", 1, actor_id="actor", patience_s=1.0, timeout_s=60) as observer,
    ):
        for number in range(150):
            episode(other, number, 1)
        learner.start()
        episode(observer, 1000, 1)
        written = 1001
        while observer.stats().acknowledged_items == 0:
            time.sleep(0.05)
            episode(observer, written, 1)
            written += 1
        assert observer.stats().shard_changes == 0
        other.flush()
        observer.flush()
        assert observer.stats().dropped_items == 0
        done.set()
        learner.join()
    assert numbers(second) == []


def test_sequence_observer_ends_its_windows_where_it_changes_the_shard(lone_server: StartServer) -> None:
    servers = [lone_server(fifo("replay")) for _ in range(2)]
    first, second = shards_for("actor", servers)
    client = rw.Client([server.address for server in servers])
    with client, rw.SequenceObserver(client, "replay", 2, actor_id="actor", patience_s=PATIENCE_S) as observer:
        episode(observer, 0)
        observer.flush()
        first.process.kill()
        written = write_until_it_moves(observer, 3, stride=3)
        episode(observer, written)
        episode(observer, written + 3)
        observer.flush()
        stats = observer.stats()
    assert numbers(second) == [[number, number + 1] for number in range(written, written + 5)]
    assert stats.unconfirmed_items == (written - 1) - 2  # of all windows of the steps before, two were confirmed
    assert stats.steps == written + 6


def test_episode_observer_whose_shard_is_lost_before_its_first_step_writes_all_to_another(
    lone_server: StartServer,
) -> None:
    servers = [lone_server(fifo("replay")) for _ in range(2)]
    first, second = shards_for("actor", servers)
    client = rw.Client([server.address for server in servers])
    with client, rw.EpisodeObserver(client, "replay", 3, actor_id="actor", patience_s=PATIENCE_S) as observer:
        first.process.kill()
        episode(observer, 0)
        episode(observer, 10)
        observer.flush()
        assert (observer.stats().shard_changes, observer.stats().dropped_items) == (1, 0)
    assert numbers(second) == [[0, 1, 2], [10, 11, 12]]


def test_environments_of_a_vector_go_on_elsewhere_with_their_next_episodes(
    lone_server: StartServer, caplog: pytest.LogCaptureFixture
) -> None:
    """One whose episode is under way when the observer leaves drops the rest of it, counted."""
    caplog.set_level(logging.INFO)
    servers = [lone_server(fifo("replay")) for _ in range(2)]
    first, second = shards_for("actor", servers)
    client = rw.Client([server.address for server in servers])
    with (
        client,
        rw.VectorObserver(client, "replay", 2, num_envs=2, actor_id="actor", patience_s=PATIENCE_S) as observer,
    ):

        def step(number: int, *last: bool) -> None:
            observer({"n": np.array([number, 1000 + number])}, end_of_episode=np.array(last))

        step(0, False, False)
        observer.flush()
        first.process.kill()
        number = 1
        while not observer.stats().shard_changes:  # environment 0 ends an episode with each step; 1 has one long one
            step(number, True, False)
            number += 1
        before = observer.stats()
        step(number, False, False)  # dropped: of environment 1
        step(number + 1, False, True)  # dropped: of environment 1
        step(number + 2, False, False)
        step(number + 3, True, True)
        observer.flush()
        stats = observer.stats()
    assert sorted(numbers(second)) == [
        *([number + n, number + n + 1] for n in range(3)),
        [1000 + number + 2, 1000 + number + 3],
    ]
    assert stats.steps - before.steps == 8
    with_change = before.dropped_steps.get("lost_shard", 0)  # environment 1's step, if the observer left before it
    assert with_change <= 1
    assert stats.dropped_steps["lost_shard"] - with_change == 2


def test_environment_that_is_reset_as_the_shard_is_lost_writes_its_next_episode(lone_server: StartServer) -> None:
    """The reset waits for room, as another environment is between episodes, and so it finds the shard lost."""
    servers = [lone_server(fifo("replay")) for _ in range(2)]
    first, second = shards_for("actor", servers)
    client = rw.Client([server.address for server in servers])
    options: Any = {"actor_id": "actor", "patience_s": PATIENCE_S, "max_in_flight_items": 1}
    with client, rw.VectorObserver(client, "replay", 2, num_envs=2, **options) as observer:

        def step(number: int, *last: bool) -> None:
            observer({"n": np.array([number, 1000 + number])}, end_of_episode=np.array(last))

        step(0, False, False)
        first.process.kill()
        step(1, True, False)
        observer.reset(env_ids=[1], discard=True)
        assert observer.stats().shard_changes == 1
        step(10, False, False)
        step(11, True, True)
        observer.flush()
        assert "lost_shard" not in observer.stats().dropped_steps
    assert sorted(numbers(second)) == [[10, 11], [1010, 1011]]


def test_bad_options_are_refused(replay_server: StartServer) -> None:
    address = replay_server(fifo("replay")).address
    with pytest.raises(rw.SpecError, match="`patience_s` must be > 0 seconds, got 0"):
        rw.TrajectoryObserver(address, "replay", 2, patience_s=0)
    with pytest.raises(rw.SpecError, match="`actor_id` must be a string that is not empty, or None, got ''"):
        rw.TrajectoryObserver(address, "replay", 2, actor_id="")


def test_no_shard_at_all_is_said_by_name(lone_server: StartServer) -> None:
    servers = [lone_server(fifo("replay")) for _ in range(2)]
    for server in servers:
        server.process.kill()
    addresses = [server.address for server in servers]
    with pytest.raises(rw.ServerUnavailableError, match=r"none of the shards answers: localhost:\d+, localhost:"):
        rw.TrajectoryObserver(addresses, "replay", 2, timeout_s=1.0)


def test_priority_function_that_fails_where_the_stream_of_steps_ends_does_not_keep_the_actor_at_a_lost_shard(
    replay_server: StartServer, tmp_path: Path
) -> None:
    """Its error is raised once, and the window that it fails for is not written."""
    servers = [replay_server(fifo("replay")) for _ in range(2)]
    names = dict(zip("ab", servers, strict=True))
    first, second = rank_shards("actor", names)
    path = tmp_path / "shards"
    path.write_text("\n".join(f"{name} {server.address}" for name, server in names.items()))

    def priority(window: Any) -> float:
        if window["n"][-1] == 0:
            raise ValueError("this window is padded")
        return 1.0

    with (
        rw.Client(f"file:{path}") as client,
        rw.SequenceObserver(client, "replay", 2, 2, priority, end_of_episode="cover", actor_id="actor") as observer,
    ):
        observer.extend({"n": np.arange(1, 3)})
        observer.flush()
        path.write_text(f"{first} {names[first].address} lost\n{second} {names[second].address}")
        client.connections.refresh()
        with pytest.raises(ValueError, match="this window is padded"):
            observer({"n": np.int64(3)}, end_of_episode=True)
        observer.extend({"n": np.arange(4, 6)})
        observer.flush()
        assert (observer.stats().steps, observer.stats().shard_changes, observer.stats().items) == (5, 1, 2)
    assert numbers(names[first]) == [[1, 2]]
    assert numbers(names[second]) == [[4, 5]]


# What all shards have.


def test_spec_of_the_first_step_is_on_all_shards_and_on_one_that_was_down_once_it_is_written(
    lone_server: StartServer,
) -> None:
    tables = (fifo("replay"), rw.TableConfig("other"))
    servers = [lone_server(*tables) for _ in range(3)]
    first, second, third = shards_for("actor", servers)
    third.process.kill()
    addresses = [server.address for server in servers]
    with rw.TrajectoryObserver(addresses, "replay", 2, actor_id="actor") as observer:
        episode(observer, 0)
    for server in (first, second):
        with rw.Client(server.address) as client:
            assert client.spec_of("replay")["n"].dtype == np.int64
    with rw.TrajectoryObserver(second.address, "replay", 2) as other, pytest.raises(rw.StructureError, match="`n`"):
        other({"n": np.float32(1)}, end_of_episode=False)
    third.process.restart()
    actor = next(f"actor-{number}" for number in range(100) if shards_for(f"actor-{number}", servers)[0] is third)
    with rw.TrajectoryObserver(addresses, "replay", 2, actor_id=actor) as observer:
        episode(observer, 0)
    with rw.Client(third.address) as client:
        assert client.spec_of("replay")["n"].dtype == np.int64
    with rw.Client(addresses) as client:
        client.store_spec("other", {"m": spec((3,), np.float64)})
        assert [one.spec_of("other")["m"].shape for one in client.each()] == [(3,)] * 3
        with pytest.raises(rw.StructureError):
            client.store_spec(["replay", "other"], {"m": spec((3,), np.float64)})
        client.reset("other")
        assert [one.spec_of("other") for one in client.each()] == [None] * 3


def test_spec_is_asked_of_the_first_server_that_answers_and_is_not_lost(replay_server: StartServer) -> None:
    server = replay_server(fifo("replay"))
    with rw.Client(server.address) as client:
        client.store_spec("replay", {"n": spec((), np.int64)})
    gone, there = rw.Shard("gone", "localhost:1"), rw.Shard("there", server.address)
    for first in (gone, rw.Shard("gone", "localhost:1", "lost")):
        with rw.Client(rw.Target(0, (first, there)), timeout_s=20) as client:
            assert client.spec_of("replay")["n"].dtype == np.int64


def test_spec_that_no_server_takes_in_time_is_not_called_stored(replay_server: StartServer) -> None:
    server = replay_server(fifo("replay"), fifo("other"))
    with CallForwarder(server.port) as forwarder, rw.Client(forwarder.address, timeout_s=60) as client:
        client.store_spec("other", {"n": spec((), np.int64)})
        forwarder.refuse = {"SampleStream": grpc.StatusCode.DEADLINE_EXCEEDED}.get
        with pytest.raises(rw.ReplayTimeoutError):
            client.store_spec("replay", {"n": spec((), np.int64)})


def test_spec_is_on_the_shard_that_is_written_also_if_it_was_the_one_that_took_it_too_late(
    replay_server: StartServer,
) -> None:
    servers = [replay_server(fifo("replay")) for _ in range(2)]
    late = iter([grpc.StatusCode.DEADLINE_EXCEEDED])
    with CallForwarder(servers[0].port) as forwarder:
        forwarder.refuse = lambda verb: next(late, None) if verb == "InsertStream" else None
        names = {forwarder.address: servers[0], servers[1].address: servers[1]}
        actor = next(f"{n}" for n in range(100) if rw.choose_shard(f"{n}", list(names)) == forwarder.address)
        with rw.TrajectoryObserver([*names], "replay", 2, actor_id=actor) as observer:
            episode(observer, 0)
    assert next(late, None) is None
    for server in servers:
        with rw.Client(server.address) as client:
            stored = client.spec_of("replay")
            assert stored is not None, server.address
            assert stored["n"].dtype == np.int64


def test_stream_of_a_sequence_writer_goes_to_the_shard_of_its_id(replay_server: StartServer) -> None:
    servers = [replay_server(fifo("replay")) for _ in range(3)]
    with rw.Client([server.address for server in servers]) as client:
        for number in range(5):
            with client.open_stream(actor_id=f"actor-{number}") as stream:
                writer = rw.SequenceWriter(
                    stream, [np.dtype(np.int64)], [()], [rw.WindowTarget(rw.WindowSpec(1), ("replay",))]
                )
                writer.append([number], last=True)
    for server in servers:
        mine = [number for number in range(5) if shards_for(f"actor-{number}", servers)[0] is server]
        assert [column for (column,) in numbers(server)] == mine


def test_single_items_go_to_the_servers_in_turn_but_not_to_one_that_is_lost(lone_server: StartServer) -> None:
    servers = [lone_server(fifo("replay")) for _ in range(3)]
    with rw.Client([server.address for server in servers], timeout_s=60) as client:
        for number in range(3):
            client.insert([np.array([number])], {"replay": 1.0})
        assert [len(numbers(server)) for server in servers] == [1, 1, 1]
        servers[1].process.kill()
        for number in range(6):
            client.insert([np.array([number])], {"replay": 1.0})
    assert sorted(numbers(servers[0]) + numbers(servers[2])) == [[number] for number in range(6)]


# Targets that change.


def test_actor_leaves_a_shard_that_is_drained_and_goes_to_one_that_is_added(
    replay_server: StartServer, tmp_path: Path
) -> None:
    """And nothing is dropped by either."""
    servers = [replay_server(fifo("replay")) for _ in range(2)]
    names = {"a": servers[0], "b": servers[1]}
    home = rw.choose_shard("actor", names)
    (other,) = names.keys() - {home}
    path = tmp_path / "shards"

    def tell(*lines: str) -> None:
        path.write_text("\n".join(lines))
        client.connections.refresh()

    path.write_text(f"{other} {names[other].address}")
    with (
        rw.Client(f"file:{path}") as client,
        rw.TrajectoryObserver(client, "replay", 2, actor_id="actor", patience_s=PATIENCE_S) as observer,
    ):
        episode(observer, 0)
        tell(f"{other} {names[other].address}", f"{home} {names[home].address}")
        written = write_until_it_moves(observer, 10)
        episode(observer, written)
        tell(f"{other} {names[other].address}", f"{home} {names[home].address} draining")
        last = write_until_it_moves(observer, written + 10)
        observer.flush()
        stats = observer.stats()
    assert (stats.shard_changes, stats.dropped_items, stats.unconfirmed_items) == (2, 0, 0)
    assert numbers(names[other]) == [pair for number in range(0, written, 10) for pair in pairs(number)]
    assert numbers(names[home]) == [pair for number in range(written, last, 10) for pair in pairs(number)]


def test_actor_leaves_a_shard_that_is_called_lost_at_once_and_one_that_hangs_after_its_patience(
    lone_server: StartServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = [lone_server(fifo("replay")) for _ in range(3)]
    names = dict(zip("abc", servers, strict=True))
    first, second, third = rank_shards("actor", names)
    path = tmp_path / "shards"
    lines = {name: f"{name} {server.address}" for name, server in names.items()}
    path.write_text("\n".join(lines.values()))
    with (
        rw.Client(f"file:{path}") as client,
        rw.TrajectoryObserver(client, "replay", 2, actor_id="actor", patience_s=60) as observer,
    ):
        episode(observer, 0)
        observer.flush()
        path.write_text("\n".join([lines[second], lines[third], f"{lines[first]} lost"]))
        client.connections.refresh()
        episode(observer, 10)
        assert observer.stats().shard_changes == 1
        episode(observer, 20)
        observer.flush()
        assert numbers(names[second]) == pairs(20)
    with (
        rw.Client(f"file:{path}") as client,
        rw.TrajectoryObserver(client, "replay", 2, actor_id="actor", patience_s=PATIENCE_S) as observer,
    ):
        episode(observer, 30)
        observer.flush()
        names[second].process.pause()
        monkeypatch.setattr(actor_shard, "_ANSWER_WITHIN_S", 2.0)
        written = write_until_it_moves(observer, 40)
        episode(observer, written)
        observer.flush()
        names[second].process.resume()
    assert numbers(names[third]) == pairs(written)
