"""Servers are sampled as one table; readers go on without one that is lost, silent or blocked, and take it back."""

from __future__ import annotations

import dataclasses
import itertools
import re
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from kinds import contents
from numbered import first_numbers, insert_numbers
from server_process import HostedServer, StartServer
from shard_files import ShardFile, shard_lines
from threads import our_threads, soon
from waiting import eventually

import reverb_writer as rw
from reverb_writer.reading.stats import DatasetStats
from reverb_writer.tables import Selector, SelectorName

SIZES = (1, 10, 100)
NUM_ITEMS = sum(SIZES)
TABLES = [
    rw.TableConfig("uniform", 1000, rate_limiter=rw.MinSize(1)),
    rw.TableConfig("prioritized", 1000, rw.Prioritized(0.6), rate_limiter=rw.MinSize(1)),
]


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Servers that hold items 0, 1, 2, ... with these priorities."""

    addresses: list[str]
    priorities: npt.NDArray[np.float64]


@pytest.fixture
def cluster(replay_server: StartServer) -> Cluster:
    servers = [replay_server(*TABLES) for _ in SIZES]
    priorities = np.random.default_rng(0).uniform(0.1, 10.0, NUM_ITEMS)
    item = 0
    for server, size in zip(servers, SIZES, strict=True):
        with rw.Client(server.address, timeout_s=60) as client:
            for _ in range(size):
                client.insert(np.array([item]), {table.name: priorities[item] for table in TABLES})
                item += 1
    return Cluster([server.address for server in servers], priorities)


def expected(table: str, cluster: Cluster) -> npt.NDArray[np.float64]:
    """Return the closed form of one server with all items."""
    weights = cluster.priorities**0.6 if table == "prioritized" else np.ones(NUM_ITEMS)
    result: npt.NDArray[np.float64] = weights / weights.sum()
    return result


def check_frequencies(items: npt.NDArray[np.int64], probabilities: npt.NDArray[np.float64]) -> None:
    """Check by chi-square, with a bound that a fair sampler exceeds once in some 10**9 runs; by item, and by server."""
    counts = np.bincount(items, minlength=NUM_ITEMS)
    starts = np.cumsum((0, *SIZES[:-1]))
    for seen, due, bound in (
        (counts, probabilities * len(items), 230.0),  # 110 degrees of freedom
        (np.add.reduceat(counts, starts), np.add.reduceat(probabilities, starts) * len(items), 42.0),  # 2
    ):
        assert ((seen - due) ** 2 / due).sum() < bound
    assert abs(counts / len(items) - probabilities).max() < 0.01


@contents
@pytest.mark.parametrize("table", ["uniform", "prioritized"])
def test_a_dataset_and_a_client_sample_servers_of_1_10_and_100_items_as_one(cluster: Cluster, table: str) -> None:
    due = expected(table, cluster)
    with rw.ReplayDataset(cluster.addresses, table, 256, timeout_s=60) as dataset:
        batches = [next(dataset) for _ in range(150)]
    items = np.stack([batch.data[0][:, 0] for batch in batches])
    check_frequencies(items.ravel(), due)
    check_frequencies(items[:, :128].ravel(), due)  # also each half of a batch, such as a micro-batch
    assert {len({int(np.searchsorted(np.cumsum(SIZES), item, "right")) for item in batch}) for batch in items} <= {2, 3}
    for batch in batches:
        np.testing.assert_allclose(batch.info.probabilities, due[batch.data[0][:, 0]], rtol=1e-9)
        assert (batch.info.table_sizes == NUM_ITEMS).all()
        assert batch.info.server == ""
    weights = (NUM_ITEMS * due[items[-1]]) ** -0.5
    np.testing.assert_allclose(batches[-1].info.importance_weights(0.5), weights / weights.max())
    with rw.Client(cluster.addresses, timeout_s=60) as client:
        samples = list(client.sample(table, 20_000))
    items = np.array([sample.data[0][0] for sample in samples])
    check_frequencies(items, due)
    np.testing.assert_allclose([sample.info.probability for sample in samples], due[items], rtol=1e-9)
    assert {sample.info.table_size for sample in samples} == {NUM_ITEMS}


def queues_of_1_and_50(replay_server: StartServer) -> list[HostedServer]:
    servers = [replay_server(rw.TableConfig("queue", max_times_sampled=1)) for _ in range(2)]
    insert_numbers(servers[0].address, "queue", [0])
    insert_numbers(servers[1].address, "queue", range(1, 51))
    return servers


def waits_for_room(dataset: rw.ReplayDataset) -> bool:
    """Return whether samples have come of which the first batch is ready, and others wait for their turn."""
    stats: DatasetStats = dataset.stats()
    return stats.in_flight_samples == 0 and stats.ready_samples > 8


@contents
def test_samples_that_wait_at_the_end_have_the_info_of_one_server(replay_server: StartServer) -> None:
    addresses = [server.address for server in queues_of_1_and_50(replay_server)]
    with rw.ReplayDataset(addresses, "queue", 4, timeout_s=60) as dataset:
        iter(dataset)  # begins to fetch
        eventually(lambda: waits_for_room(dataset))
    batches = list(dataset)
    numbers = np.concatenate([first_numbers(batch) for batch in batches])
    assert len(set(numbers.tolist())) == len(numbers) > 8
    for batch in batches:
        # The first server alone would say 1 and 1.0. Some 30 of the 51 items are taken out at the same time.
        assert (batch.info.table_sizes > 10).all()
        assert (batch.info.probabilities < 0.2).all()


@contents
def test_priorities_of_samples_of_a_server_that_has_left_are_not_sent_to_others(
    replay_server: StartServer, tmp_path: Path
) -> None:
    a, b = shard_lines(queues_of_1_and_50(replay_server))
    file = ShardFile(tmp_path, a, b)
    with rw.Client(file.target) as client, rw.ReplayDataset(client, "queue", 4, timeout_s=60) as dataset:
        iter(dataset)  # begins to fetch
        eventually(lambda: waits_for_room(dataset))
        file.tell(client, a)
        batches = []
        while (batch := dataset.poll(1.0)) is not None:
            batches.append(batch)
        of_b = sum(number > 0 for batch in batches for number in first_numbers(batch))
        assert of_b > 8
        for batch in batches:
            dataset.update_priorities(batch, np.ones(len(batch.info)))
        dataset.flush_priorities()
        stats = dataset.stats()
        assert (stats.gone_priority_updates, stats.priority_updates) == (of_b, stats.samples - of_b)


TABLE = rw.TableConfig("replay", 1000, rw.Prioritized(1.0))
FIFO = rw.TableConfig("replay", 1000, "fifo")  # its servers are read in turns, each by a thread of its own
PAUSE_S = 0.1
# Batches of 8. Shares of these tests are 1/5 or more: a server that takes part is seen, but for once in 10**46 times.
MANY = 60


def with_an_item_each(start: StartServer, table: rw.TableConfig = TABLE, count: int = 2) -> list[HostedServer]:
    """Start servers, each with an item of its number."""
    servers = [start(table) for _ in range(count)]
    for number, server in enumerate(servers):
        insert_numbers(server.address, "replay", [number])
    return servers


def reader(servers: Sequence[HostedServer], batch_size: int = 8) -> rw.ReplayDataset:
    return rw.ReplayDataset([server.address for server in servers], "replay", batch_size, timeout_s=60)


def items_of(batch: rw.Batch) -> npt.NDArray[np.int64]:
    items: npt.NDArray[np.int64] = batch.data[0].ravel()
    return items


def seen_in(dataset: rw.ReplayDataset, num_batches: int = MANY) -> set[int]:
    return {int(item) for _ in range(num_batches) for item in items_of(next(dataset))}


def priority_counts(dataset: rw.ReplayDataset) -> tuple[int, int, int]:
    """Return how many priorities were set, have failed, and were of servers that are gone."""
    dataset.flush_priorities()
    stats = dataset.stats()
    return stats.priority_updates, stats.failed_priority_updates, stats.gone_priority_updates


def test_a_server_that_is_killed_is_skipped_and_taken_back(
    lone_server: StartServer, caplog: pytest.LogCaptureFixture
) -> None:
    servers = [lone_server(TABLE), lone_server(TABLE)]
    insert_numbers(servers[0].address, "replay", [0, 1])
    insert_numbers(servers[1].address, "replay", [2])
    with reader(servers) as dataset:
        dataset.update_priorities([7], [1.0])  # no sample had this key: each server is told, and it counts once
        assert priority_counts(dataset) == (1, 0, 0)
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
        assert len(keys) == 3
        assert priority_counts(dataset) == (1 + 2, 0, 1)
        assert [line for line in caplog.messages if "unreachable servers" in line]

        servers[1].process.restart()
        insert_numbers(servers[1].address, "replay", [3] * 4)
        eventually(lambda: 3 in items_of(next(dataset)))
        stats = dataset.stats()
        assert (stats.left_out_servers, stats.server_restarts) == (0, 1)
        latest = [next(dataset) for _ in range(MANY)][-1]
        # Priorities of the first two are 2 now.
        np.testing.assert_allclose(latest.info.probabilities, np.where(items_of(latest) == 3, 1 / 8, 2 / 8))

        for server in servers:
            server.process.kill()
        eventually(lambda: dataset.stats().left_out_servers == 2)
        dataset.update_priorities([8, 9], [1.0, 1.0])
        assert priority_counts(dataset) == (3, 0, 1 + 2)


def test_a_slow_server_owes_its_samples_and_a_silent_one_is_left_out(lone_server: StartServer) -> None:
    servers = with_an_item_each(lone_server)
    with reader(servers) as dataset:
        assert seen_in(dataset) == {0, 1}
        servers[1].process.pause()
        with soon(servers[1].process.resume, after_s=0.7):
            began_at = time.monotonic()
            found = np.concatenate([items_of(next(dataset)) for _ in range(100)])
            assert time.monotonic() - began_at > 0.6  # at most a batch is owed, then its samples are waited for
        assert dataset.stats().forgiven_samples == 0
        assert abs(int(found.sum()) - 400) < 6 * 14  # six standard deviations

        servers[1].process.pause()
        dataset.timeout_s = 0.3  # it is left out after two seconds
        counts: list[int] = []
        while not dataset.stats().left_out_servers:
            try:
                next(dataset)
            except rw.errors.ReplayTimeoutError as error:
                counts += map(int, re.findall(r"(\d+) of 8 samples", str(error)))
        assert counts
        assert max(counts) <= 8  # of the server that answers, more samples wait than a batch needs
        dataset.timeout_s = 60
        eventually(lambda: bool((items_of(next(dataset)) == 0).all()))
        assert seen_in(dataset) == {0}
        servers[1].process.resume()
        eventually(lambda: 1 in items_of(next(dataset)))
        assert dataset.stats().left_out_servers == 0


@pytest.mark.parametrize("sampler", ["uniform", "fifo"])
def test_a_dataset_opens_without_a_server_that_is_down(lone_server: StartServer, sampler: SelectorName) -> None:
    table = rw.TableConfig("replay", 10, sampler)
    servers = [lone_server(table), lone_server(table)]
    insert_numbers(servers[0].address, "replay", [0])
    servers[1].process.kill()
    with reader(servers, 2) as dataset:
        assert seen_in(dataset, 3) == {0}
        servers[1].process.restart()
        insert_numbers(servers[1].address, "replay", [1])
        eventually(lambda: 1 in items_of(next(dataset)))


@pytest.mark.parametrize("sampler", ["uniform", rw.Prioritized(1.0)], ids=str)
def test_servers_that_their_rate_limiters_block_do_not_stall_the_others(
    replay_server: StartServer, sampler: Selector
) -> None:
    servers = [
        replay_server(rw.TableConfig("replay", 1000, sampler, rate_limiter=rw.MinSize(size))) for size in (1, 4, 4)
    ]
    insert_numbers(servers[0].address, "replay", [0])
    insert_numbers(servers[1].address, "replay", [1, 1, 1])
    insert_numbers(servers[2].address, "replay", [2, 2, 2])
    with reader(servers) as dataset:
        batches = [next(dataset) for _ in range(4)]
        assert {int(item) for batch in batches for item in items_of(batch)} == {0}
        np.testing.assert_allclose(batches[-1].info.probabilities, 1.0)  # the first was drawn before it was left out
        assert dataset.stats().left_out_servers == 2
        if sampler == "uniform":  # its share is that of its size; of priorities only samples tell
            assert 0 < dataset.stats().forgiven_samples <= 2 * 8  # at most a batch is owed when each is left out
        insert_numbers(servers[1].address, "replay", [1])
        eventually(lambda: 1 in items_of(next(dataset)))
        latest = [next(dataset) for _ in range(MANY)][-1]
        np.testing.assert_allclose(latest.info.probabilities, 1 / 5)
        assert dataset.stats().left_out_servers == 1
        insert_numbers(servers[2].address, "replay", [2])
        eventually(lambda: 2 in items_of(next(dataset)))
        assert dataset.stats().left_out_servers == 0


@contents
@pytest.mark.parametrize("sampler", ["uniform", "fifo", rw.Prioritized(1.0)], ids=str)
def test_readers_follow_the_target_and_nothing_is_left_of_servers_that_leave_and_return(
    replay_server: StartServer, tmp_path: Path, sampler: Selector
) -> None:
    a, b, c = shard_lines(with_an_item_each(replay_server, rw.TableConfig("replay", 100, sampler), 3))
    file = ShardFile(tmp_path, a, b)
    with rw.Client(file.target) as client, rw.ReplayDataset(client, "replay", 8, timeout_s=60) as dataset:
        assert seen_in(dataset) == {0, 1}
        threads = our_threads()
        for lines in ([a], [a, b]) * 3:
            file.tell(client, *lines)
            for _ in range(4):
                next(dataset)
        assert our_threads() == threads
        batch = eventually(lambda: 1 in items_of(found := next(dataset)) and found)
        before = dataset.stats()
        dataset.update_priorities(batch, np.ones(8))
        dataset.flush_priorities()
        assert dataset.stats().gone_priority_updates == before.gone_priority_updates
        assert dataset.stats().priority_updates > before.priority_updates
        file.tell(client, b, c)
        eventually(lambda: 2 in items_of(next(dataset)))
        seen_in(dataset, 12)  # what was fetched ahead
        assert seen_in(dataset) == {1, 2}


def test_a_server_that_leaves_the_target_and_comes_back_is_read_again(lone_server: StartServer, tmp_path: Path) -> None:
    """Also while a question to it has no answer."""
    servers = [lone_server(FIFO), lone_server(FIFO)]
    insert_numbers(servers[0].address, "replay", [0])
    a, b = shard_lines(servers)
    file = ShardFile(tmp_path, a, b)
    with rw.Client(file.target) as client, rw.ReplayDataset(client, "replay", 8, timeout_s=60) as dataset:
        iter(dataset)  # begins to fetch
        servers[1].process.kill()
        eventually(lambda: dataset.stats().left_out_servers == 1)
        time.sleep(3 * PAUSE_S)  # it is asked now, and does not answer
        for lines in ([a], [a, b]):
            file.tell(client, *lines)
            next(dataset)
        servers[1].process.restart()
        insert_numbers(servers[1].address, "replay", [1])
        eventually(lambda: 1 in items_of(next(dataset)))


def test_what_a_closed_dataset_has_is_read_whatever_the_target_does(replay_server: StartServer, tmp_path: Path) -> None:
    def fetching() -> int:
        return len(our_threads("reverb-writer-prefetch"))

    lines = shard_lines(with_an_item_each(replay_server, FIFO, 3))
    file = ShardFile(tmp_path, *lines[:2])
    with rw.Client(file.target) as client:
        before = fetching()
        with rw.ReplayDataset(client, "replay", 8, timeout_s=60) as dataset:
            assert seen_in(dataset, 4) == {0, 1}
            eventually(lambda: dataset.stats().ready_samples >= 8)
        file.tell(client, *lines)
        rest = [items_of(batch).tolist() for batch in itertools.islice(dataset, 500)]
        assert 0 < len(rest) < 500
        assert not any(2 in batch for batch in rest)
        eventually(lambda: fetching() == before)


def test_a_server_that_starts_again_elsewhere_is_found_there(lone_server: StartServer, tmp_path: Path) -> None:
    servers = with_an_item_each(lone_server)
    file = ShardFile(tmp_path, *shard_lines(servers))
    with rw.ReplayDataset(file.target, "replay", 8, timeout_s=60) as dataset:
        assert seen_in(dataset) == {0, 1}
        servers[1].process.kill()
        elsewhere = lone_server(TABLE)
        insert_numbers(elsewhere.address, "replay", [2])
        file.path.write_text("\n".join(shard_lines([servers[0], elsewhere])))
        eventually(lambda: 2 in items_of(next(dataset)))
        stats = dataset.stats()
        assert (stats.left_out_servers, stats.server_restarts) == (0, 1)


def test_a_server_that_the_target_calls_lost_is_left_out(replay_server: StartServer) -> None:
    servers = with_an_item_each(replay_server)
    target = rw.shards.Target(
        (rw.shards.Shard("a", servers[0].address, "lost"), rw.shards.Shard("b", servers[1].address))
    )
    with rw.ReplayDataset(target, "replay", 8, timeout_s=60) as dataset:
        assert seen_in(dataset) == {1}
        assert dataset.stats().left_out_servers == 1
