"""Observers of several servers: each episode goes to one of them, and the next ones elsewhere when one is lost."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kinds import contents
from reading import column_at, fifo
from server_process import HostedServer, StartServer
from shard_files import ShardFile, shard_lines
from waiting import eventually

import reverb_writer as rw
from reverb_writer.shards import outbox
from reverb_writer.shards.targets import rank_shards

PATIENCE_S = 2.0  # longer than a busy machine keeps a server from confirming


@pytest.fixture(autouse=True)
def _name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "writer_name", lambda: "actor")


def ranked(episode_number: int, servers: Sequence[HostedServer]) -> list[HostedServer]:
    """Return the servers in the order in which the observer `actor` chooses them for an episode, numbered from 1."""
    by_address = {server.address: server for server in servers}
    return [by_address[address] for address in rank_shards(f"actor/{episode_number}", by_address)]


def observed(servers: Any, **options: Any) -> rw.TrajectoryObserver:
    return rw.TrajectoryObserver(servers, "replay", 2, **{"patience_s": PATIENCE_S, **options})


def addresses(servers: Sequence[HostedServer]) -> list[str]:
    return [server.address for server in servers]


def episode(observer: Any, first: int, num_steps: int = 3) -> None:
    for number in range(first, first + num_steps):
        observer({"n": np.int64(number)}, end_of_episode=number == first + num_steps - 1)


def numbers(server: HostedServer) -> list[list[int]]:
    return column_at(server.address)


def pairs(*firsts: int) -> list[list[int]]:
    """Return the windows of two steps of the episodes of three that begin at `firsts`."""
    return [[first + i, first + i + 1] for first in firsts for i in (0, 1)]


def assert_balanced(stats: rw.ObserverStats) -> None:
    assert stats.items == stats.acknowledged_items + stats.pending_items + stats.dropped_items


def write_until_lost(observer: Any, first: int) -> int:
    """Write and flush episodes, ten numbers apart, until the observer has lost a shard; return the next number."""
    while not observer.stats().lost_shards:
        episode(observer, first)
        observer.flush()
        first += 10
    return first


def test_each_episode_goes_to_the_shard_of_its_number(replay_server: StartServer) -> None:
    servers = [replay_server(fifo("replay")) for _ in range(3)]
    with observed(addresses(servers)) as observer:
        for number in range(30):
            episode(observer, 10 * number)
            if number % 3 == 0:
                observer.flush()
    for server in servers:
        firsts = [10 * (number - 1) for number in range(1, 31) if ranked(number, servers)[0] is server]
        assert firsts
        assert numbers(server) == pairs(*firsts)
    assert observer.stats().lost_shards == 0


def test_shards_that_their_rate_limiters_block_are_not_lost(replay_server: StartServer) -> None:
    servers = [replay_server(rw.TableConfig.queue("replay", 4)) for _ in range(3)]
    with observed(addresses(servers), patience_s=0.5, timeout_s=3, max_in_flight_items=10) as observer:
        written = 0
        with pytest.raises(rw.errors.ReplayTimeoutError, match=r"max_diff 4, and nothing has sampled"):  # noqa: PT012
            for number in itertools.count():
                observer({"n": np.int64(number)}, end_of_episode=number % 3 == 2)
                written += 1
        stats = observer.stats()
        assert stats.steps == written
        assert (stats.lost_shards, stats.dropped_items, stats.unconfirmed_items) == (0, 0, 0)
        assert stats.acknowledged_items == 3 * 4
        assert stats.items <= 3 * (4 + 10) + 2
        found: list[list[int]] = []
        while len(found) < stats.items:
            for server in servers:
                found += numbers(server)
        observer.flush()
        assert_balanced(observer.stats())
    windows = pairs(*range(0, written + 3, 3))[: stats.items]
    assert sorted(found) == windows


def test_episodes_go_past_a_shard_that_its_rate_limiter_blocks(replay_server: StartServer) -> None:
    blocked, free = replay_server(rw.TableConfig.queue("replay", 4)), replay_server(fifo("replay"))
    servers = [blocked, free]
    patience_s = 2.0  # a busy machine may be silent for less
    with observed(addresses(servers), patience_s=patience_s, timeout_s=60, max_in_flight_items=6) as observer:
        for number in range(100):
            episode(observer, 10 * number)
        time.sleep(1.5 * patience_s)
        eventually(lambda: observer.stats().acknowledged_items >= 200 - 6 - 2 or observer.stats().lost_shards > 0)
        stats = observer.stats()
        assert (stats.lost_shards, stats.dropped_items) == (0, 0)
        found: list[list[int]] = []
        while len(found) < 200:
            found += numbers(blocked) + numbers(free)
        observer.flush()
    assert sorted(found) == pairs(*range(0, 1000, 10))


def test_server_that_restarts_without_the_table_is_given_up_until_it_has_the_table(
    caplog: pytest.LogCaptureFixture,
) -> None:
    servers = [rw.LocalServer([fifo("replay")]) for _ in range(3)]
    every = [server.address for server in servers]
    with contextlib.ExitStack() as opened, observed(every, patience_s=1, timeout_s=60) as observer:
        for server in servers[1:]:
            opened.enter_context(server)
        for number in range(30):
            episode(observer, 10 * number)
        observer.flush()
        servers[0].close()
        port = int(every[0].rpartition(":")[2])
        with rw.LocalServer([fifo("other")], port):
            number = write_until_lost(observer, 300)
            for first in range(number, number + 300, 10):
                episode(observer, first)
            observer.flush()
            stats = observer.stats()
            assert_balanced(stats)
            assert stats.unconfirmed_items == stats.dropped_items
            assert any("table `replay` is not on the server" in text for text in caplog.messages)
        with rw.LocalServer([fifo("replay")], port) as again, rw.Client(again) as client:

            def is_used() -> bool:
                episode(observer, 0)
                observer.flush()
                return client.server_info()["replay"].current_size > 0

            eventually(is_used, "the server is used again")


@pytest.mark.parametrize("limit", [None, 1], ids=["", "full window"])
def test_episodes_go_elsewhere_when_a_shard_is_lost_and_errors_are_public(
    lone_server: StartServer, caplog: pytest.LogCaptureFixture, limit: int | None
) -> None:
    servers = [lone_server(fifo("replay")) for _ in range(3)]
    lost, *others = ranked(1, servers)
    with observed(addresses(servers), max_in_flight_items=limit, timeout_s=60) as observer:
        episode(observer, 0)
        observer.flush()
        assert numbers(lost) == pairs(0)
        lost.process.kill()
        written = write_until_lost(observer, 10)
        for first in range(written, written + 100, 10):
            episode(observer, first)
        observer.flush()
        stats = observer.stats()
    assert_balanced(stats)
    assert stats.lost_shards == 1
    assert stats.unconfirmed_items == stats.dropped_items == stats.items - stats.acknowledged_items
    found = [window for server in others for window in numbers(server)]
    assert len(found) == stats.acknowledged_items - 2
    assert sorted(found)[-20:] == pairs(*range(written, written + 100, 10))
    (said,) = [record.getMessage() for record in caplog.records if "are given up" in record.getMessage()]
    assert f": {stats.unconfirmed_items} unconfirmed items are given up" in said
    impatient = rw.TrajectoryObserver(addresses(others), "replay", 1, max_in_flight_items=limit, timeout_s=1)
    for server in others:
        server.process.kill()
    with pytest.raises(rw.errors.ServerUnavailableError, match="items unconfirmed after"):  # noqa: PT012
        for number in range(40, 80):
            episode(impatient, 10 * number)
        impatient.flush(timeout_s=1)
    with pytest.raises(rw.errors.ReverbWriterError):
        impatient.close(0.5)
    assert_balanced(impatient.stats())
    with pytest.raises(rw.errors.ServerUnavailableError, match=r"none of localhost:\d+, localhost:\d+ answers"):
        rw.TrajectoryObserver(addresses(others), "replay", 2, timeout_s=1.0)


def test_episode_under_way_at_a_lost_shard_is_cut_and_counted(lone_server: StartServer) -> None:
    servers = [lone_server(fifo("replay")) for _ in range(2)]
    first, second = ranked(1, servers)
    with observed(addresses(servers), chunk_length=1, timeout_s=60) as observer:
        observer({"n": np.int64(0)}, end_of_episode=False)
        observer({"n": np.int64(1)}, end_of_episode=False)
        observer.flush()
        assert numbers(first) == [[0, 1]]
        first.process.kill()
        written = 2
        observer({"n": np.int64(written)}, end_of_episode=False)
        eventually(lambda: observer.stats().lost_shards == 1)
        before = observer.stats()
        for number in range(written + 1, written + 5):
            observer({"n": np.int64(number)}, end_of_episode=number == written + 4)
        observer.flush()
        stats = observer.stats()
    assert (before.unconfirmed_items, stats.unconfirmed_items) == (1, 1)
    assert numbers(second) == [[n, n + 1] for n in range(written + 1, written + 4)]
    assert_balanced(stats)


def test_environment_whose_shard_is_lost_goes_on_elsewhere_and_no_other_notices(lone_server: StartServer) -> None:
    servers = [lone_server(fifo("replay")) for _ in range(2)]
    lost, left = ranked(1, servers)
    with observed(addresses(servers), num_envs=4, timeout_s=60) as observer:

        def step(number: int, *, last: bool = False) -> None:
            observer({"n": 1000 * np.arange(1, 5) + number}, end_of_episode=np.full(4, last))
            observer.flush()

        for number in range(3):
            step(number)
        at_lost = {window[0] // 1000 for window in numbers(lost)}
        lost.process.kill()
        number = 3
        while not observer.stats().lost_shards:
            step(number)
            number += 1
        for more in range(number, number + 10):
            step(more, last=more == number + 9)
        stats = observer.stats()
    assert 1 in at_lost
    found = numbers(left)
    for env in range(1, 5):
        expected = [[1000 * env + n, 1000 * env + n + 1] for n in range(number if env in at_lost else 0, number + 9)]
        windows = [window for window in found if window[0] // 1000 == env]
        assert windows[-len(expected) :] == expected
        assert env in at_lost or windows == expected
    assert stats.unconfirmed_items == stats.dropped_items > 0
    assert_balanced(stats)


def test_shard_that_is_paused_is_lost_and_used_again_when_it_answers(lone_server: StartServer) -> None:
    servers = [lone_server(fifo("replay")) for _ in range(2)]
    paused, other = ranked(1, servers)
    with observed(addresses(servers), timeout_s=60) as observer:
        episode(observer, 0)
        observer.flush()
        paused.process.pause()
        written = write_until_lost(observer, 10)
        episode(observer, written)
        observer.flush()
        assert numbers(other)[-2:] == pairs(written)
        paused.process.resume()

        def is_back() -> bool:
            nonlocal written
            written += 10
            episode(observer, written)
            observer.flush()
            return pairs(written)[0] in numbers(paused)

        eventually(is_back)
        assert observer.stats().lost_shards == 1
        assert_balanced(observer.stats())


def test_episode_observer_loses_no_episode_that_it_has_not_sent(lone_server: StartServer) -> None:
    servers = [lone_server(fifo("replay")) for _ in range(2)]
    first, second = ranked(1, servers)
    options: Any = {"patience_s": PATIENCE_S, "timeout_s": 60}
    with rw.EpisodeObserver(addresses(servers), "replay", 3, **options) as observer:
        observer({"n": np.int64(0)}, end_of_episode=False)
        first.process.kill()
        observer({"n": np.int64(1)}, end_of_episode=True)
        observer.flush()
        stats = observer.stats()
        assert (stats.lost_shards, stats.unconfirmed_items) == (1, 1)
        episode(observer, 10)
        observer.flush()
    assert numbers(second) == [[10, 11, 12]]


def test_windows_that_cross_episodes_stay_at_a_shard_for_so_many_items(
    replay_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One window is cut where the next shard begins: its step is counted."""
    monkeypatch.setattr("reverb_writer.shards.outbox._SPANNING_ITEMS", 10)
    servers = [replay_server(fifo("replay")) for _ in range(2)]
    with rw.SequenceObserver(addresses(servers), "replay", 3, 2, chunk_length=3) as observer:
        for number in range(400):
            episode(observer, 3 * number)
            if number % 10 == 0:
                observer.flush()
        observer.flush()
        observer.reset(discard=True)
        observer.flush()
        stats = observer.stats()
    found = [numbers(server) for server in servers]
    windows = sorted(found[0] + found[1])
    assert all(window == list(range(window[0], window[0] + 3)) for window in windows)
    assert all(len(windows_of) >= 10 for windows_of in found)
    covered = set(itertools.chain.from_iterable(windows))
    assert stats.steps == 1200 == len(covered) + sum(stats.dropped_steps.values())
    assert stats.items == stats.acknowledged_items == len(windows)


def test_single_items_go_to_the_servers_in_turn_but_not_to_one_that_is_lost(lone_server: StartServer) -> None:
    servers = [lone_server(fifo("replay")) for _ in range(3)]
    with rw.Client(addresses(servers), timeout_s=60) as client:
        for number in range(3):
            client.insert([np.array([number])], {"replay": 1.0})
        assert [len(numbers(server)) for server in servers] == [1, 1, 1]
        servers[1].process.kill()
        for number in range(6):
            client.insert([np.array([number])], {"replay": 1.0})
    assert sorted(numbers(servers[0]) + numbers(servers[2])) == [[number] for number in range(6)]


def test_shard_that_is_drained_gets_no_new_episode_and_one_that_is_added_does(
    replay_server: StartServer, tmp_path: Path
) -> None:
    """And nothing is dropped by either."""
    servers = [replay_server(fifo("replay")) for _ in range(2)]
    a, b = shard_lines(servers)
    file = ShardFile(tmp_path, a)
    with rw.Client(file.target) as client, observed(client, timeout_s=60) as observer:
        for first, lines in ((0, [a]), (200, [a, b]), (400, [f"{a} draining", b])):
            file.tell(client, *lines)
            for number in range(first, first + 200, 10):
                episode(observer, number)
            observer.flush()
        stats = observer.stats()
    assert (stats.lost_shards, stats.dropped_items, stats.unconfirmed_items) == (0, 0, 0)
    at_a, at_b = map(numbers, servers)
    assert sorted(at_a + at_b) == pairs(*range(0, 600, 10))
    assert at_a[:40] == pairs(*range(0, 200, 10))
    assert [window for window in at_b if window[0] < 400]
    assert not [window for window in at_a if window[0] >= 400]


@pytest.mark.parametrize("how", ["lost", "gone"])
def test_shard_that_the_target_calls_lost_or_has_no_more_is_given_up_at_once(
    lone_server: StartServer, tmp_path: Path, how: str
) -> None:
    servers = dict(zip("ab", [lone_server(fifo("replay")) for _ in range(2)], strict=True))
    lines = dict(zip("ab", shard_lines([*servers.values()]), strict=True))
    first, second = rank_shards("actor/1", servers)
    file = ShardFile(tmp_path, *lines.values())
    with rw.Client(file.target) as client, observed(client, patience_s=600, timeout_s=60) as observer:
        servers[first].process.pause()
        episode(observer, 0)
        with pytest.raises(rw.errors.ReverbWriterError):
            observer.flush(timeout_s=1)
        file.tell(client, lines[second], *([f"{lines[first]} lost"] if how == "lost" else []))
        eventually(lambda: observer.stats().lost_shards == 1)
        episode(observer, 10)
        observer.flush()
        stats = observer.stats()
        servers[first].process.resume()
    assert (stats.unconfirmed_items, stats.dropped_items) == (2, 2)
    assert numbers(servers[second]) == pairs(10)


@contents
def test_stream_at_the_only_server_of_a_file_is_not_cut(replay_server: StartServer, tmp_path: Path) -> None:
    """Streams are cut after 1,000 items so that other servers get the next windows, and there is none."""
    server = replay_server(fifo("replay"))
    file = ShardFile(tmp_path, *shard_lines([server]))
    with rw.SequenceObserver(file.target, "replay", 2) as observer:
        observer.extend({"n": np.arange(5000)})
    assert observer.stats().acknowledged_items == 4999


@contents
def test_sent_steps_of_a_cut_episode_are_counted_if_they_are_in_no_window(
    replay_server: StartServer, tmp_path: Path
) -> None:
    servers = dict(zip("ab", [replay_server(fifo("replay")) for _ in range(2)], strict=True))
    lines = dict(zip("ab", shard_lines([*servers.values()]), strict=True))
    first, second = rank_shards("actor/1", servers)
    file = ShardFile(tmp_path, *lines.values())
    with rw.Client(file.target) as client:
        with rw.TrajectoryObserver(client, "replay", 5, 5, chunk_length=1) as observer:
            for number in range(9):
                observer({"n": np.int64(number)}, end_of_episode=False)
            observer.flush()
            file.tell(client, lines[second])
            eventually(lambda: observer.stats().lost_shards == 1)
        stats = observer.stats()
    assert numbers(servers[first]) == [[0, 1, 2, 3, 4]]
    assert stats.dropped_steps == {"lost_shard": 4}
