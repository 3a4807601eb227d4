"""A table on several servers for a reader, on servers of this process: priorities, time-outs, batches."""

from __future__ import annotations

import contextlib
import time
from types import SimpleNamespace

import numpy as np
import pytest
from numbered import QUEUE, insert_numbers

import reverb_writer as rw
from reverb_writer.reading.priority_updates import PriorityUpdates
from reverb_writer.reading.read_options import ReadOptions
from reverb_writer.shards.table_source import ShardedTable
from reverb_writer.tables import SelectorName

PRIORITIZED = rw.TableConfig("replay", 100, rw.Prioritized(1.0))


def test_time_out_counts_the_samples_of_the_server_with_the_most() -> None:
    with rw.LocalServer([QUEUE]) as one, rw.LocalServer([QUEUE]) as other:
        insert_numbers(one.address, "queue", [1, 2, 3])
        insert_numbers(other.address, "queue", [4])
        with (
            rw.ReplayDataset([one.address, other.address], "queue", 4, timeout_s=3) as dataset,
            pytest.raises(rw.errors.ReplayTimeoutError, match=r"within 3\.\d s, 3 of 4 samples have arrived"),
        ):
            next(dataset)


@pytest.mark.parametrize(("sampler", "num_samples"), [("uniform", 4), ("fifo", 8)])
def test_first_samples_of_servers_that_are_drawn_are_one_batch_of_each(sampler: SelectorName, num_samples: int) -> None:
    """Before the first draw no share is known; together they would be far more than two times the limit."""
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(rw.LocalServer([rw.TableConfig("replay", 9, sampler)])) for _ in range(3)]
        for server in servers:
            insert_numbers(server.address, "replay", [1])
        client = stack.enter_context(rw.Client([server.address for server in servers]))
        options = ReadOptions(max_in_flight_batches=2)
        feed = stack.enter_context(
            contextlib.closing(ShardedTable(client.connections, "replay", 4, options, 60).open(60))
        )
        feed.proceed(time.monotonic(), 0)
        requested = [one.feed.num_in_flight + one.num_waiting for one in feed.present]
        assert requested == [num_samples] * 3


def test_padded_batch_of_several_servers_has_the_mask_of_its_rows() -> None:
    with rw.LocalServer([PRIORITIZED]) as one, rw.LocalServer([PRIORITIZED]) as other:
        servers = [one.address, other.address]
        with rw.Client(servers) as client:
            for rows in ([1, 2], [3]):
                client.insert([np.array(rows)], {"replay": 1.0})
        with rw.ReplayDataset(servers, "replay", 8, collate="pad", timeout_s=60) as dataset:
            batch = next(dataset)
    np.testing.assert_array_equal(batch.mask, batch.data[0] != 0)


def test_priorities_of_lost_servers_are_counted_and_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    with (
        rw.LocalServer([PRIORITIZED]) as one,
        rw.LocalServer([PRIORITIZED]) as other,
        rw.Client([one.address, other.address]) as client,
    ):
        source = ShardedTable(client.connections, "replay", 1, ReadOptions(), 60)
        updates = PriorityUpdates(client.server_info()["replay"], source.set_priorities)
        insert_numbers(other.address, "replay", [0])
        unknown = next(client.sample("replay", 1)).info.key  # its server is not remembered
        first, second = client.shards
        source._owners.remember([1, 2], first.name)
        source._owners.remember([3], second.name)
        for lost, keys, counts in (  # the counts after it: gone and sent
            ([], [1, 2, 3], (0, 3)),
            ([first], [1, 3, unknown], (1, 5)),
            ([first], [2], (2, 5)),
            ([first, second], [1, unknown], (4, 5)),
        ):
            names = {server.name for server in lost}
            source._feed = SimpleNamespace(unreachable=lambda names=names: names)  # type: ignore[assignment]  # the newest
            updates.put(np.array(keys, np.uint64), np.full(len(keys), 2.0))
            updates.flush(60)
            assert (updates.num_gone, updates.num_sent) == counts
        assert next(client.sample("replay", 1)).info.priority == 2
        assert len([text for text in caplog.messages if "`replay` are not sent to unreachable servers" in text]) == 1
        updates.close(60)
