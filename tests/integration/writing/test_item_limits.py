"""`max_item_bytes` of an observer, which sends nothing of a larger item, and of a local server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from server_process import HostedServer, StartServer

import reverb_writer as rw

LIMIT = 100
STEP = {"frame": np.zeros(4, np.uint8), "reward": np.float32(0)}  # 8 bytes, so that 12 steps fit


@pytest.fixture
def server(replay_server: StartServer) -> HostedServer:
    return replay_server(rw.TableConfig("replay"))


@pytest.fixture
def client(server: HostedServer) -> Iterator[rw.Client]:
    with rw.Client(server.address, timeout_s=60) as client:
        yield client


def size(client: rw.Client) -> int:
    return client.server_info()["replay"].current_size


def test_windows_that_are_too_large_are_refused_at_the_first_step(server: HostedServer, client: rw.Client) -> None:
    with rw.TrajectoryObserver(server.address, "replay", 12, max_item_bytes=LIMIT) as observer:
        for _ in range(13):
            observer(STEP)
    assert size(client) == 2  # 96 bytes each
    with rw.TrajectoryObserver(server.address, "replay", 13, max_item_bytes=LIMIT) as observer:
        expected = (
            r"an item of 13 steps takes 104 bytes uncompressed, expected at most 100, the observer's "
            r"`max_item_bytes`\. Its largest leaf is `reward` with 4 bytes per step"
        )
        with pytest.raises(rw.errors.StructureError, match=expected):
            observer(STEP)
        assert observer.stats().steps == 0
    assert size(client) == 2


def test_mask_counts(server: HostedServer) -> None:
    with (
        rw.TrajectoryObserver(
            server.address, "replay", 12, end_of_episode="pad", mask=True, max_item_bytes=LIMIT
        ) as observer,
        pytest.raises(rw.errors.StructureError, match="an item of 12 steps takes 108 bytes"),
    ):
        observer(STEP)


def test_episode_that_becomes_too_large_is_refused_at_that_step(server: HostedServer, client: rw.Client) -> None:
    with rw.EpisodeObserver(server.address, "replay", 1000, max_item_bytes=LIMIT) as observer:
        for _ in range(12):
            observer(STEP)
        for _ in range(2):  # it stays so
            with pytest.raises(rw.errors.StructureError, match="an item of 13 steps takes 104 bytes"):
                observer(STEP)
        assert observer.stats().steps == 12
        observer.reset()  # the 12 steps are an item
        for t in range(12):
            observer(STEP, end_of_episode=t == 11)
    assert size(client) == 2


def test_strings_count_by_their_length(server: HostedServer, client: rw.Client) -> None:
    with rw.TrajectoryObserver(server.address, "replay", 2, chunk_length=3, max_item_bytes=LIMIT) as observer:
        for length in (60, 32, 60, 32, 60):  # with a number of 4 bytes each: 100 for any two that follow each other
            observer({"text": "x" * length, "number": np.int32(0)})
        with pytest.raises(
            rw.errors.StructureError,
            match=r"an item of 2 steps takes 101 bytes .*leaf is `text` with 33 bytes",
        ):
            observer({"text": "x" * 33, "number": np.int32(0)})
        observer({"text": "é" * 16, "number": np.int32(0)})
    assert size(client) == 5


def test_refused_step_of_one_environment_is_a_step_of_none(server: HostedServer, client: rw.Client) -> None:
    with rw.TrajectoryObserver(server.address, "replay", 2, num_envs=2, max_item_bytes=LIMIT) as observer:
        for texts in (["a" * 50, "b"], ["a" * 50, "b"]):
            observer({"text": np.array(texts, object)}, end_of_episode=np.zeros(2, bool))
        with pytest.raises(rw.errors.StructureError, match="an item of 2 steps takes 101 bytes"):
            observer({"text": np.array(["a" * 51, "b"], object)}, end_of_episode=np.zeros(2, bool))
        assert observer.stats().steps == 4
        observer({"text": np.array(["a" * 50, "c"], object)}, end_of_episode=np.zeros(2, bool))
    found = {str(list(sample.data["text"])) for sample in client.sample("replay", 100)}
    assert found == {str([one, two]) for one, two in ((b"a" * 50,) * 2, (b"b", b"b"), (b"b", b"c"))}


def test_windows_over_episodes_count_their_own_steps_only(server: HostedServer, client: rw.Client) -> None:
    with rw.SequenceObserver(server.address, "replay", 2, max_item_bytes=LIMIT) as observer:
        for number in range(30):
            observer({"text": "x" * 50}, end_of_episode=number % 7 == 6)
        with pytest.raises(rw.errors.StructureError, match="an item of 2 steps takes 101 bytes"):
            observer({"text": "x" * 51})
    assert size(client) == 29


@pytest.mark.parametrize("restored", [False, True])
def test_local_server_refuses_larger_items_from_anyone(tmp_path: Path, restored: bool) -> None:
    server = rw.LocalServer([rw.TableConfig("replay")], max_item_bytes=LIMIT)
    if restored:
        with server:
            server.save(tmp_path)
        server = rw.LocalServer.restore(tmp_path, max_item_bytes=LIMIT)
    rows = np.zeros((8, 10), np.uint8)
    with server, rw.Client(server.address) as client:
        client.insert([rows, np.array([b"x" * 20], object)], {"replay": 1.0})
        with pytest.raises(
            rw.errors.ReverbWriterError,
            match=r"takes 101 bytes, expected at most 100, the server's `max_item_bytes`; .* column, 0, takes 80",
        ):
            client.insert([rows, np.array([b"x" * 20, b"y"], object)], {"replay": 1.0})
        assert size(client) == 1
    with pytest.raises(rw.errors.SpecError, match="`max_item_bytes` must be >= 1, got 0"):
        rw.LocalServer([rw.TableConfig("replay")], max_item_bytes=0)
