"""The actor of a shard, without Ray and without a server."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest

import reverb_writer as rw
from reverb_writer.ray import shard_actor
from reverb_writer.ray.shard_report import ClusterSpec


def test_actor_ends_although_its_server_ends_before_the_actor_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may start the thread of the server, and end the server, before the constructor continues."""
    ray: Any = types.SimpleNamespace(
        get_runtime_context=lambda: types.SimpleNamespace(current_actor="actor"),
        util=types.SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1"),
        kill=lambda *_, **__: None,
    )
    monkeypatch.setitem(sys.modules, "ray", ray)
    codes: list[int] = []

    def at_once(target: Callable[[], None], name: str) -> None:
        target()

    monkeypatch.setattr(shard_actor, "start_thread", at_once)
    monkeypatch.setattr(shard_actor, "_OUTLIVES_S", 0.0)
    monkeypatch.setattr(os, "_exit", codes.append)
    shard = shard_actor.ReplayShard(ClusterSpec("experiment", (rw.TableConfig("replay"),), 1, "/no/python"), 0)
    assert codes == [1]
    assert shard.report().state == "failed"
