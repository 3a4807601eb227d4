"""`max_item_bytes`: a table tells it, and what is larger is refused before anything of it is sent."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from server_process import HostedServer

import reverb_writer as rw
from reverb_writer.client.single_item import one_item
from reverb_writer.deadline import Deadline
from reverb_writer.transport.channel import Channel
from reverb_writer.transport.insert_call import insert_items

StartServer = Callable[..., HostedServer]

LIMIT = 100
STEP = {"frame": np.zeros(4, np.uint8), "reward": np.float32(0)}  # 8 bytes, so that 12 steps fit


@pytest.fixture
def server(replay_server: StartServer) -> HostedServer:
    return replay_server(
        rw.TableConfig("limited", max_item_bytes=LIMIT),
        rw.TableConfig("smaller", max_item_bytes=50),
        rw.TableConfig("any"),
    )


@pytest.fixture
def client(server: HostedServer) -> Iterator[rw.Client]:
    with rw.Client(server.address, timeout_s=60) as client:
        yield client


def size(client: rw.Client, table: str = "limited") -> int:
    return client.server_info()[table].current_size


def test_table_tells_its_limit(client: rw.Client) -> None:
    assert {name: info.max_item_bytes for name, info in client.server_info().items()} == {
        "limited": 100,
        "smaller": 50,
        "any": 0,
    }


def test_item_is_refused_by_one_byte_too_many(client: rw.Client) -> None:
    data = {"rows": np.zeros((9, 10), np.uint8), "name": np.array(["éa", b"1234567"], object)}  # 90 and 3 + 7 bytes
    client.insert(data, {"limited": 1.0})
    expected = (
        r"table `limited`: the item takes 101 bytes uncompressed, expected at most 100, the table's `max_item_bytes`\. "
        r"Its largest leaf is `rows` with 90 bytes\."
    )
    with pytest.raises(rw.StructureError, match=expected):
        client.insert({**data, "name": np.array(["éa", b"12345678"], object)}, {"limited": 1.0})
    assert size(client) == 1
    client.insert({"rows": np.zeros(10**6, np.uint8)}, {"any": 1.0})


def test_of_two_tables_the_smaller_limit_counts_and_neither_gets_the_item(client: rw.Client) -> None:
    with pytest.raises(rw.StructureError, match=r"table `smaller`: the item takes 51 bytes uncompressed, .* 50"):
        client.insert({"x": np.zeros(51, np.uint8)}, {"limited": 1.0, "smaller": 1.0, "any": 1.0})
    assert [size(client, name) for name in ("limited", "smaller", "any")] == [0, 0, 0]


def test_windows_that_are_too_large_are_refused_at_the_first_step(server: HostedServer, client: rw.Client) -> None:
    with rw.TrajectoryObserver(server.address, "limited", 12) as observer:
        for _ in range(13):
            observer(STEP)
    assert size(client) == 2  # 96 bytes each
    client.reset("limited")
    with rw.TrajectoryObserver(server.address, "limited", 13) as observer:
        expected = r"table `limited`: an item of 13 steps takes 104 bytes .*largest leaf is `reward` with 52 bytes"
        with pytest.raises(rw.StructureError, match=expected):
            observer(STEP)
        assert observer.stats().steps == 0
        assert client.spec_of("limited") is None  # another structure may come


def test_mask_counts(server: HostedServer) -> None:
    with (
        rw.TrajectoryObserver(server.address, "limited", 12, end_of_episode="pad", mask=True) as observer,
        pytest.raises(rw.StructureError, match="an item of 12 steps takes 108 bytes"),
    ):
        observer(STEP)


def test_episode_that_becomes_too_large_is_refused_at_that_step(server: HostedServer, client: rw.Client) -> None:
    with rw.EpisodeObserver(server.address, "limited", 1000) as observer:
        for _ in range(12):
            observer(STEP)
        for _ in range(2):  # it stays so
            with pytest.raises(rw.StructureError, match="table `limited`: an item of 13 steps takes 104 bytes"):
                observer(STEP)
        assert observer.stats().steps == 12
        observer.reset()  # the 12 steps are an item
        for t in range(12):
            observer(STEP, end_of_episode=t == 11)
    assert size(client) == 2


def test_strings_count_by_their_length(server: HostedServer, client: rw.Client) -> None:
    with rw.TrajectoryObserver(server.address, "limited", 2, chunk_length=3) as observer:
        for length in (60, 32, 60, 32, 60):  # with a number of 4 bytes each: 100 for any two that follow each other
            observer({"text": "x" * length, "number": np.int32(0)})
        with pytest.raises(
            rw.StructureError, match=r"an item of 2 steps takes 101 bytes .*leaf is `text` with 93 bytes"
        ):
            observer({"text": "x" * 33, "number": np.int32(0)})
        observer({"text": "é" * 16, "number": np.int32(0)})
    assert size(client) == 5


def test_refused_step_of_one_environment_is_a_step_of_none(server: HostedServer, client: rw.Client) -> None:
    with rw.VectorObserver(server.address, "limited", 2, num_envs=2) as observer:
        for texts in (["a" * 50, "b"], ["a" * 50, "b"]):
            observer({"text": np.array(texts, object)}, end_of_episode=np.zeros(2, bool))
        with pytest.raises(rw.StructureError, match="an item of 2 steps takes 101 bytes"):
            observer({"text": np.array(["a" * 51, "b"], object)}, end_of_episode=np.zeros(2, bool))
        assert observer.stats().steps == 4
        observer({"text": np.array(["a" * 50, "c"], object)}, end_of_episode=np.zeros(2, bool))
    found = {str(list(sample.data["text"])) for sample in client.sample("limited", 100)}
    assert found == {str([one, two]) for one, two in ((b"a" * 50,) * 2, (b"b", b"b"), (b"b", b"c"))}


def test_windows_over_episodes_count_their_own_steps_only(server: HostedServer, client: rw.Client) -> None:
    with rw.SequenceObserver(server.address, "limited", 2) as observer:
        for number in range(30):
            observer({"text": "x" * 50}, end_of_episode=number % 7 == 6)
        with pytest.raises(rw.StructureError, match="an item of 2 steps takes 101 bytes"):
            observer({"text": "x" * 51})
    assert size(client) == 29


def test_client_that_does_not_ask_is_bounded_by_the_local_server_alone(server: HostedServer, client: rw.Client) -> None:
    def insert(columns: list[np.ndarray[tuple[int, ...], np.dtype[np.generic]]]) -> None:
        with contextlib.closing(Channel(server.address)) as channel:
            insert_items(channel, [one_item(columns, [False] * len(columns), {"limited": 1.0})], Deadline(20))

    insert([np.zeros((8, 10), np.uint8), np.array([b"x" * 20], object)])
    too_large = [np.zeros((8, 10), np.uint8), np.array([b"x" * 20, b"y"], object)]
    if server.kind == "local":
        with pytest.raises(
            rw.ReverbWriterError, match=r"takes 101 bytes, and table `limited` allows 100 .* column, 0, takes 80"
        ):
            insert(too_large)
        assert size(client) == 1
    else:
        insert(too_large)  # dm-reverb has no such limit
        assert size(client) == 2


def test_limit_is_saved(tmp_path: Path) -> None:
    with rw.LocalServer([rw.TableConfig("limited", max_item_bytes=LIMIT)]) as server:
        server.save(tmp_path)
    with rw.LocalServer.restore(tmp_path) as server, rw.Client(server.address) as client:
        assert client.server_info()["limited"].max_item_bytes == LIMIT
        with pytest.raises(rw.StructureError, match="`max_item_bytes`"):
            client.insert({"x": np.zeros(101, np.uint8)}, {"limited": 1.0})
