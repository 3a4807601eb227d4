"""A client follows its target: servers move, come and go, and the source may be gone."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
import pickle
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from forwarder import Forwarder
from numbered import QUEUE, insert_numbers, write_numbers
from ports import free_port
from shard_files import ShardFile, shard_lines
from threads import soon
from waiting import eventually

import reverb_writer as rw
from reverb_writer.shards import server_set

TABLE = rw.TableConfig("replay", 1000)


class Source:
    """Tells what it is told to tell."""

    def __init__(self, target: rw.shards.Target) -> None:
        self.answer: rw.shards.Target | Exception | None = target

    def look_up(self, timeout_s: float) -> rw.shards.Target:
        assert timeout_s > 0
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer  # type: ignore[return-value]  # None is what a source must not return


@pytest.fixture
def start() -> Iterator[Callable[[], rw.LocalServer]]:
    with contextlib.ExitStack() as servers:
        yield lambda: servers.enter_context(rw.LocalServer([TABLE]))


def sizes(client: rw.Client) -> list[int]:
    return [shard.channel.server_info(10.0).tables["replay"].current_size for shard in client.shards]


def test_a_shard_that_moves_keeps_its_name_and_its_connection(
    start: Callable[[], rw.LocalServer], tmp_path: Path
) -> None:
    servers = [start(), start()]
    file = ShardFile(tmp_path, *shard_lines(servers))
    with rw.Client(file.target) as client:
        (first, second) = client.shards
        assert (first.name, second.name) == ("a", "b")
        servers[1].close()
        file.tell(client, *shard_lines([servers[0], start()]))
        assert client.shards == (first, second)
        assert client.shards[1].address == second.address != servers[1].address
        client.insert(np.zeros(1), {"replay": 1.0})
        client.insert(np.zeros(1), {"replay": 1.0})
        assert sizes(client) == [1, 1]


def test_connections_to_shards_that_have_left_are_closed_once_nothing_uses_them(
    start: Callable[[], rw.LocalServer],
) -> None:
    """Twenty pods come under new names, one after the other, while an observer has written to the first."""
    with contextlib.ExitStack() as stack:
        port = int(start().address.rpartition(":")[2])
        pods = [stack.enter_context(Forwarder(port)) for _ in range(20)]
        source = Source(rw.shards.Target((rw.shards.Shard("0", pods[0].address),)))
        client = stack.enter_context(rw.Client(source))
        observer = rw.TrajectoryObserver(client, "replay", 1)
        observer({"n": np.int64(0)})
        observer.flush()
        for number, pod in enumerate(pods):
            source.answer = rw.shards.Target((rw.shards.Shard(str(number), pod.address),))
            client.connections.refresh()
            assert len(sizes(client)) == 1
        # An observer that has nothing to do keeps the target that it saw last.
        eventually(lambda: sum(pod.is_connected for pod in pods[:-1]) <= 1)
        write_numbers(observer, range(1, 10))
        observer.close()
        assert sizes(client) == [10]
        del observer
        gc.collect()
        eventually(lambda: [pod.is_connected for pod in pods] == [*[False] * 19, True])


def test_what_is_in_flight_goes_to_the_new_address(tmp_path: Path) -> None:
    path = tmp_path / "shards"
    server = rw.LocalServer([TABLE])
    path.write_text(f"a {server.address}")
    with (
        rw.Client(f"file:{path}", timeout_s=60) as client,
        rw.TrajectoryObserver(client, "replay", 1, on_block="raise") as observer,
    ):
        write_numbers(observer, range(10))
        observer.flush()
        server.save(tmp_path / "saved")
        server.close()
        write_numbers(observer, range(10, 20))
        with rw.LocalServer.restore(tmp_path / "saved") as restored:
            path.write_text(f"a {restored.address}")
            observer.flush()
            with rw.Client(restored.address) as reader, rw.ReplayDataset(reader, "replay", 20) as dataset:
                assert reader.server_info()["replay"].current_size == 20
                seen = {int(number) for _ in range(60) for number in next(dataset).data["n"].ravel()}
            assert seen == set(range(20))
            observer.close()


def test_a_client_goes_on_with_the_last_target_while_the_source_is_gone(
    start: Callable[[], rw.LocalServer], caplog: pytest.LogCaptureFixture
) -> None:
    known = rw.shards.Target((rw.shards.Shard("a", start().address),))
    source = Source(known)
    with rw.Client(source) as client, caplog.at_level(logging.INFO):
        source.answer = RuntimeError("the control store is gone")
        for _ in range(3):
            client.connections.refresh()
        (line,) = [line for line in caplog.messages if "control store is gone" in line]
        assert "keeps 1 shards: a at" in line
        client.insert(np.zeros(1), {"replay": 1.0})
        source.answer = rw.shards.Target((rw.shards.Shard("b", start().address), *known.shards))
        client.connections.refresh()
        assert [shard.name for shard in client.shards] == ["b", "a"]
        assert sizes(client) == [0, 1]


def test_targets_are_followed_after_one_that_could_not_be(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    near, other, far = (
        rw.shards.Shard("near", f"unix:{tmp_path}/near"),
        rw.shards.Shard("other", f"unix:{tmp_path}/other"),
        rw.shards.Shard("far", "localhost:1"),
    )
    source = Source(rw.shards.Target((near,)))

    def is_said(words: str) -> bool:
        client.connections.refresh_soon()
        return sum(words in line and "keeps 1 shards: near" in line for line in caplog.messages) == 1

    with rw.Client(source, token="t0ken") as client:  # noqa: S106  # of this test
        source.answer = rw.shards.Target((near, far))
        eventually(lambda: is_said("`token` would travel to localhost:1 in plain text"))
        source.answer = None
        eventually(lambda: is_said("must return a `Target`, got None"))
        assert client.connections.target == rw.shards.Target((near,))
        source.answer = rw.shards.Target((near, other))
        client.connections.refresh_soon()
        eventually(lambda: [shard.name for shard in client.shards] == ["near", "other"])
    source.answer = None
    with pytest.raises(rw.errors.SpecError, match="must return a `Target`, got None"):
        rw.Client(source)


def test_a_client_is_unpickled_while_the_source_is_gone(start: Callable[[], rw.LocalServer], tmp_path: Path) -> None:
    path = tmp_path / "shards"
    path.write_text(f"a {start().address}")
    with rw.Client(rw.shards.TargetFile(str(path))) as client:
        path.unlink()
        with pickle.loads(pickle.dumps(client)) as copied:  # noqa: S301  # our own bytes
            assert copied.connections.target == client.connections.target
            assert sizes(copied) == [0]
    with pytest.raises(rw.errors.ServerUnavailableError, match="cannot be read"):
        rw.Client(f"file:{path}", timeout_s=0.3)


def test_shards_that_are_lost_are_not_asked_and_those_that_drain_get_no_items(
    start: Callable[[], rw.LocalServer],
) -> None:
    shards = (rw.shards.Shard("up", start().address), rw.shards.Shard("full", start().address, "draining"))
    with rw.Client(rw.shards.Target((*shards, rw.shards.Shard("gone", "localhost:1", "lost"))), timeout_s=20) as client:
        for _ in range(4):
            client.insert(np.zeros(1), {"replay": 1.0})
        assert client.server_info()["replay"].current_size == 4
        assert [shard.channel.server_info(10.0).tables["replay"].current_size for shard in client.shards[:2]] == [4, 0]


def test_samples_come_from_the_servers_that_have_some() -> None:
    with rw.LocalServer([QUEUE]) as empty, rw.LocalServer([QUEUE]) as other:
        insert_numbers(other.address, "queue", [1, 2])
        with rw.Client([empty.address, other.address], timeout_s=5) as client:
            assert [sample.data[0].tolist() for sample in client.sample("queue", 2)] == [[1], [2]]


def test_servers_that_do_not_answer_yet_are_asked_until_one_does() -> None:
    port = free_port()
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(rw.Client([f"localhost:{port}", "localhost:1"], timeout_s=60))

        def start() -> None:
            with rw.Client(stack.enter_context(rw.LocalServer([TABLE], port))) as writer:
                writer.insert([np.arange(2)], {"replay": 1.0})

        with soon(start, 0.5):
            assert next(client.sample("replay", 1)).data[0].tolist() == [0, 1]


def test_observer_gives_up_a_shard_that_the_target_calls_lost_once_although_it_answers(
    start: Callable[[], rw.LocalServer],
) -> None:
    one, other = rw.shards.Shard("a", start().address), rw.shards.Shard("b", start().address)
    source, patience_s = Source(rw.shards.Target((one, other))), 2.0  # a busy machine may keep a server from confirming
    with rw.Client(source) as client, rw.TrajectoryObserver(client, "replay", 1, patience_s=patience_s) as observer:
        observer({"n": np.int64(0)}, end_of_episode=True)
        source.answer = rw.shards.Target((dataclasses.replace(one, state="lost"), other))
        client.connections.refresh()
        eventually(lambda: observer.stats().lost_shards == 1)
        until = time.monotonic() + 2.5 * patience_s
        while time.monotonic() < until:  # it is asked twice in `patience_s`, and answers
            observer({"n": np.int64(0)}, end_of_episode=True)
            observer.flush()
        stats = observer.stats()
        assert (stats.lost_shards, stats.items) == (1, stats.acknowledged_items + stats.dropped_items)


def test_cause_is_told_although_a_pause_took_longer_than_the_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: time.sleep(0.6))  # on a busy machine
    monkeypatch.setattr(server_set, "time", clock)
    with pytest.raises(rw.errors.ServerUnavailableError, match="cannot be read"):
        rw.Client("file:/no/such/file", timeout_s=0.5)
