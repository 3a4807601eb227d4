"""Reading from real servers: what comes, in which order, once or again and again; and priorities set back."""

from __future__ import annotations

import os
import pickle
import threading
import time
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from call_forwarder import CallForwarder
from kinds import by_socket
from numbered import QUEUE, first_numbers, insert_numbers, write_steps
from reading import Serve
from server_process import StartServer
from waiting import eventually

import reverb_writer as rw
from reverb_writer.decoding import samples
from reverb_writer.protocol import messages
from reverb_writer.transport.channel import Channel
from reverb_writer.transport.sample_stream import SampleStream


def test_batches_are_the_windows_written_in_memory_that_is_reused(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(samples, "_MIN_REUSED_BYTES", 1)
    client = serve(rw.TableConfig("replay"))
    write_steps(client.address, "replay", 60)
    with rw.ReplayDataset(client, "replay", 32) as dataset:
        batches = [next(dataset) for _ in range(20)]
        starts = set()
        for batch in batches:
            a, b = batch.data["a"], batch.data["b"]
            assert (a.dtype, a.shape, b.dtype, b.shape) == (np.int64, (32, 4), np.float32, (32, 4, 2))
            np.testing.assert_array_equal(a, a[:, :1] + np.arange(4))
            np.testing.assert_array_equal(b, np.repeat(10 * a[..., None], 2, axis=-1))
            starts |= set(a[:, 0].tolist())
            assert (batch.info.table_sizes == 57).all()
            np.testing.assert_allclose(batch.info.probabilities, 1 / 57)
            assert batch.info.lengths.tolist() == [4] * 32
            assert batch.mask.all()
            assert batch.info.server == client.address
        assert starts <= set(range(57))
        assert len(starts) > 40
        assert len({batch.data["a"].__array_interface__["data"][0] for batch in batches}) == 20
        rows = [batch.data["a"][3] for batch in batches]  # a view of a part is enough to keep all
        del batch, batches, a, b
        for _ in range(20):
            found = next(dataset).data["a"]
            np.testing.assert_array_equal(found, found[:, :1] + np.arange(4))
            assert not any(np.shares_memory(found, row) for row in rows)
        del rows, found
        addresses = {next(dataset).data["a"].__array_interface__["data"][0] for _ in range(40)}
        assert len(addresses) < 40


def read_all(stream: SampleStream) -> list[int]:
    """Return how many samples came in each message, until nothing is in flight."""
    found = []
    while stream.num_in_flight:
        if samples := stream.read():
            found.append(len(samples))
    return found


def test_requests_are_answered_one_by_one_and_more_are_made_only_for_half_of_the_room(serve: Serve) -> None:
    address = serve(rw.TableConfig("table")).address
    insert_numbers(address, "table", range(6))
    with Channel(address) as channel:
        stream = SampleStream(channel, "table", channel.server_info(60.0), changed=lambda: None, removes_items=False)
        # If requests were joined, a reader would wait for the samples of all before it gets the first.
        for max_samples in (1, 2, 4, 8):
            stream.proceed(time.monotonic(), 0, max_samples)
        assert read_all(stream) == [1, 1, 2, 4]
        # A message of many small samples costs little more than one of few; a reader that has nothing waits for none.
        held = 8
        found = []
        for num_used in (2, 1, 2, 1):  # free room: 2, 1, 3, 4
            held -= num_used
            stream.proceed(time.monotonic(), held, 8)
            found.append(stream.num_in_flight)
        assert found == [2, 2, 2, 6]
        stream.close()


def test_queue_gives_everything_once_and_the_rest_when_it_is_taken_or_after_close(serve: Serve) -> None:
    client = serve(QUEUE)
    insert_numbers(client.address, "queue", range(7))
    dataset = rw.ReplayDataset(client, "queue", 3, max_in_flight_batches=3)
    assert first_numbers(next(dataset)) == [0, 1, 2]
    eventually(lambda: dataset.stats().ready_samples == 4)
    dataset.timeout_s = 0.5
    assert first_numbers(next(dataset)) == [3, 4, 5]
    with pytest.raises(rw.errors.ReplayTimeoutError, match="1 of 3 samples have arrived"):
        next(dataset)
    batch = dataset.poll()
    assert batch is not None
    assert first_numbers(batch) == [6]
    assert dataset.stats().ready_samples == 0
    insert_numbers(client.address, "queue", range(7, 12))
    dataset.timeout_s = 60
    assert first_numbers(next(dataset)) == [7, 8, 9]
    eventually(lambda: dataset.stats().ready_samples == 2)
    dataset.close()
    assert dataset.stats().ready_samples == 2
    assert [first_numbers(batch) for batch in dataset] == [[10, 11]]
    assert dataset.stats().ready_samples == 0
    dataset.close()


class SlowForwarder(CallForwarder):
    """Passes ten samples on a second."""

    def forward(self, method: str, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        for message in super().forward(method, requests, context):
            entries = messages.SampleStreamResponse.FromString(message).entries if "SampleStream" in method else ()
            for entry in entries:
                time.sleep(0.1)
                yield messages.SampleStreamResponse(entries=[entry]).SerializeToString()
            if not entries:
                yield message


def test_close_waits_no_longer_than_told_for_samples_in_flight(replay_server: StartServer) -> None:
    server = replay_server(QUEUE)
    insert_numbers(server.address, "queue", range(200))
    with SlowForwarder(server.port) as forwarder:
        dataset = rw.ReplayDataset(forwarder.address, "queue", 200, max_in_flight_batches=1, timeout_s=60)
        iter(dataset)  # begins to fetch
        eventually(lambda: dataset.stats().in_flight_samples > 0)
        dataset.close(1.0)
        eventually(lambda: dataset.stats().received_samples + dataset.stats().lost_samples == 200)
        assert dataset.stats().received_samples < 200  # all would have come within 20 s


def test_a_learner_that_went_without_a_sample_takes_none_with_it(serve: Serve) -> None:
    client = serve(QUEUE)
    dataset = rw.ReplayDataset(client.address, "queue", 3, timeout_s=0.3)
    with dataset, pytest.raises(rw.errors.ReplayTimeoutError):
        next(dataset)
    with pytest.raises(rw.errors.ReplayTimeoutError):
        next(client.sample("queue", 3, timeout_s=0.3))
    insert_numbers(client.address, "queue", range(5))
    assert client.server_info()["queue"].current_size == 5
    assert [int(sample.data[0][0]) for sample in client.sample("queue", 5)] == [0, 1, 2, 3, 4]


def test_single_pass_gives_what_is_there_in_order_or_by_priority_and_stops(serve: Serve) -> None:
    heap = rw.TableConfig("heap", 10, sampler="max_heap", max_times_sampled=1)
    client = serve(QUEUE, heap, rw.TableConfig("uniform"), rw.TableConfig("endless", sampler="fifo"))
    insert_numbers(client.address, "queue", range(5))
    with rw.ReplayDataset(client, "queue", 2, single_pass=True) as dataset:
        iter(dataset)
        insert_numbers(client.address, "queue", range(5, 8))
        assert [first_numbers(batch) for batch in dataset] == [[0, 1], [2, 3], [4]]
    for number in (2, 9, 4, 7):
        client.insert([np.array([number])], {"heap": float(number)})
    with rw.ReplayDataset(client, "heap", 3, single_pass=True) as dataset:
        assert [first_numbers(batch) for batch in dataset] == [[9, 7, 4], [2]]
    for table, told in (
        ("uniform", "`uniform` has 'uniform', 'fifo' and 0"),
        ("endless", "`max_times_sampled` is 1: `endless` has 'fifo', 'fifo' and 0"),
    ):
        with pytest.raises(rw.errors.SpecError, match=told):
            rw.ReplayDataset(client, table, 2, single_pass=True)


def test_each_single_pass_gives_the_items_of_its_beginning(serve: Serve) -> None:
    client = serve(QUEUE)
    with rw.ReplayDataset(client, "queue", 2, single_pass=True) as dataset:
        insert_numbers(client.address, "queue", range(3))  # after it was opened
        assert [first_numbers(batch) for batch in dataset] == [[0, 1], [2]]
        insert_numbers(client.address, "queue", range(3, 7))
        assert next(dataset, None) is None  # the pass has ended, and `iter` begins another one
        assert first_numbers(next(iter(dataset))) == [3, 4]
        insert_numbers(client.address, "queue", [7])
        assert [first_numbers(batch) for batch in dataset] == [[5, 6]]  # a pass that has not ended goes on
        assert [first_numbers(batch) for batch in dataset] == [[7]]
        assert list(dataset) == []
        insert_numbers(client.address, "queue", [8])
        assert first_numbers(next(iter(dataset))) == [8]
        stats = dataset.stats()
        assert (stats.samples, stats.received_samples, stats.batches) == (9, 9, 6)
        assert (stats.in_flight_samples, stats.ready_samples) == (0, 0)
    insert_numbers(client.address, "queue", [9])
    assert list(dataset) == []  # it is closed
    assert client.server_info()["queue"].current_size == 1


def test_pickled_dataset_is_opened_anew(serve: Serve) -> None:
    client = serve(rw.TableConfig("replay"))
    insert_numbers(client.address, "replay", [3])
    server = types.SimpleNamespace(address=client.address, lock=threading.Lock())  # as a server, it is not picklable
    with rw.ReplayDataset(server, "replay", 2) as dataset, rw.SliceDataset(client, "replay", 2, 1) as slices:
        stored = pickle.dumps((dataset, slices))
    of_dataset, of_slices = pickle.loads(stored)  # noqa: S301  # our own bytes
    with of_dataset, of_slices:
        assert first_numbers(next(of_dataset)) == [3, 3]
        assert len(next(of_slices).slices) == 2


class Numbers(rw.ReplayDataset):
    """A dataset with a constructor of its own."""

    def __init__(self, where: Any, *, size: int) -> None:
        super().__init__(where, "replay", size)


def test_subclass_with_a_constructor_of_its_own_is_pickled_as_such(serve: Serve) -> None:
    client = serve(rw.TableConfig("replay"))
    insert_numbers(client.address, "replay", [3])
    server = types.SimpleNamespace(address=client.address, lock=threading.Lock())
    with Numbers(server, size=2) as dataset:
        stored = pickle.dumps(dataset)
    with pickle.loads(stored) as copied:  # noqa: S301  # our own bytes
        assert type(copied) is Numbers
        assert first_numbers(next(copied)) == [3, 3]


WEIGHTS_BYTES = int(os.environ.get("REVERB_WRITER_WEIGHTS_BYTES", str(100 << 20)))  # `make fuzz` takes 1 GB


def test_samples_that_are_split_over_messages_come_whole(serve: Serve) -> None:
    client = serve(QUEUE)
    noise = np.random.default_rng(0)
    episodes = [noise.integers(256, size=(length, 300, 300), dtype=np.uint8) for length in (90, 3, 70)]
    with rw.EpisodeObserver(client, "queue", 100, chunk_length=7) as observer:
        for episode in episodes:
            for t, frame in enumerate(episode):
                observer({"frame": frame}, end_of_episode=t == len(episode) - 1)
    with rw.ReplayDataset(client, "queue", 3, collate="pad", max_cache_bytes=1 << 20) as dataset:
        data, info = next(dataset)
    assert info.lengths.tolist() == [90, 3, 70]
    for number, episode in enumerate(episodes):
        np.testing.assert_array_equal(data["frame"][number, : len(episode)], episode)


@by_socket
@pytest.mark.timeout(600)
def test_large_weights_come_as_they_were_published(replay_server: StartServer) -> None:
    server = replay_server(rw.TableConfig("weights", 1))
    rng = np.random.default_rng(0)
    part = rng.standard_normal(WEIGHTS_BYTES // 4 // 5, np.float32)
    with (
        rw.Variables(server.address, "weights", timeout_s=120) as learner,
        rw.Variables(server.address, "weights", timeout_s=120) as actor,
    ):
        learner.publish({f"layer{i}": part for i in range(5)})
        found = actor.latest()
        assert all(np.array_equal(found[f"layer{i}"], part) for i in range(5))
        with pytest.raises(rw.errors.StructureError, match="Publish it in parts"):
            learner.publish(np.broadcast_to(np.float64(0), (1 << 27) + 1))
