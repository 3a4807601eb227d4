"""What names the servers of a replay, which of them an actor chooses, and what a client refuses."""

from __future__ import annotations

import collections
import functools
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reading import fifo, read_column

import reverb_writer as rw
from reverb_writer.client.server_calls import Server
from reverb_writer.shards.targets import rank_shards, source_of, writer_name


def test_a_file_tells_names_addresses_and_states_and_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "shards"
    path.write_text("# two servers\nlocalhost:8000\n\nsecond  localhost:8001 draining  # until Friday\n")
    source = source_of(f"file:{path}")
    assert source == rw.shards.TargetFile(str(path))
    assert source.look_up(1.0).shards == (
        rw.shards.Shard("localhost:8000", "localhost:8000"),
        rw.shards.Shard("second", "localhost:8001", "draining"),
    )
    path.write_text("second unix:/run/replay\n")
    assert source.look_up(1.0).shards == (rw.shards.Shard("second", "unix:/run/replay"),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a localhost:8000\na localhost:8001", "different ones, got a, a"),
        ("localhost:8000\nx y", "line 2: `address` must be"),
        ("a localhost:8000 gone", "line 1: `state` of shard a must be one of 'up', 'draining', 'lost', got 'gone'"),
        ("a localhost:8000 up down", "line 1: .* got 'down'"),
        ("# nothing", "names no shard"),
    ],
)
def test_a_file_that_cannot_be_right_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "shards"
    path.write_text(text)
    with pytest.raises(rw.errors.SpecError, match=message):
        rw.shards.TargetFile(str(path)).look_up(1.0)


def test_a_file_that_is_not_there_is_no_bad_argument(tmp_path: Path) -> None:
    with pytest.raises(rw.errors.ServerUnavailableError, match="cannot be read"):
        rw.shards.TargetFile(str(tmp_path / "none")).look_up(1.0)


@pytest.mark.parametrize(
    "address",
    [
        "",
        "localhost",
        "http://localhost:8000",
        "localhost:port",
        ":8000",
        "localhost:8000\n",
        "a:8000,b:8000",
        "a:0",
        "a:65536",
        8000,
        None,
    ],
)
def test_address_that_is_none_is_refused(address: Any) -> None:
    with pytest.raises(rw.errors.SpecError, match="`address` must be"):
        rw.Client(address)


@pytest.mark.parametrize("address", [[], ["localhost:1", "localhost:1"], "localhost", 3])
def test_what_is_no_target_is_refused(address: Any) -> None:
    with pytest.raises(rw.errors.SpecError):
        source_of(address)


def test_anything_that_has_an_address_or_a_target_names_a_replay() -> None:
    class Server:
        address = "localhost:1"

    class ReverbClient:
        server_address = "localhost:2"

    class Cluster:
        def target(self) -> rw.shards.Target:
            return rw.shards.Target.of(["localhost:3", "localhost:4"])

    found = [source_of(it()).look_up(1.0) for it in (Server, ReverbClient, Cluster)]
    assert [[shard.address for shard in target.shards] for target in found] == [
        ["localhost:1"],
        ["localhost:2"],
        ["localhost:3", "localhost:4"],
    ]


def test_a_client_may_be_closed_while_it_gets_another_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "shards"
    path.write_text("localhost:1\nlocalhost:2\n")
    client = rw.Client(f"file:{path}")
    path.write_text("localhost:1\nlocalhost:2\nlocalhost:3\n")
    closed: list[str] = []

    def close(server: Server) -> None:
        closed.append(server.address)
        if len(closed) == 1:  # as the thread that follows the file may at any moment
            client.connections.refresh()

    monkeypatch.setattr(Server, "close", close)
    client.close()
    assert set(closed) == {"localhost:1", "localhost:2", "localhost:3"}


def test_arguments_that_can_never_work_are_refused_by_the_call() -> None:
    with rw.LocalServer([fifo("a"), fifo("b")]) as server, rw.Client(server) as client:
        zeros = np.zeros(1)
        no_times: list[Any] = [0, -1, math.nan, "soon", None]
        no_priorities: list[Any] = [-1, math.nan, math.inf, "1", None]
        no_tables: list[Any] = [{}, "a"]
        for timeout_s in no_times:
            calls: list[Callable[[], Any]] = [functools.partial(rw.Client, "localhost:8000", timeout_s=timeout_s)]
            if timeout_s is not None:  # which is the client's, in a call
                calls += [functools.partial(client.server_info, timeout_s)]
                calls += [functools.partial(client.insert, zeros, {"a": 1.0}, timeout_s)]
                calls += [functools.partial(client.sample, "a", timeout_s=timeout_s)]
            for call in calls:
                with pytest.raises(rw.errors.SpecError, match="`timeout_s` must be > 0 seconds"):
                    call()
        with pytest.raises(rw.errors.SpecError, match="`num_samples` must be >= 1, got 0"):
            client.sample("a", 0)
        for priority in no_priorities:
            with pytest.raises(rw.errors.SpecError, match="`priority` must be a finite number >= 0"):
                client.insert(zeros, {"a": 1.0, "b": priority})
            with pytest.raises(rw.errors.SpecError, match="`priority` must be a finite number >= 0"):
                client.mutate_priorities("a", {1: 2.0, 2: priority})
        for priorities in no_tables:
            with pytest.raises(rw.errors.SpecError, match=r"`priorities` must name tables, such as .*, got "):
                client.insert(zeros, priorities)
        not_updates: Any = [1, 2]
        with pytest.raises(rw.errors.SpecError, match=r"`updates` must be a dict of priorities by key, got \[1, 2\]"):
            client.mutate_priorities("a", not_updates)
        not_an_item: list[tuple[Any, str]] = [
            (
                {"x": np.zeros(3), "y": {"z": np.float32(1)}},
                r"leaf `y/z`: shape \(\), expected \[T, \.\.\.\] with T >= 1",
            ),
            ({"x": np.zeros(3), "y": [np.zeros((0, 2))]}, r"leaf `y/0`: shape \(0, 2\), expected \[T, \.\.\.\]"),
            ({}, "at least one leaf"),
            ({"x": np.zeros(1, "M8[s]")}, "dtype datetime64"),
            ({"x": np.array([{}])}, "element of type dict"),
        ]
        for data, message in not_an_item:
            with pytest.raises(rw.errors.StructureError, match=message):
                client.insert(data, {"a": 1.0})
        client.insert(zeros, {"a": 1.0})
        assert [read_column(client, table) for table in ("a", "b")] == [[[0]], []]


# The choice of a shard.


names = st.lists(st.text(min_size=1, max_size=20), min_size=2, max_size=8, unique=True)


def test_order_is_that_of_the_hashes() -> None:
    """`printf 7:actor-7a | b2sum -l 64` gives 911f4c95..., with `b` 22d3ad03..., with `c` 4c28503f..."""
    assert rank_shards("actor-7", ["b", "c", "a"]) == ["a", "c", "b"]


def test_each_of_four_shards_gets_about_a_quarter_of_the_actors() -> None:
    counts = collections.Counter(rank_shards(f"actor-{number}", [*"abcd"])[0] for number in range(3000))
    assert all(650 < counts[name] < 850 for name in "abcd")  # 750 expected, standard deviation 24


@given(st.text(max_size=20), names, st.randoms())
def test_order_of_names_does_not_matter(actor: str, names: list[str], random: object) -> None:
    shuffled = sorted(names, key=lambda _: random.random())  # type: ignore[attr-defined]
    assert rank_shards(actor, names) == rank_shards(actor, shuffled)
    assert sorted(rank_shards(actor, names)) == sorted(names)


@given(st.text(max_size=20), names)
def test_shard_that_is_removed_moves_only_its_own_actors(actor: str, names: list[str]) -> None:
    """Each to the next in its order."""
    chosen, second, *_ = rank_shards(actor, names)
    for removed in names:
        rest = [name for name in names if name != removed]
        assert rank_shards(actor, rest)[0] == (second if removed == chosen else chosen)


def test_names_of_writers_differ_and_have_the_number_of_this_process() -> None:
    names = [writer_name() for _ in range(10)]
    assert len(set(names)) == 10
    assert all(f":{os.getpid()}:" in name for name in names)
