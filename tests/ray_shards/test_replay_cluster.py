"""Shards on Ray: started, found, refused, lost and restored. Fake nodes on one machine, real servers and signals."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from threads import at_once
from waiting import eventually, process_state

import reverb_writer as rw
import reverb_writer.ray as rwr
from reverb_writer.protocol.signatures import ArraySpec
from reverb_writer.ray.actor_target import ActorTarget
from reverb_writer.ray.actors import stop_shards
from reverb_writer.ray.shard_actor import ReplayShard
from reverb_writer.ray.shard_report import ClusterSpec
from reverb_writer.tables.table_info import TableInfo

SERVER_PYTHON = os.environ.get("REVERB_WRITER_SERVER_PYTHON", "")
Start = Callable[..., rwr.ReplayCluster]
SIGNATURE = {"number": ArraySpec((1,), np.dtype(np.int64))}
EXAMPLES = str(Path(__file__).parents[2] / "examples")
TABLES = [rw.TableConfig("replay", 1000, rate_limiter=rw.MinSize(1), signature=SIGNATURE)]


def insert(source: Any, numbers: range) -> None:
    """Insert an item for each number, confirmed when this returns."""
    with rw.Client(source, timeout_s=60) as client:
        for number in numbers:
            client.insert({"number": np.array([number])}, {"replay": 1.0})


def numbers_at(address: str) -> list[int]:
    """Return the numbers of all items of a shard, each item once."""
    with rw.Client(address, timeout_s=60) as client:
        size = client.server_info()["replay"].current_size
        found: dict[int, int] = {}
        while len(found) < size:
            found |= {one.info.key: int(one.data["number"][0]) for one in client.sample("replay", 20 * size)}
    return sorted(found.values())


def numbers_in(cluster: rwr.ReplayCluster) -> list[int]:
    """Return the numbers of all items of all shards, each item once."""
    return sorted(number for shard in cluster.target().look_up(10).shards for number in numbers_at(shard.address))


def written_to(address: str) -> TableInfo:
    """Wait until a shard has items, and return what it says of them."""
    with rw.Client(address, timeout_s=60) as client:
        eventually(lambda: client.server_info()["replay"].current_size, f"{address} is written to")
        return client.server_info()["replay"]


def serving(cluster: rwr.ReplayCluster) -> rwr.ClusterStatus:
    """Wait until all shards serve, and return what they say."""
    eventually(lambda: cluster.status().is_serving, "all shards serve")
    return cluster.status()


def gone(pid: int) -> bool:
    return process_state(pid) in "ZX"


def processes_of(pid: int) -> list[int]:
    """Return a server's process and the one that has Reverb in it."""
    return [pid, *map(int, " ".join(one.read_text() for one in Path(f"/proc/{pid}/task").glob("*/children")).split())]


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[1])


def test_shards_are_one_replay_that_is_found_by_its_name(start: Start) -> None:
    free = ray.available_resources()["memory"]
    options: Any = {"memory_bytes": None, "runtime_env": {"env_vars": {"ONE_MORE": "1"}}}
    outcomes = at_once(*[lambda: start("one", TABLES, **options)] * 2)
    attached, cluster = sorted(outcomes, key=lambda one: one.started)
    assert (attached.started, cluster.started) == (False, True)
    # Of each shard 0.6 GB for two processes, 38 MB for streams, and little for 500 items: docs/deploy/sizing.md.
    assert 2 * 600e6 <= free - ray.available_resources()["memory"] < 2 * 650e6

    for shard in cluster.status().shards:
        assert b"ONE_MORE=1" in Path(f"/proc/{shard.pid}/environ").read_bytes().split(b"\0")

    insert(cluster.target(), range(20))
    with rw.ReplayDataset(cluster.target(), "replay", 8, timeout_s=60) as dataset:
        assert next(dataset).data["number"].shape == (8, 1)
    found = rwr.ReplayCluster.attach("one")
    with rw.Client(found.target(), timeout_s=60) as client:
        table = client.server_info()["replay"]
    assert (table.max_size, table.current_size, table.rate_limiter.num_inserts) == (1000, 20, 20)
    assert "one" in rwr.ReplayCluster.names()
    with found:
        pass
    assert cluster.status().is_serving  # for `found` has not started it

    with pytest.raises(rw.errors.SpecError, match=r"exists and has tables .*max_size=1000.*, not .*max_size=999"):
        rwr.ReplayCluster.start("one", [rw.TableConfig("replay", 999)], 2, python=SERVER_PYTHON)
    with pytest.raises(rw.errors.SpecError, match="has num_shards 2, not 1"):
        rwr.ReplayCluster.start("one", TABLES, 1, python=SERVER_PYTHON)
    same: Any = {"python": SERVER_PYTHON, "checkpoint_every_s": 0}
    for other in ({"python": sys.executable}, {"checkpoints": "/elsewhere"}, {"port": 9000}):
        with pytest.raises(rw.errors.SpecError, match=f"exists and has {next(iter(other))} "):
            rwr.ReplayCluster.start("one", TABLES, 2, **{**same, **other})
    assert not rwr.ReplayCluster.start("one", TABLES, 2, **same).started
    assert cluster.status().is_serving


def nothing_is_left(name: str) -> bool:
    actors = [one for one in ray.util.list_named_actors(all_namespaces=True) if f":{name}:" in one["name"]]
    return not actors


def test_start_without_room_says_what_is_free_and_leaves_nothing(machines: Any) -> None:
    said = r"4 shards have no room: needs 4 CPUs, 3 are free; .* Not all shards served within 0.5 s"
    with pytest.raises(rw.errors.ReplayTimeoutError, match=said):
        rwr.ReplayCluster.start("large", TABLES, 4, python=SERVER_PYTHON, memory_bytes=10**6, timeout_s=0.5)
    eventually(lambda: nothing_is_left("large"), "nothing is left of the cluster")


def test_start_that_is_interrupted_while_there_is_no_room_leaves_nothing(machines: Any) -> None:
    line = [sys.executable, "-m", "reverb_writer.cli", "ray", "up", "full", "--shards", "4", "--memory", "1000000"]
    environment = {**os.environ, "RAY_ADDRESS": machines.address}
    with subprocess.Popen([*line, "--python", SERVER_PYTHON], env=environment) as process:
        eventually(lambda: not nothing_is_left("full"), "its actors wait for room")
        process.send_signal(signal.SIGINT)
        assert process.wait(60) != 0
    eventually(lambda: nothing_is_left("full"), "nothing is left of the cluster")


def test_failed_start_names_the_cause_and_leaves_nothing(machines: Any, tmp_path: Path) -> None:
    with pytest.raises(rwr.ShardStartError, match=r"/no/python3.11 cannot be run on node"):
        rwr.ReplayCluster.start("bad", TABLES, 2, python="/no/python3.11")
    blocked = tmp_path / "file"
    blocked.write_text("no folder")
    with pytest.raises(rwr.ShardStartError, match=r"(?s)shard-\d-of-2 on node .* does not start: .*Not a directory"):
        rwr.ReplayCluster.start("bad", TABLES, 2, python=SERVER_PYTHON, memory_bytes=10**6, checkpoints=str(blocked))
    eventually(lambda: nothing_is_left("bad"), "nothing is left of the cluster")


def test_commands_start_and_stop_a_cluster_which_the_next_start_restores(machines: Any, tmp_path: Path) -> None:
    def run(*arguments: str) -> str:
        line = [sys.executable, "-m", "reverb_writer.cli", "ray", *arguments, "--address", machines.address]
        done = subprocess.run(line, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    up = ("up", "typed", "--max-size", "1000", "--python", SERVER_PYTHON, "--checkpoints", str(tmp_path))
    assert "serving" in run(*up)
    first = rwr.ReplayCluster.attach("typed")
    with rw.Client(first.target(), timeout_s=60) as client:
        for number in range(30):
            client.insert(np.array([number]), {"replay": 1.0})
    (shard,) = first.status().shards
    assert shard.pid is not None
    pids = processes_of(shard.pid)
    assert len(pids) == 2
    assert "stopped" in run("down", "typed")
    assert all(gone(pid) for pid in pids)
    assert nothing_is_left("typed")

    assert "serving" in run(*up)
    again = rwr.ReplayCluster.attach("typed")
    with rw.Client(again.target(), timeout_s=60) as client:
        assert client.server_info()["replay"].current_size == 30
    assert "already exists" in run(*up)
    assert run("status").split() == ["typed"]
    again.stop(60)
    again.stop(60)


def checkpoint(cluster: rwr.ReplayCluster) -> None:
    for shard in cluster.target().look_up(10).shards:
        with rw.Client(shard.address, timeout_s=60) as client:
            client.checkpoint()


def test_shard_whose_server_or_actor_is_killed_is_back_from_its_checkpoint(start: Start, tmp_path: Path) -> None:
    cluster = start("killed", TABLES, checkpoints=str(tmp_path))
    source = cluster.target()
    insert(source, range(20))
    checkpoint(cluster)
    insert(source, range(20, 30))  # no checkpoint has these
    server = cluster.status().shards[0]
    assert server.pid is not None
    lost = {number for number in numbers_at(server.address) if number >= 20}
    assert lost
    os.kill(server.pid, signal.SIGKILL)
    eventually(lambda: cluster.status().shards[0].pid not in (None, server.pid), "Ray starts the server again")
    serving(cluster)
    left = sorted({*range(30)} - lost)
    assert numbers_in(cluster) == left

    insert(source, range(100, 110))  # no checkpoint has these, but the actor's end is no end of its server's
    victim = cluster.status().shards[1]
    assert victim.pid is not None
    pids = processes_of(victim.pid)
    ray.kill(ray.get_actor(victim.name, namespace="reverb-writer"), no_restart=False)
    eventually(lambda: all(gone(pid) for pid in pids), "no process of the server is left")
    eventually(lambda: cluster.status().shards[1].pid not in (None, victim.pid), "Ray starts the actor again")
    serving(cluster)
    assert numbers_in(cluster) == [*left, *range(100, 110)]


def test_start_after_a_stop_that_was_interrupted_serves_all(start: Start, tmp_path: Path) -> None:
    """As after Ctrl-C: the actors were told to stop, and nobody waits for them."""
    cluster = start("interrupted", TABLES, checkpoints=str(tmp_path))
    insert(cluster.target(), range(20))
    before = cluster.status().shards
    for shard in before:
        ray.get(ray.get_actor(shard.name, namespace="reverb-writer").stop.remote())
    again = start("interrupted", TABLES, checkpoints=str(tmp_path))
    assert again.started
    assert again.status().is_serving
    assert not {shard.pid for shard in again.status().shards} & {shard.pid for shard in before}
    assert numbers_in(again) == list(range(20))


def test_no_confirmed_item_is_lost_when_a_node_sends_its_shard_away(
    start: Start, machines: Any, tmp_path: Path
) -> None:
    """Each node has a shard, so none is spare: the shard shares one from then on."""
    cluster = start("evicted", TABLES, 3, num_cpus=0.5, checkpoints=str(tmp_path))
    insert(cluster.target(), range(30))
    victim = cluster.status().shards[0]
    assert victim.pid is not None
    machines.remove_node(node_of(machines, victim.pid), allow_graceful=True)
    try:
        eventually(lambda: cluster.status().shards[0].pid not in (None, victim.pid), "the shard is on another node")
        serving(cluster)
        assert numbers_in(cluster) == list(range(30))
    finally:
        machines.add_node(num_cpus=1, object_store_memory=80 * 2**20)


def test_shard_beyond_a_partition_confirms_nothing_that_is_lost(machines: Any, tmp_path: Path) -> None:
    """Ray cannot reach a node and starts the shard elsewhere, while clients still reach the server on that node."""
    spec = ClusterSpec("split", tuple(TABLES), 1, SERVER_PYTHON, str(tmp_path), 0)
    # Two actors that know nothing of each other, as Ray leaves them.
    old, new = [ray.remote(ReplayShard).options(num_cpus=0.5, max_restarts=0) for _ in range(2)]

    def report_of(actor: Any) -> rwr.ShardReport:
        done = eventually(lambda: (one := ray.get(actor.report.remote())).state == "serving" and one, "it serves")
        assert isinstance(done, rwr.ShardReport)
        return done

    stale = report_of(stale_actor := old.remote(spec, 0))
    confirmed: list[int] = []
    may_end = threading.Event()

    def write() -> None:
        with rw.Client(stale.address, timeout_s=5) as client, contextlib.suppress(rw.errors.ReverbWriterError):
            for number in itertools.count():
                client.insert({"number": np.array([number])}, {"replay": 1.0})
                confirmed.append(number)
                if may_end.is_set() or number == 900:
                    return
                time.sleep(0.01)

    writer = threading.Thread(target=write)
    writer.start()
    eventually(lambda: len(confirmed) > 20, "items are confirmed")
    assert stale_actor is not None  # Ray ends an actor that nobody refers to
    fresh = report_of(fresh_actor := new.remote(spec, 0))
    may_end.set()
    writer.join()
    found = numbers_at(fresh.address)
    assert {*confirmed} <= {*found}
    assert len(found) <= len(confirmed) + 1  # the last insert may have ended without its answer
    assert [shard.address for shard in ActorTarget(spec).look_up(10).shards] == [fresh.address]
    ray.get(fresh_actor.stop.remote())


def test_stop_waits_for_actors_that_are_away_for_a_moment(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = start("away", TABLES, checkpoints=str(tmp_path))
    insert(cluster.target(), range(20))
    checkpoint(cluster)
    insert(cluster.target(), range(20, 30))  # no checkpoint has these yet
    killed, silent = cluster.status().shards
    assert killed.pid is not None
    assert silent.pid is not None
    actor = parent_of(silent.pid)
    ray.kill(ray.get_actor(killed.name, namespace="reverb-writer"), no_restart=False)
    eventually(lambda: gone(killed.pid or 0), "the actor has ended, and its server has written a last checkpoint")
    os.kill(actor, signal.SIGSTOP)
    caplog.clear()  # the start may have waited for room
    stopping = threading.Thread(target=cluster.stop, args=(200,))
    stopping.start()
    time.sleep(6)  # longer than it waits for an answer
    os.kill(actor, signal.SIGCONT)
    stopping.join()
    assert not [one.getMessage() for one in caplog.records if one.name.startswith("reverb_writer")]
    assert numbers_in(start("away", TABLES, checkpoints=str(tmp_path))) == list(range(30))


def test_cluster_whose_actors_cannot_run_is_taken_down(machines: Any) -> None:
    """No node has what these actors ask for: as if the nodes that had it were gone for good."""
    spec = ClusterSpec("stranded", tuple(TABLES), 1, SERVER_PYTHON)
    (name,) = spec.shard_names()
    options: Any = {"name": name, "namespace": "reverb-writer", "lifetime": "detached", "resources": {"nowhere": 1}}

    ray.remote(ReplayShard).options(**options).remote(spec, 0)
    line = [sys.executable, "-m", "reverb_writer.cli", "ray", "down", "stranded", "--address", machines.address]
    done = subprocess.run([*line, "--timeout", "1"], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert f"no last checkpoint of {name}: it has not ended within 1 s" in done.stdout
    assert nothing_is_left("stranded")

    ray.remote(ReplayShard).options(**options).remote(spec, 0)
    assert stop_shards("stranded", [name], 600, patience_s=1) == {name: "its actor has not answered for 1 s"}
    assert nothing_is_left("stranded")
    with pytest.raises(rw.errors.ServerUnavailableError, match="this Ray has no cluster `stranded`"):
        rwr.ReplayCluster.remove("stranded")


class Actor(threading.Thread):
    """Writes episodes of three steps until it is told to pause or end: windows of one step, so a number is an item."""

    def __init__(self, source: Any, number: int, barrier: threading.Barrier) -> None:
        super().__init__()
        self.source, self.number, self.barrier = source, number, barrier
        self.may_end = threading.Event()
        self.told = 0

    def run(self) -> None:
        options: Any = {"patience_s": 1.0, "timeout_s": 60}
        with rw.TrajectoryObserver(self.source, "replay", 1, **options) as observer:
            for episode in itertools.count():
                for step in range(3):
                    number = 1_000_000 * self.number + 3 * episode + step
                    observer({"number": np.int64(number)}, end_of_episode=step == 2)
                if episode == 9:
                    observer.flush()
                    self.barrier.wait(60)  # all is confirmed,
                    self.barrier.wait(60)  # and saved
                if self.may_end.is_set() and episode > 20:
                    break
                self.told = episode
                time.sleep(0.2)
        self.stats = observer.stats()


def test_books_balance_when_a_node_is_lost_while_actors_write(start: Start, machines: Any, tmp_path: Path) -> None:
    table = rw.TableConfig("replay", 200_000, rate_limiter=rw.MinSize(1), signature=SIGNATURE)
    cluster = start("moved", [table], checkpoints=str(tmp_path))
    source, barrier = cluster.target(), threading.Barrier(5)
    actors = [Actor(source, number, barrier) for number in range(4)]
    for actor in actors:
        actor.start()
    barrier.wait(60)
    checkpoint(cluster)
    saved = numbers_in(cluster)
    assert len(saved) == 4 * 30
    barrier.wait(60)

    victim = cluster.status().shards[0]
    assert victim.pid is not None
    pids = processes_of(victim.pid)
    machines.remove_node(node_of(machines, victim.pid), allow_graceful=False)
    try:
        eventually(lambda: all(gone(pid) for pid in pids), "no process of the server is left")
        with rw.ReplayDataset(source, "replay", 8, timeout_s=60) as dataset:  # the other shard serves all the while
            for _ in range(20):
                next(dataset)
        told = [actor.told for actor in actors]
        eventually(lambda: all(now.told > then + 10 for now, then in zip(actors, told, strict=True)), "all write on")
        eventually(lambda: cluster.status().shards[0].pid not in (None, victim.pid), "the shard is on another node")
        serving(cluster)
        for actor in actors:
            actor.may_end.set()
        for actor in actors:
            actor.join(120)
    finally:
        machines.add_node(num_cpus=1, object_store_memory=80 * 2**20)
    there = numbers_in(cluster)
    assert len(there) == len({*there})  # no item twice
    for actor in actors:
        written = {1_000_000 * actor.number + number for number in range(actor.stats.items)}
        missing = sorted(written - {*there})
        # The lost shard got what is missing after its checkpoint: it was confirmed, or given up and counted.
        assert actor.stats.dropped_items <= len(missing)
        assert actor.stats.items == actor.stats.acknowledged_items + actor.stats.dropped_items
    assert {*saved} <= {*there}


def node_of(machines: Any, pid: int) -> Any:
    """Return the fake node whose raylet is above a server's process."""
    while pid > 1:
        pid = parent_of(pid)
        for node in machines.worker_nodes:
            if any(process.process.pid == pid for process in node.all_processes["raylet"]):
                return node
    raise AssertionError("no raylet is above it")


def test_example_on_ray_writes_to_all_shards_and_learns_from_them(
    machines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gymnasium")
    monkeypatch.syspath_prepend(EXAMPLES)
    example: Any = importlib.import_module("apex_dqn")
    ray.cloudpickle.register_pickle_by_value(example)  # Ray's workers here have no path to it
    options = {"python": SERVER_PYTHON, "memory_bytes": 10**8}
    with example.on_ray(4, "apex", 2, **options) as source:
        assert [update for update, _ in example.learn(source, 100)] == [100]
        cluster = rwr.ReplayCluster.attach("apex")
        for shard in cluster.target().look_up(10).shards:
            limiter = written_to(shard.address).rate_limiter
            assert limiter.diff <= limiter.max_diff  # samples per insert stay in their bounds
            assert limiter.diff >= limiter.min_diff or limiter.num_samples == 0
    assert nothing_is_left("apex")


@pytest.mark.parametrize(
    ("script", "options", "cluster", "said"),
    [
        ("ppo_vector.py", ["--ray", "ppo", "--steps", "3000"], "ppo", "2056 steps:"),
        ("rllib_episodes.py", ["--runners", "1"], "rllib", "windows of (32, 7, 4) observations"),
    ],
)
def test_example_with_pytorch_runs_on_a_cluster(
    machines: Any, script: str, options: list[str], cluster: str, said: str
) -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    if script == "rllib_episodes.py":
        pytest.importorskip("ray.rllib", reason="RLlib is not installed", exc_type=ImportError)
    line = [sys.executable, f"{EXAMPLES}/{script}", "--python", SERVER_PYTHON, *options]
    environment = {**os.environ, "RAY_ADDRESS": machines.address}
    done = subprocess.run(line, capture_output=True, text=True, timeout=250, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert said in done.stdout
    assert nothing_is_left(cluster)


def test_clients_go_on_without_the_control_store_and_servers_are_kept(machines: Any) -> None:
    """The last test of this file: on this Ray nothing starts any more."""
    cluster = rwr.ReplayCluster.start("orphan", TABLES, 2, python=SERVER_PYTHON, memory_bytes=10**8)
    source = cluster.target()
    insert(source, range(10))
    machines.head_node.kill_gcs_server()
    insert(source, range(10, 20))
    assert numbers_in(cluster) == list(range(20))
    with rw.ReplayDataset(source, "replay", 8, timeout_s=60) as dataset:
        assert next(dataset).data["number"].shape == (8, 1)
    assert cluster.status().is_serving
