"""Calls to several servers at once, without a server."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from shard_feeds import NOW, table_info

from reverb_writer.deadline import Deadline
from reverb_writer.errors import ServerUnavailableError
from reverb_writer.shards.calls import sample_each
from reverb_writer.shards.server_set import ShardServer
from reverb_writer.shards.targets import Shard
from reverb_writer.tables.table_info import ServerInfo


def shard(name: str, size: int, *, fails: bool = False) -> ShardServer:
    """Return a shard whose items have its name; it answers, and may fail to give samples."""
    info = ServerInfo(1, {"replay": table_info(size=size)}, NOW)
    answer = SimpleNamespace(result=lambda: info)

    def sample(_: str, num_samples: int, __: Deadline) -> list[str]:
        if fails:
            raise ServerUnavailableError(name)
        return [name] * num_samples

    channel = SimpleNamespace(start_info=lambda _: answer, server_info=lambda _: info)
    server: Any = SimpleNamespace(address="localhost:1", channel=channel, sample=sample)
    return ShardServer(Shard(name, "localhost:1"), server)


def read(*shards: ShardServer) -> dict[str, list[Any]]:
    """Sample each shard as often as it has items."""
    connections: Any = SimpleNamespace(in_state=lambda *_: shards)
    return sample_each(connections, "replay", lambda _, info: info.tables["replay"].current_size, Deadline(30.0))


def test_each_server_gives_as_many_samples_as_are_wanted_of_it() -> None:
    assert read(shard("a", 2), shard("b", 0), shard("c", 1)) == {"a": ["a", "a"], "c": ["c"]}
    assert read(shard("a", 0)) == {}


def test_servers_that_fail_are_left_out_unless_all_do() -> None:
    assert read(shard("a", 2, fails=True), shard("b", 1)) == {"b": ["b"]}
    assert read(shard("a", 2, fails=True), shard("b", 0)) == {}
    with pytest.raises(ServerUnavailableError, match="a"):
        read(shard("a", 2, fails=True), shard("b", 1, fails=True))
