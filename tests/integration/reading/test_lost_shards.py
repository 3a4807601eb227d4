"""Readers of several servers go on without one that is lost, silent or blocked, and take it back when it returns."""

from __future__ import annotations

import itertools
import re
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from server_process import HostedServer, StartServer
from threads import our_threads
from waiting import eventually

import reverb_writer as rw
from reverb_writer.tables import Selector, SelectorName

TABLE = rw.TableConfig("replay", 1000, rw.Prioritized(1.0))
FIFO = rw.TableConfig("replay", 1000, "fifo")  # its servers are read in turns, each by a thread of its own
PAUSE_S = 0.1
MANY = (
    60  # batches of 8; the shares of these tests are 1/5 or more: a server that takes part is seen, but for 1 in 10**46
)


def insert(address: str, items: list[int], table: str = "replay") -> None:
    with rw.Client(address, timeout_s=60) as client:
        for item in items:
            client.insert(np.array([item]), {table: 1.0})


def two_with_an_item_each(start: StartServer, table: rw.TableConfig = TABLE) -> list[HostedServer]:
    """Start two servers, each with an item of its number."""
    servers = [start(table), start(table)]
    for number, server in enumerate(servers):
        insert(server.address, [number])
    return servers


def reader(servers: Sequence[HostedServer], batch_size: int = 8) -> rw.ReplayDataset:
    return rw.ReplayDataset([server.address for server in servers], "replay", batch_size, timeout_s=60)


def items_of(batch: rw.Batch) -> npt.NDArray[np.int64]:
    items: npt.NDArray[np.int64] = batch.data[0].ravel()
    return items


def seen_in(dataset: rw.ReplayDataset, num_batches: int = MANY) -> set[int]:
    return {int(item) for _ in range(num_batches) for item in items_of(next(dataset))}


def test_a_server_that_is_killed_is_skipped_and_taken_back(
    lone_server: StartServer, caplog: pytest.LogCaptureFixture
) -> None:
    servers = [lone_server(TABLE), lone_server(TABLE)]
    insert(servers[0].address, [0, 1])
    insert(servers[1].address, [2])
    with reader(servers) as dataset:
        assert seen_in(dataset) == {0, 1, 2}
        batches = [next(dataset) for _ in range(MANY)]
        servers[1].process.kill()
        eventually(lambda: dataset.stats().left_out_servers == 1)
        seen_in(dataset, 4)  # what was drawn before
        alone = [next(dataset) for _ in range(MANY)]
        assert {int(item) for batch in alone for item in items_of(batch)} == {0, 1}
        for batch in alone:
            np.testing.assert_allclose(batch.info.probabilities, 1 / 2)
            assert (batch.info.table_sizes == 2).all()

        keys = {
            int(key): int(item) for batch in batches for key, item in zip(batch.info.keys, items_of(batch), strict=True)
        }
        dataset.update_priorities(np.array(list(keys), np.uint64), np.full(len(keys), 2.0))
        dataset.flush_priorities()
        assert len(keys) == 3
        stats = dataset.stats()
        assert (stats.priority_updates, stats.failed_priority_updates, stats.gone_priority_updates) == (2, 0, 1)
        assert [line for line in caplog.messages if "unreachable servers" in line]

        servers[1].process.restart()
        insert(servers[1].address, [3] * 4)
        eventually(lambda: 3 in items_of(next(dataset)))
        stats = dataset.stats()
        assert (stats.left_out_servers, stats.server_restarts) == (0, 1)
        latest = [next(dataset) for _ in range(MANY)][-1]
        # Priorities of the first two are 2 now.
        np.testing.assert_allclose(latest.info.probabilities, np.where(items_of(latest) == 3, 1 / 8, 2 / 8))


def test_priority_of_a_key_that_no_sample_had_is_counted_once(lone_server: StartServer) -> None:
    servers = [lone_server(TABLE), lone_server(TABLE)]
    with reader(servers, 2) as dataset:
        dataset.update_priorities([7], [1.0])
        dataset.flush_priorities()
        stats = dataset.stats()
        assert (stats.priority_updates, stats.failed_priority_updates, stats.gone_priority_updates) == (1, 0, 0)
        iter(dataset)  # begins to fetch
        for server in servers:
            server.process.kill()
        eventually(lambda: dataset.stats().left_out_servers == 2)
        dataset.update_priorities([8, 9], [1.0, 1.0])
        dataset.flush_priorities()
        stats = dataset.stats()
        assert (stats.priority_updates, stats.failed_priority_updates, stats.gone_priority_updates) == (1, 0, 2)


def test_a_server_that_is_paused_is_left_out_until_it_answers(lone_server: StartServer) -> None:
    servers = two_with_an_item_each(lone_server)
    with reader(servers) as dataset:
        assert seen_in(dataset) == {0, 1}
        servers[1].process.pause()
        eventually(lambda: bool((items_of(next(dataset)) == 0).all() and dataset.stats().left_out_servers))
        assert seen_in(dataset) == {0}
        servers[1].process.resume()
        eventually(lambda: 1 in items_of(next(dataset)))
        assert dataset.stats().left_out_servers == 0


def test_a_slow_server_owes_its_samples_and_gives_them_when_it_answers(lone_server: StartServer) -> None:
    servers = [lone_server(TABLE), lone_server(TABLE)]
    for number, server in enumerate(servers):
        insert(server.address, [number])
    with rw.ReplayDataset([server.address for server in servers], "replay", 8, timeout_s=60) as dataset:
        assert seen_in(dataset) == {0, 1}
        servers[1].process.pause()
        resume = threading.Timer(0.7, servers[1].process.resume)
        resume.start()
        began_at = time.monotonic()
        found = np.concatenate([items_of(next(dataset)) for _ in range(100)])
        assert time.monotonic() - began_at > 0.6  # at most a batch is owed, then its samples are waited for
        resume.join()
        assert dataset.stats().forgiven_samples == 0
    assert abs(int(found.sum()) - 400) < 6 * 14  # six standard deviations


def test_a_time_out_counts_no_more_samples_than_a_batch_has(lone_server: StartServer) -> None:
    """Of the server that answers, more samples wait than a batch needs."""
    servers = two_with_an_item_each(lone_server)
    with reader(servers) as dataset:
        assert seen_in(dataset) == {0, 1}
        servers[1].process.pause()
        dataset.timeout_s = 0.3  # the other one is left out after two seconds
        messages = []
        for _ in range(40):
            try:
                next(dataset)
            except rw.errors.ReplayTimeoutError as error:
                messages.append(str(error))
        servers[1].process.resume()
    assert messages
    counts = [int(found[1]) for message in messages if (found := re.search(r"(\d+) of 8 samples", message))]
    assert len(counts) == len(messages)
    assert max(counts) <= 8


@pytest.mark.parametrize("sampler", ["uniform", "fifo"])
def test_a_dataset_opens_without_a_server_that_is_down(lone_server: StartServer, sampler: SelectorName) -> None:
    table = rw.TableConfig("replay", 10, sampler)
    servers = [lone_server(table), lone_server(table)]
    insert(servers[0].address, [0])
    servers[1].process.kill()
    with reader(servers, 2) as dataset:
        assert seen_in(dataset, 3) == {0}
        servers[1].process.restart()
        insert(servers[1].address, [1])
        eventually(lambda: 1 in items_of(next(dataset)))


@pytest.mark.parametrize("sampler", ["uniform", rw.Prioritized(1.0)], ids=str)
def test_servers_that_their_rate_limiters_block_do_not_stall_the_others(
    replay_server: StartServer, sampler: Selector
) -> None:
    servers = [
        replay_server(rw.TableConfig("replay", 1000, sampler, rate_limiter=rw.MinSize(size))) for size in (1, 4, 4)
    ]
    insert(servers[0].address, [0])
    insert(servers[1].address, [1, 1, 1])
    insert(servers[2].address, [2, 2, 2])
    with reader(servers) as dataset:
        batches = [next(dataset) for _ in range(4)]
        assert {int(item) for batch in batches for item in items_of(batch)} == {0}
        np.testing.assert_allclose(batches[-1].info.probabilities, 1.0)  # the first was drawn before it was left out
        assert dataset.stats().left_out_servers == 2
        if sampler == "uniform":  # its share is that of its size; of priorities only samples tell
            assert 0 < dataset.stats().forgiven_samples <= 8  # at most a batch is owed
        insert(servers[1].address, [1])
        eventually(lambda: 1 in items_of(next(dataset)))
        latest = [next(dataset) for _ in range(MANY)][-1]
        np.testing.assert_allclose(latest.info.probabilities, 1 / 5)
        assert dataset.stats().left_out_servers == 1
        insert(servers[2].address, [2])
        eventually(lambda: 2 in items_of(next(dataset)))
        assert dataset.stats().left_out_servers == 0


@pytest.mark.parametrize("sampler", ["uniform", "fifo"])
def test_readers_follow_the_target(replay_server: StartServer, tmp_path: Path, sampler: SelectorName) -> None:
    table = rw.TableConfig("replay", 10, sampler)
    servers = [replay_server(table) for _ in range(3)]
    for number, server in enumerate(servers):
        insert(server.address, [number])
    path = tmp_path / "shards"
    path.write_text(f"a {servers[0].address}\nb {servers[1].address}\n")
    with rw.Client(f"file:{path}") as client, rw.ReplayDataset(client, "replay", 8, timeout_s=60) as dataset:
        assert seen_in(dataset) == {0, 1}
        path.write_text(f"b {servers[1].address}\nc {servers[2].address}\n")
        client.connections.refresh()
        eventually(lambda: 2 in items_of(next(dataset)))
        seen_in(dataset, 12)  # what was fetched ahead
        assert seen_in(dataset) == {1, 2}


def test_a_server_that_leaves_the_target_and_comes_back_is_read_again(lone_server: StartServer, tmp_path: Path) -> None:
    """Also while a question to it has no answer."""
    servers = [lone_server(FIFO), lone_server(FIFO)]
    insert(servers[0].address, [0])
    path = tmp_path / "shards"
    lines = [f"{name} {server.address}\n" for name, server in zip("ab", servers, strict=True)]
    path.write_text("".join(lines))
    with rw.Client(f"file:{path}") as client, rw.ReplayDataset(client, "replay", 8, timeout_s=60) as dataset:
        iter(dataset)  # begins to fetch
        servers[1].process.kill()
        eventually(lambda: dataset.stats().left_out_servers == 1)
        time.sleep(3 * PAUSE_S)  # it is asked now, and does not answer
        for text in (lines[0], "".join(lines)):
            path.write_text(text)
            client.connections.refresh()
            next(dataset)
        servers[1].process.restart()
        insert(servers[1].address, [1])
        eventually(lambda: 1 in items_of(next(dataset)))


def lines_of_shards(replay_server: StartServer, count: int) -> list[str]:
    """Start servers, each with an item of its number, and return them as lines of a file of shards."""
    servers = [replay_server(FIFO) for _ in range(count)]
    for number, server in enumerate(servers):
        insert(server.address, [number])
    return [f"shard-{number} {server.address}\n" for number, server in enumerate(servers)]


def fetching() -> int:
    return len(our_threads("reverb-writer-prefetch"))


def test_what_a_closed_dataset_has_is_read_and_nothing_else_although_the_target_changes(
    replay_server: StartServer, tmp_path: Path
) -> None:
    path, lines = tmp_path / "shards", lines_of_shards(replay_server, 3)
    path.write_text("".join(lines[:2]))
    with rw.Client(f"file:{path}") as client:
        before = fetching()
        with rw.ReplayDataset(client, "replay", 8, timeout_s=60) as dataset:
            assert seen_in(dataset, 4) == {0, 1}
            eventually(lambda: dataset.stats().ready_samples >= 8)
        path.write_text("".join(lines))
        client.connections.refresh()
        rest = [items_of(batch).tolist() for batch in itertools.islice(dataset, 500)]
        assert 0 < len(rest) < 500
        assert not any(2 in batch for batch in rest)
        eventually(lambda: fetching() == before)


def test_a_server_that_starts_again_elsewhere_is_found_there(lone_server: StartServer, tmp_path: Path) -> None:
    servers = two_with_an_item_each(lone_server)
    path = tmp_path / "shards"
    path.write_text(f"a {servers[0].address}\nb {servers[1].address}\n")
    with rw.ReplayDataset(f"file:{path}", "replay", 8, timeout_s=60) as dataset:
        assert seen_in(dataset) == {0, 1}
        servers[1].process.kill()
        elsewhere = lone_server(TABLE)
        insert(elsewhere.address, [2])
        path.write_text(f"a {servers[0].address}\nb {elsewhere.address}\n")
        eventually(lambda: 2 in items_of(next(dataset)))
        stats = dataset.stats()
        assert (stats.left_out_servers, stats.server_restarts) == (0, 1)


def test_a_server_that_the_target_calls_lost_is_left_out(replay_server: StartServer) -> None:
    servers = two_with_an_item_each(replay_server)
    target = rw.shards.Target(
        (rw.shards.Shard("a", servers[0].address, "lost"), rw.shards.Shard("b", servers[1].address))
    )
    with rw.ReplayDataset(target, "replay", 8, timeout_s=60) as dataset:
        assert seen_in(dataset) == {1}
        assert dataset.stats().left_out_servers == 1


def test_items_that_are_sampled_once_come_once_from_several_servers(replay_server: StartServer) -> None:
    table = rw.TableConfig("replay", 1000, max_times_sampled=1)
    servers = [replay_server(table) for _ in range(2)]
    insert(servers[0].address, list(range(90)))
    insert(servers[1].address, list(range(90, 100)))
    with reader(servers) as dataset:
        found = [int(item) for _ in range(10) for item in items_of(next(dataset))]
        actor = threading.Thread(target=insert, args=[servers[1].address, list(range(100, 120))])
        actor.start()
        found += [int(item) for _ in range(4) for item in items_of(next(dataset))]
        actor.join()
    found += [int(item) for batch in dataset for item in items_of(batch)]
    with rw.Client([server.address for server in servers], timeout_s=60) as client:
        left = client.server_info()["replay"].current_size
        found += [int(sample.data[0][0]) for sample in client.sample("replay", left)] if left else []
    assert sorted(found) == list(range(120))
