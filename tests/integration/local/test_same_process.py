"""A local server and its clients in one process: no socket, and all that waits, ends or is interrupted as elsewhere.

Most of what clients do there is tested by all tests that take a server: see `conftest.py`.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from waiting import eventually

import reverb_writer as rw
from reverb_writer.protocol import messages
from reverb_writer.transport.channel import Channel
from reverb_writer.transport.pipes import ByteStream


@pytest.fixture
def server() -> Iterator[rw.LocalServer]:
    tables = [rw.TableConfig("replay"), rw.TableConfig.queue("queue", 5)]
    tables.append(rw.TableConfig("ratio", rate_limiter=rw.SampleToInsertRatio(2.0, 4, 8.0)))
    with rw.LocalServer(tables) as running:
        yield running


def write(observer: rw.TrajectoryObserver, numbers: range) -> None:
    for number in numbers:
        observer({"n": np.int64(number)}, end_of_episode=False)


def test_writing_reading_and_priorities_open_no_connection(server: rw.LocalServer) -> None:
    with rw.Client(server.address) as client:
        with (
            rw.TrajectoryObserver(client, "replay", 1) as observer,
            rw.ReplayDataset(client, "replay", 8) as dataset,
        ):
            write(observer, range(100))
            observer.flush()
            batch = next(dataset)
            dataset.update_priorities(batch, np.full(8, 3.0))
            dataset.flush_priorities()
        client.insert([np.arange(3)], {"queue": 1.0})
        assert len(list(client.sample("queue", 1))) == 1
        (shard,) = client.shards
        assert shard.channel._wire is None
        assert client.server_info()["replay"].current_size == 100


def test_another_process_reaches_it_over_its_port(server: rw.LocalServer) -> None:
    program = f"""
import numpy as np
import reverb_writer as rw
with rw.Client("{server.address}") as client:
    client.insert([np.arange(3)], {{"replay": 2.0}})
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=100)
    with rw.Client(server.address) as client:
        (sample,) = client.sample("replay", 1)
        assert (np.asarray(sample.data[0]).tolist(), sample.info.priority) == ([0, 1, 2], 2.0)


def test_a_limiter_lets_actor_and_learner_of_one_process_go_in_step(server: rw.LocalServer) -> None:
    written = threading.Thread(target=actor, args=(server.address, 300))
    with rw.ReplayDataset(server.address, "ratio", 4, timeout_s=60) as dataset:
        written.start()
        for _ in range(120):
            next(dataset)
        dataset.close()
    with rw.Client(server.address) as client:
        while written.is_alive():  # it waits for samples that the dataset had not asked for
            with contextlib.suppress(rw.errors.ReplayTimeoutError):  # it has written all, and is about to end
                list(client.sample("ratio", 2, timeout_s=1.0))
        info = client.server_info()["ratio"].rate_limiter
        assert info.num_inserts == 300


def actor(address: str, num_steps: int) -> None:
    with rw.TrajectoryObserver(address, "ratio", 1, timeout_s=60) as observer:
        write(observer, range(num_steps))


def test_a_server_that_starts_again_at_its_port_gets_what_was_not_confirmed() -> None:
    tables = [rw.TableConfig("replay", rate_limiter=rw.SampleToInsertRatio(1.0, 1, 5.0))]
    first = rw.LocalServer(tables)
    with rw.TrajectoryObserver(first.address, "replay", 1, timeout_s=60) as observer:
        write(observer, range(20))
        eventually(lambda: bool(observer.stats().acknowledged_items))
        confirmed = observer.stats().acknowledged_items
        first.close()
        with rw.LocalServer([rw.TableConfig("replay")], first.port) as second:
            observer.flush()
            with rw.Client(second.address) as client:
                assert client.server_info()["replay"].current_size == 20 - confirmed
            assert observer.stats().reconnects == 1


def test_a_channel_that_is_closed_or_sent_elsewhere_ends_its_streams(server: rw.LocalServer) -> None:
    request = messages.SampleStreamRequest(table="replay", num_samples=1).SerializeToString()
    with Channel(server.address) as channel:
        streams = [ByteStream(channel, messages.SAMPLE_STREAM) for _ in range(2)]
        streams[0].send(request)
        channel.redirect("127.0.0.1:1")
        with pytest.raises(rw.errors.ServerUnavailableError, match="has moved"):
            streams[0].read()
        channel.redirect(server.address)
        stream = ByteStream(channel, messages.SAMPLE_STREAM)
        stream.send(request)
    with pytest.raises(rw.errors.ClosedError):
        stream.read()
    eventually(lambda: not server._store.tables["replay"]._requests)


def test_a_reader_that_does_not_read_bounds_what_is_drawn_for_it(server: rw.LocalServer) -> None:
    with Channel(server.address) as channel, rw.Client(server.address) as client:
        client.insert([np.random.default_rng(0).random(100_000)], {"replay": 1.0})  # 800 kB
        stream = ByteStream(channel, messages.SAMPLE_STREAM)
        num_samples = 100
        stream.send(messages.SampleStreamRequest(table="replay", num_samples=num_samples).SerializeToString())
        eventually(lambda: client.server_info()["replay"].rate_limiter.num_samples > 15)
        assert client.server_info()["replay"].rate_limiter.num_samples < 40
        come = 0
        while come < num_samples:
            message = stream.read()
            assert not isinstance(message, bytes)
            come += len(message.samples)
        assert come == num_samples
        stream.cancel()
