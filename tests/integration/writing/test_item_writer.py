"""`ItemWriter` on a real server: whole items of any lengths come back as written, once each; limits, waits, servers."""

from __future__ import annotations

import pickle
import threading
import time
from collections import Counter
from typing import Any

import numpy as np
import pytest
from forwarder import Forwarder
from reading import Place, Serve, fifo, read_column
from server_process import HostedServer, StartServer

import reverb_writer as rw


def numbered(number: int, length: int = 3) -> dict[str, Any]:
    return {"tokens": np.full(length, number, np.int32), "version": number}


def write_many(writer: rw.ItemWriter, length: int = 3) -> None:
    """Write items of incompressible numbers until a call is refused, at most a hundred."""
    rng = np.random.default_rng(0)
    for number in range(100):
        writer.write({"tokens": rng.integers(0, 1 << 31, length).astype(np.int32), "version": number})


def versions(client: rw.Client, table: str) -> list[Any]:
    """Take out all items of a table, and return their numbers, oldest first."""
    return read_column(client, table, 1)


def test_nests_of_any_lengths_and_dtypes_come_back_as_written(place: Place) -> None:
    items: list[dict[str, Any]] = [
        {
            "prompt": np.arange(number + 1, dtype=np.int32),
            "answers": (np.ones((2 * number + 1, 2), np.float16), [np.array([number % 2 == 0])]),
            "text": np.array([f"ä{number}", ""]),
            "reward": np.float32(number / 2),
            "version": number,
        }
        for number in range(50)
    ]
    with rw.ItemWriter(place.client, ["a", "b"]) as writer:
        for item in items:
            writer.write(item, priority=2.0)
        writer.flush()
        stats = writer.stats()
    assert (stats.items, stats.acknowledged_items, stats.pending_items, stats.steps) == (100, 100, 0, 0)
    for table in ("a", "b"):
        samples = list(place.client.sample(table, 50))
        assert [sample.info.priority for sample in samples] == [2.0] * 50
        for sample, item in zip(samples, items, strict=True):
            data = sample.data
            np.testing.assert_array_equal(data["prompt"], item["prompt"], strict=True)
            np.testing.assert_array_equal(data["answers"][0], item["answers"][0], strict=True)
            np.testing.assert_array_equal(data["answers"][1][0], item["answers"][1][0], strict=True)
            assert data["text"].tolist() == [text.encode() for text in item["text"]]
            assert (data["reward"].shape, float(data["reward"])) == ((), item["reward"])
            assert (data["version"].shape, int(data["version"])) == ((), item["version"])
            assert sample.kinds is None


def test_lists_of_numbers_are_one_leaf_and_arrays_may_change_after_the_call(place: Place) -> None:
    tokens = np.array([5, 6], np.int32)
    with rw.ItemWriter(place.client, "a") as writer:
        for ids in ([1, 2, 3], [4]):
            writer.write({"ids": ids, "tokens": tokens, "pair": [tokens, tokens[:1]]})
            tokens += 10
    one, two = place.client.sample("a", 2)
    assert (one.data["ids"].tolist(), two.data["ids"].tolist()) == ([1, 2, 3], [4])
    assert (one.data["tokens"].tolist(), two.data["tokens"].tolist()) == ([5, 6], [15, 16])
    assert two.data["pair"][1].tolist() == [15]


def test_items_of_other_structures_are_stored_with_their_own_spec(place: Place) -> None:
    with rw.ItemWriter(place.client, "a") as writer:
        for item in ({"x": np.zeros(2)}, {"x": np.zeros(2, int)}, {"y": np.zeros((1, 3)), "x": 1}, np.arange(3)):
            writer.write(item)
    x, of_int, two, bare = [sample.data for sample in place.client.sample("a", 4)]
    assert (x["x"].dtype, of_int["x"].dtype, two["y"].shape, two["x"].shape) == (float, int, (1, 3), ())
    assert bare[0].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("item", "text"),
    [
        ({"a": np.zeros((0, 3))}, r"leaf `a`: shape \(0, 3\), expected \[T, ...\] with T >= 1"),
        ({"a": [], "b": 1}, r"leaf `a`: shape \(0,\)"),
        ({}, "at least one leaf"),
        ({"a": np.array([object()])}, "object array with an element of type object"),
    ],
)
def test_items_that_cannot_be_stored_are_refused_and_change_nothing(place: Place, item: Any, text: str) -> None:
    with rw.ItemWriter(place.client, "a") as writer:
        for _ in range(2):  # the second time, a structure is known
            with pytest.raises(rw.errors.StructureError, match=text):
                writer.write(item)
            writer.write({"a": np.zeros((1, 3)), "version": 1})
        with pytest.raises(rw.errors.SpecError, match="priority"):
            writer.write({"a": np.zeros(1)}, priority=-1)
        assert writer.stats().items == 2
    assert place.client.server_info()["a"].current_size == 2


def test_items_must_match_the_signature_of_the_table(client: rw.Client) -> None:
    with (
        rw.ItemWriter(client, "signed") as writer,
        pytest.raises(rw.errors.StructureError, match="table `signed`"),
    ):
        writer.write({"a": np.zeros(3)})


def test_items_are_stored_once_when_the_connection_breaks_again_and_again(place: Place) -> None:
    forwarder = Forwarder(int(place.address.rpartition(":")[2]))
    try:
        with rw.ItemWriter(forwarder.address, "a", timeout_s=60) as writer:
            for number in range(400):
                writer.write(numbered(number, 500))
                if number % 100 == 50:
                    writer.flush()  # there is a connection
                elif number % 100 == 70:
                    forwarder.cut()
            writer.flush()
            stats = writer.stats()
    finally:
        forwarder.close()
    assert versions(place.client, "a") == list(range(400))
    assert (stats.acknowledged_items, stats.dropped_items) == (400, 0)
    assert stats.reconnects >= 1


def test_a_full_queue_refuses_items_and_keeps_the_order(serve: Serve) -> None:
    client = serve(rw.TableConfig.queue("queue", 2))
    with rw.ItemWriter(client, "queue", on_block="raise", max_in_flight_items=3) as writer:
        with pytest.raises(rw.errors.ReplayTimeoutError, match="`queue`"):
            write_many(writer)
        written = writer.stats().items
        assert 3 <= written <= 5  # two in the queue, three in flight
        got = [int(sample.data["version"]) for sample in client.sample("queue", written)]
        writer.flush()
        writer.write(numbered(written))
        writer.flush()
        got += [int(sample.data["version"]) for sample in client.sample("queue", 1)]
    assert got == list(range(written + 1))


def test_bytes_in_flight_are_bounded(serve: Serve) -> None:
    client = serve(rw.TableConfig.queue("queue", 1))
    with rw.ItemWriter(client, "queue", on_block="raise", max_in_flight_bytes=1_000_000) as writer:
        with pytest.raises(rw.errors.ReplayTimeoutError):
            write_many(writer, 75_000)
        written = writer.stats().items
        assert 4 <= written <= 6  # one in the queue, four until a million bytes are in flight
        assert writer.stats().pending_bytes < 1_600_000
        assert len(list(client.sample("queue", written))) == written


def test_one_item_may_be_larger_than_the_bound(place: Place) -> None:
    with rw.ItemWriter(place.client, "a", max_in_flight_bytes=1000) as writer:
        for value in range(3):
            writer.write({"x": np.full(5_000_000, value, np.uint8)})
    assert [sample.data["x"][-1] for sample in place.client.sample("a", 3)] == [0, 1, 2]


def test_two_servers_share_the_items(replay_server: StartServer) -> None:
    servers: list[HostedServer] = [replay_server(fifo("replay")) for _ in range(2)]
    with rw.ItemWriter([server.address for server in servers], "replay", timeout_s=60) as writer:
        for number in range(60):
            writer.write(numbered(number))
            writer.flush()  # a request per item, and each request has the choice of a server
        assert writer.stats().acknowledged_items == 60
    found = []
    for server in servers:
        with rw.Client(server.address, timeout_s=60) as client:
            found.append(versions(client, "replay"))
    assert Counter(found[0] + found[1]) == Counter(range(60))
    assert min(map(len, found)) >= 10  # each has half on average


def test_a_queue_gives_each_item_to_one_of_several_learners_with_its_version(serve: Serve) -> None:
    """Groups: the answers to one prompt are one item, so they come together, and once."""
    client = serve(rw.TableConfig.queue("groups", 20))
    seen: list[list[int]] = [[], []]

    def learn(into: list[int]) -> None:
        with rw.ReplayDataset(client.address, "groups", 1, collate="pad") as dataset:
            while len(seen[0]) + len(seen[1]) < 200:  # a batch that waits in the other one is not known here
                if (batch := dataset.poll()) is None:
                    time.sleep(0.01)
                    continue
                (version,) = batch.data["version"].tolist()
                assert batch.data["answers"].tolist() == [[[version] * 3] * (1 + version % 7)]
                into.append(version)

    threads = [threading.Thread(target=learn, args=(into,)) for into in seen]
    for thread in threads:
        thread.start()
    with rw.ItemWriter(client, "groups", timeout_s=60) as writer:
        for number in range(200):
            answers = np.full((1 + number % 7, 3), number, np.int32)  # [T, answers to the prompt]
            writer.write({"answers": answers, "version": number})
        for thread in threads:
            thread.join(60)
        assert writer.stats().acknowledged_items == 200
    assert Counter(seen[0] + seen[1]) == Counter(range(200))
    assert seen[0]
    assert seen[1]


def test_a_call_ends_with_the_run(serve: Serve) -> None:
    client, has_ended = serve(rw.TableConfig.queue("queue", 1)), threading.Event()
    writer = rw.ItemWriter(client, "queue", max_in_flight_items=1, until=has_ended.is_set, timeout_s=60)
    threading.Timer(0.5, has_ended.set).start()
    with pytest.raises(rw.errors.FinishedError):
        write_many(writer)
    writer.close()


def test_a_closed_writer_refuses_items_and_can_be_opened_again(place: Place) -> None:
    writer = rw.ItemWriter(place.client, "a")
    writer.write(numbered(1))
    writer.close()
    writer.close()
    with pytest.raises(rw.errors.ClosedError, match="the item writer is closed"):
        writer.write(numbered(2))
    writer.open()
    writer.write(numbered(3))
    assert repr(writer).startswith(f"<ItemWriter of a at {place.address}: 2 items")
    writer.close()
    assert versions(place.client, "a") == [1, 3]
    assert writer.stats().acknowledged_items == 2


def test_a_writer_cannot_be_sent_to_another_process(place: Place) -> None:
    with (
        rw.ItemWriter(place.client, "a") as writer,
        pytest.raises(rw.errors.ClosedError, match="an item writer cannot be sent to another process"),
    ):
        pickle.dumps(writer)


def test_unknown_tables_and_options_are_refused(place: Place) -> None:
    with pytest.raises(rw.errors.StructureError, match="nowhere"):
        rw.ItemWriter(place.client, "nowhere")
    with pytest.raises(rw.errors.SpecError, match="`table`"):
        rw.ItemWriter(place.client, ["a", "a"])
    options: Any = {"chunk_length": 2}
    with pytest.raises(TypeError, match="chunk_length"):
        rw.ItemWriter(place.client, "a", **options)
