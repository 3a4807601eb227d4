"""Several servers are sampled as one table: each item as often, and with the probability, as one server would."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from kinds import contents
from numbered import first_numbers, insert_numbers
from server_process import HostedServer, StartServer
from threads import our_threads
from waiting import eventually

import reverb_writer as rw
from reverb_writer.tables import Selector

pytestmark = contents


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
    return filled([replay_server(*TABLES) for _ in SIZES])


def filled(servers: Sequence[HostedServer]) -> Cluster:
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


@pytest.mark.parametrize("table", ["uniform", "prioritized"])
def test_a_dataset_samples_servers_of_1_10_and_100_items_as_one(cluster: Cluster, table: str) -> None:
    due = expected(table, cluster)
    with rw.ReplayDataset(cluster.addresses, table, 256, timeout_s=60) as dataset:
        batches = [next(dataset) for _ in range(150)]
    items = np.stack([batch.data[0][:, 0] for batch in batches])
    check_frequencies(items.ravel(), due)
    assert {len({int(np.searchsorted(np.cumsum(SIZES), item, "right")) for item in batch}) for batch in items} <= {2, 3}
    for batch in batches:
        np.testing.assert_allclose(batch.info.probabilities, due[batch.data[0][:, 0]], rtol=1e-9)
        assert (batch.info.table_sizes == NUM_ITEMS).all()
        assert batch.info.server == ""
    weights = (NUM_ITEMS * due[items[-1]]) ** -0.5
    np.testing.assert_allclose(batches[-1].info.importance_weights(0.5), weights / weights.max())


@pytest.mark.parametrize("table", ["uniform", "prioritized"])
def test_a_client_samples_them_as_one(cluster: Cluster, table: str) -> None:
    due = expected(table, cluster)
    with rw.Client(cluster.addresses, timeout_s=60) as client:
        samples = list(client.sample(table, 20_000))
    items = np.array([sample.data[0][0] for sample in samples])
    check_frequencies(items, due)
    np.testing.assert_allclose([sample.info.probability for sample in samples], due[items], rtol=1e-9)
    assert {sample.info.table_size for sample in samples} == {NUM_ITEMS}


@pytest.mark.parametrize("sampler", ["fifo", "lifo", "max_heap"])
def test_tables_with_an_order_stay_in_turns(replay_server: StartServer, sampler: Selector) -> None:
    servers = [replay_server(rw.TableConfig("ordered", 10, sampler)) for _ in range(2)]
    for number, server in enumerate(servers):
        with rw.Client(server.address, timeout_s=60) as client:
            for _ in range(1 + 3 * number):
                client.insert(np.array([number]), {"ordered": 1.0})
    with rw.ReplayDataset([server.address for server in servers], "ordered", 4, timeout_s=60) as dataset:
        batches = [next(dataset) for _ in range(4)]
    assert {batch.info.server: set(batch.data[0].ravel().tolist()) for batch in batches} == {
        server.address: {number} for number, server in enumerate(servers)
    }
    assert {int(size) for batch in batches for size in batch.info.table_sizes} == {1, 4}


def queues_of_1_and_50(replay_server: StartServer) -> list[HostedServer]:
    servers = [replay_server(rw.TableConfig("queue", max_times_sampled=1)) for _ in range(2)]
    insert_numbers(servers[0].address, "queue", [0])
    insert_numbers(servers[1].address, "queue", range(1, 51))
    return servers


def waits_for_room(dataset: rw.ReplayDataset) -> bool:
    """Return whether samples have come of which the first batch is ready, and others wait for their turn."""
    stats = dataset.stats()
    return stats.in_flight_samples == 0 and stats.ready_samples > 8


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


def test_priorities_of_samples_of_a_server_that_has_left_are_not_sent_to_others(
    replay_server: StartServer, tmp_path: Path
) -> None:
    servers = queues_of_1_and_50(replay_server)
    path = tmp_path / "shards"
    path.write_text(f"a {servers[0].address}\nb {servers[1].address}\n")
    with rw.Client(f"file:{path}") as client, rw.ReplayDataset(client, "queue", 4, timeout_s=60) as dataset:
        iter(dataset)  # begins to fetch
        eventually(lambda: waits_for_room(dataset))
        path.write_text(f"a {servers[0].address}\n")
        client.connections.refresh()
        batches = []
        while (batch := dataset.take(1.0)) is not None:
            batches.append(batch)
        of_b = sum(number > 0 for batch in batches for number in first_numbers(batch))
        assert of_b > 8
        for batch in batches:
            dataset.update_priorities(batch, np.ones(len(batch.info)))
        dataset.flush_priorities()
        stats = dataset.stats()
        assert (stats.gone_priority_updates, stats.priority_updates) == (of_b, stats.samples - of_b)


@pytest.mark.parametrize("sampler", ["fifo", rw.Prioritized(1.0)])
def test_nothing_is_left_of_servers_that_leave_and_return(
    replay_server: StartServer, tmp_path: Path, sampler: Selector
) -> None:
    servers = [replay_server(rw.TableConfig("replay", 100, sampler)) for _ in range(2)]
    for number, server in enumerate(servers):
        insert_numbers(server.address, "replay", [number] * 2)
    path = tmp_path / "shards"
    lines = [f"{name} {server.address}\n" for name, server in zip("ab", servers, strict=True)]
    path.write_text("".join(lines))
    with rw.Client(f"file:{path}") as client, rw.ReplayDataset(client, "replay", 4, timeout_s=60) as dataset:
        next(dataset)
        threads = our_threads()
        for text in (lines[0], "".join(lines)) * 3:
            path.write_text(text)
            client.connections.refresh()
            for _ in range(4):
                next(dataset)
        assert our_threads() == threads
        seen: list[rw.Batch] = []

        def returned() -> bool:
            seen.append(next(dataset))
            return 1 in first_numbers(seen[-1])

        eventually(returned)
        before = dataset.stats()
        dataset.update_priorities(seen[-1], np.ones(4))
        dataset.flush_priorities()
        assert dataset.stats().gone_priority_updates == before.gone_priority_updates
        assert dataset.stats().priority_updates > before.priority_updates
