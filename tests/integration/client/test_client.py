"""`Client` on a real server: what it tells is so, copies are of the same servers, and what cannot work it says."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from reading import SIGNATURE, read, read_column
from server_process import HostedServer

import reverb_writer as rw

# Copies.


def test_pickled_client_is_one_of_the_same_servers(client: rw.Client) -> None:
    client.insert(np.array([7]), {"a": 1.0})
    with pickle.loads(pickle.dumps(client)) as other:  # noqa: S301  # our own bytes
        assert other.address == client.address
        assert other.timeout_s == client.timeout_s
        assert [sample.data[0].tolist() for sample in read(other, "a")] == [[7]]


# What the server tells.


def test_server_info_tells_of_every_table(client: rw.Client) -> None:
    for number in range(3):
        client.insert(np.array([number]), {"heap": float(number), "replay": 1.0})
    list(client.sample("heap", 2))
    tables = client.server_info()
    assert sorted(tables) == ["a", "b", "heap", "late", "pair", "replay", "signed"]
    heap = tables["heap"]
    assert (heap.name, heap.sampler, heap.remover, heap.max_size, heap.max_times_sampled) == (
        "heap",
        "max_heap",
        "fifo",
        1000,
        0,
    )
    assert (heap.current_size, heap.num_episodes, heap.num_deleted_episodes, heap.num_unique_samples) == (3, 3, 0, 1)
    limiter = heap.rate_limiter
    assert (limiter.samples_per_insert, limiter.min_size_to_sample, limiter.min_diff, limiter.max_diff) == (
        1,
        2,
        -math.inf,
        math.inf,
    )
    assert (limiter.num_inserts, limiter.num_samples, limiter.diff) == (3, 2, 1)
    assert (tables["replay"].sampler, tables["a"].max_times_sampled) == ("prioritized", 1)
    assert (tables["replay"].sampler_exponent, tables["replay"].remover_exponent) == (1.0, None)
    assert heap.sampler_exponent is None
    assert not heap.blocks_inserts()
    assert not heap.blocks_samples()
    assert tables["signed"].signature["list"] == SIGNATURE["list"]
    assert tables["signed"].signature["pair"]._asdict() == SIGNATURE["pair"]._asdict()  # type: ignore[attr-defined]
    assert tables["a"].signature is None
    assert min(heap.worker_time_ms.values()) >= 0


# Priorities, reset, checkpoint.


def priorities(client: rw.Client, table: str, num_samples: int = 60) -> dict[int, float]:
    return {sample.info.key: sample.info.priority for sample in client.sample(table, num_samples)}


def test_priorities_are_changed_and_items_deleted_by_key(client: rw.Client) -> None:
    for number in range(3):
        client.insert(np.array([number]), {"replay": 1.0})
    keys = {int(sample.data[0][0]): sample.info.key for sample in client.sample("replay", 200)}
    assert sorted(keys) == [0, 1, 2]
    updates: Any = {keys[0]: 0, keys[1]: np.float32(3)}
    deletes: Any = [np.uint64(keys[2])]
    client.mutate_priorities("replay", updates, deletes)
    assert priorities(client, "replay") == {keys[1]: 3.0}
    assert client.server_info()["replay"].current_size == 2
    client.mutate_priorities("replay", deletes=list(keys.values()))
    assert client.server_info()["replay"].current_size == 0


def test_keys_that_the_table_does_not_have_are_ignored(client: rw.Client) -> None:
    client.insert(np.zeros(1), {"replay": 1.0})
    client.mutate_priorities("replay", {5: 1.0}, deletes=[6, 2**64 - 1])
    client.mutate_priorities("replay")
    assert client.server_info()["replay"].current_size == 1


@pytest.mark.parametrize("key", [-1, 2**64, 1.5, "1", None])
def test_key_that_is_none_is_refused(client: rw.Client, key: Any) -> None:
    with pytest.raises(rw.errors.SpecError, match="`key` must be"):
        client.mutate_priorities("replay", {key: 1.0})
    with pytest.raises(rw.errors.SpecError, match="`key` must be"):
        client.mutate_priorities("replay", deletes=[key])


def test_reset_empties_a_table(client: rw.Client) -> None:
    for table in ("a", "replay"):
        client.insert(np.zeros(1), {table: 1.0})
    client.reset("replay")
    tables = client.server_info()
    assert (tables["replay"].current_size, tables["replay"].rate_limiter.num_inserts) == (0, 0)
    assert tables["a"].current_size == 1


@pytest.mark.only_server("reverb", "a local server is saved by its own process")
def test_checkpoint_gives_its_path(client: rw.Client) -> None:
    assert client.checkpoint() != client.checkpoint()


# Life and death.


def test_closed_client_says_so(server: HostedServer) -> None:
    client = rw.Client(server.address)
    client.insert(np.zeros(1), {"a": 1.0})
    client.close()
    client.close()
    calls: list[Callable[[], Any]] = [
        client.server_info,
        client.checkpoint,
        lambda: client.insert(np.zeros(1), {"a": 1.0}),
        lambda: next(client.sample("a")),
        lambda: client.mutate_priorities("a"),
        lambda: client.reset("a"),
        lambda: rw.TrajectoryObserver(client, "a", 2),
    ]
    for call in calls:
        with pytest.raises(rw.errors.ClosedError, match=f"the client of {server.address} is closed. Make a new one"):
            call()


@pytest.mark.parametrize("timeout_s", [0, -1, math.nan, "soon", None])
def test_time_that_is_none_is_refused(client: rw.Client, timeout_s: Any) -> None:
    if timeout_s is not None:  # which is the client's, in a call
        with pytest.raises(rw.errors.SpecError, match="`timeout_s` must be > 0 seconds"):
            client.server_info(timeout_s)
        with pytest.raises(rw.errors.SpecError, match="`timeout_s` must be > 0 seconds"):
            client.insert(np.zeros(1), {"a": 1.0}, timeout_s)
    with pytest.raises(rw.errors.SpecError, match="`timeout_s` must be > 0 seconds"):
        rw.Client("localhost:8000", timeout_s=timeout_s)


def test_who_wants_to_may_wait_for_ever(server: HostedServer) -> None:
    with rw.Client(server.address, timeout_s=math.inf) as client:
        client.reset("a")
        client.insert(np.array([1]), {"a": 1.0})
        with rw.TrajectoryObserver(client, "a", 1) as observer:
            observer({"n": 2})
            observer.flush()
        assert read_column(client, "a") == [[1], [2]]


@pytest.mark.parametrize(
    "address",
    [
        "",
        "localhost",
        "http://localhost:8000",
        "localhost:port",
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
