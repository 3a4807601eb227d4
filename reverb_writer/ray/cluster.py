"""A cluster of shards on Ray, which is started once and found by its name from everywhere.

start   1 memory         the server's estimate
        2 actors         a detached actor for each shard that has none
        3 serve          wait until all shards serve; if a shard does not, undo this start

Ray gives a name to one actor only. The process that creates the actor of shard 0 has started the cluster. Every other
process has attached to it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import re
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

from reverb_writer.arguments import check_timeout, integer
from reverb_writer.deadline import Deadline
from reverb_writer.errors import ServerUnavailableError, SpecError
from reverb_writer.ray.actor_target import ActorTarget
from reverb_writer.ray.actors import (
    ANSWER_TIMEOUT_S,
    NAMESPACE,
    POLL_S,
    actor_of,
    ask_actors,
    connect_ray,
    end_actors,
    named_shards,
    stop_shards,
)
from reverb_writer.ray.shard_actor import ReplayShard, server_configuration
from reverb_writer.ray.shard_report import ClusterSpec, ClusterStatus, ShardReport, ShardStartError
from reverb_writer.tables import TableConfig, check_tables
from reverb_writer.tables.memory_estimate import estimate, need
from reverb_writer.tables.shares import share_of

_logger = logging.getLogger(__name__)
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")  # also a safe name of a folder
_LOOK_UP_TIMEOUT_S = 10.0
_GIB = 2**30
_ENDING = ("draining", "stopped")  # states of a cluster that is being stopped; a start waits for its end
_KEEP_CHILDREN = {"RAY_kill_child_processes_on_worker_exit": "false"}  # a server outlives its actor by a checkpoint


class ReplayCluster:
    """Replay servers that Ray places, watches and restarts: one replay, whose data never pass through Ray.

    Thread-safe. A context manager: its end stops the cluster if this object has started it. A cluster that this object
    attached to continues.

    Attributes:
        name: name of the cluster.
        spec: definition of the cluster.
        started: whether this object has started it.

    Example:
        with ReplayCluster.start("experiment", tables=[...], shards=4, python="/opt/replay/bin/python") as cluster:
            with rw.TrajectoryObserver(cluster.target(), "replay", sequence_length=20) as observer:
                ...
    """

    def __init__(self, spec: ClusterSpec, *, started: bool) -> None:
        """Use `start` or `attach`."""
        self.name, self.started, self.spec = spec.name, started, spec
        self._target = ActorTarget(spec)

    @classmethod
    def start(
        cls,
        name: str,
        tables: Sequence[TableConfig],
        shards: int = 1,
        *,
        python: str = sys.executable,
        checkpoints: str | None = None,
        checkpoint_every_s: float = 600.0,
        num_cpus: float = 1.0,
        memory_bytes: int | None = None,
        port: int | None = None,
        runtime_env: Mapping[str, Any] | None = None,
        timeout_s: float = 300.0,
    ) -> ReplayCluster:
        """Start a cluster and wait until it serves; attach to it if it already exists.

        It outlives this process. If this process is not connected to Ray yet, `ray.init()` connects it.

        Args:
            name: name of the cluster: letters, digits, `_`, `.` and `-`, beginning with a letter, a digit or `_`.
            tables: tables of all shards together: each shard has its share of `max_size`, `min_size` and error buffers.
            shards: number of servers, >= 1.
            python: interpreter of the servers, at the same path on every node; needs `reverb-writer-server`.
            checkpoints: folder on storage that every node reaches by this path; each shard has its own folder in it.
                Without it, the data of a lost shard are lost.
            checkpoint_every_s: seconds between checkpoints; 0 for a last checkpoint only.
            num_cpus: processors that Ray reserves for each shard.
            memory_bytes: memory that Ray reserves for each shard, in bytes; None for the estimate.
            port: port of the first shard; each next shard has the next port. None for free ports.
            runtime_env: Ray's runtime environment of the actors, for example with this package if the nodes lack it.
                The servers get its `env_vars`.
            timeout_s: time-out of the whole start, in seconds. If the nodes have no room, this is logged, and the start
                waits for room.

        Raises:
            SpecError: an argument can never work, or a cluster of this name has another definition.
            ShardStartError: a server does not start; the error has its last log lines.
            ReplayTimeoutError: the time is over; if the room was too small, the error has the needed and the free room.
                After these two errors, nothing of this start remains.
            MissingExtraError: Ray is not installed.
        """
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise SpecError(f"`name` must be letters, digits, `_`, `.` and `-`, first not `.` or `-`, got {name!r}.")
        check_tables(tables)
        if checkpoints is not None and not str(checkpoints).startswith("/"):
            raise SpecError(f"`checkpoints` must be an absolute path, the same on every node, got {checkpoints!r}.")
        num_shards = integer("shards", shards, minimum=1)
        spec = ClusterSpec(
            name,
            tuple(tables),
            num_shards,
            str(python),
            None if checkpoints is None else str(checkpoints),
            float(checkpoint_every_s),
            None if port is None else integer("port", port, minimum=1, maximum=65536 - num_shards),
        )
        for number in range(num_shards):
            server_configuration(spec, number)  # refuses tables that cannot be split
        deadline = Deadline(check_timeout(timeout_s))
        connect_ray()
        if memory_bytes is None:  # the servers log the tables that this does not include
            shares = [share_of(table, 0, num_shards) for table in tables]
            memory_bytes, _, _ = need([estimate(share) for share in shares], saves=checkpoints is not None)
        started = _start_shards(spec, {"CPU": num_cpus, "memory": memory_bytes}, runtime_env or {}, deadline)
        if not started:
            _logger.info("cluster `%s` already exists: attached to it", name)
        return cls(spec, started=started)

    @classmethod
    def attach(cls, name: str, *, timeout_s: float = 30.0) -> ReplayCluster:
        """Return the cluster of this name.

        Raises:
            ServerUnavailableError: no such cluster exists; the error names the existing clusters.
            ReplayTimeoutError: none of its actors answers within `timeout_s` seconds. `remove` still ends it.
        """
        connect_ray()
        deadline = Deadline(check_timeout(timeout_s))
        found = named_shards()
        if name not in found:
            raise _unknown(name, found)
        silent = f"`reverb-writer ray down {name}` still ends the cluster. None of its actors answered"
        while True:
            answers = ask_actors(found[name], "describe", min(ANSWER_TIMEOUT_S, deadline.left_s(silent)))
            for spec, _ in answers.values():
                return cls(spec, started=False)
            time.sleep(POLL_S)

    @staticmethod
    def remove(name: str, timeout_s: float = 600.0) -> dict[str, str]:
        """End the cluster of this name within `timeout_s` seconds, as `stop` does, even if its actors cannot run.

        Returns:
            Reasons for missing last checkpoints, by the name of the shard; empty if all shards have written theirs.

        Raises:
            ServerUnavailableError: no such cluster exists; the error names the existing clusters.
        """
        connect_ray()
        found = named_shards()
        if name not in found:
            raise _unknown(name, found)
        return stop_shards(name, found[name], check_timeout(timeout_s))

    @staticmethod
    def names() -> list[str]:
        """Return the names of the clusters on this Ray."""
        connect_ray()
        return sorted(named_shards())

    def target(self) -> ActorTarget:
        """Return the source of the shards' addresses, for clients, observers and datasets in any process."""
        with contextlib.suppress(ServerUnavailableError):
            self._target.look_up(_LOOK_UP_TIMEOUT_S)
        return self._target

    def status(self, timeout_s: float = 5.0) -> ClusterStatus:
        """Return the reports of the shards within `timeout_s` seconds; a silent shard has the state "no answer"."""
        names = self.spec.shard_names()
        answers = ask_actors(names, "report", check_timeout(timeout_s))
        silent = "its actor does not answer: see Ray's dashboard"
        shards = (answers.get(name, ShardReport(name, state="no answer", detail=silent)) for name in names)
        return ClusterStatus(self.name, tuple(shards))

    def stop(self, timeout_s: float = 600.0) -> None:
        """End all servers, each with a last checkpoint, and release their room. Idempotent.

        Args:
            timeout_s: time for the last checkpoints, in seconds. The stop no longer waits for servers that take longer,
                nor for servers whose actors are silent for 60 s; the log has their names.
        """
        connect_ray()
        stop_shards(self.name, self.spec.shard_names(), check_timeout(timeout_s))

    def __enter__(self) -> ReplayCluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.started:
            self.stop()

    def __repr__(self) -> str:
        return f"ReplayCluster({self.name!r}, {self.spec.num_shards} shards)"


def _unknown(name: str, found: Iterable[str]) -> ServerUnavailableError:
    there = ", ".join(f"`{one}`" for one in sorted(found)) or "none"
    return ServerUnavailableError(f"this Ray has no cluster `{name}`; it has {there}.")


def _start_shards(
    spec: ClusterSpec, needs: Mapping[str, float], runtime_env: Mapping[str, Any], deadline: Deadline
) -> bool:
    """Create missing actors of a cluster, and wait until all serve; return whether this call has started it.

    `needs` has the processors and the memory that Ray reserves for each shard.
    """
    import ray  # noqa: PLC0415  # of the extra

    shard = ray.remote(ReplayShard).options
    options: dict[str, Any] = {
        "namespace": NAMESPACE,
        "lifetime": "detached",
        "max_restarts": -1,
        "scheduling_strategy": "SPREAD",  # a preference: without a spare node a lost shard shares one
        "num_cpus": needs["CPU"],
        "memory": needs["memory"],
        "runtime_env": {**runtime_env, "env_vars": {**_KEEP_CHILDREN, **runtime_env.get("env_vars", {})}},
    }
    waits_for = f"cluster `{spec.name}`: not all shards serve"
    if no_room := _no_room(spec, needs):
        _logger.warning("%s", no_room)
        less = "ask for less (`shards`, `num_cpus`, `memory_bytes`)"
        waits_for = f"{no_room}. Stop other programs, add nodes, or {less}. Not all shards served"
    is_ours = False
    try:
        while True:
            _check_num_shards(spec)
            for number, name in enumerate(spec.shard_names()):
                if actor_of(name) is None:
                    is_ours = is_ours or number == 0  # set first, because an interrupt may stop the creation
                    try:
                        shard(name=name, **options).remote(spec, number)
                    except ValueError:  # another process has just created it
                        is_ours = is_ours and number > 0
            reports = _look(spec, min(ANSWER_TIMEOUT_S, deadline.left_s(waits_for)))
            if [one.state for one in reports] == ["serving"] * spec.num_shards:
                return is_ours
            time.sleep(POLL_S)
    except BaseException:
        if is_ours:
            end_actors(spec.name, spec.shard_names())
        raise


def _look(spec: ClusterSpec, timeout_s: float) -> list[ShardReport]:
    """Return the reports of the existing shards; refuse another cluster, and shards that have failed."""
    answers = ask_actors(spec.shard_names(), "describe", timeout_s)
    for there, report in answers.values():
        if report.state not in _ENDING:
            _check_same(there, spec)
        if report.state == "failed":
            raise ShardStartError(f"{report.name} on node {report.node} does not start: {report.detail}")
    return [report for _, report in answers.values()]


def _no_room(spec: ClusterSpec, needs: Mapping[str, float]) -> str:
    """Return a text about the missing room for shards without an actor; "" if all nodes together have enough."""
    import ray  # noqa: PLC0415  # of the extra

    number = spec.num_shards - len(named_shards().get(spec.name, ()))
    free = ray.available_resources()
    cpus, memory = needs["CPU"], needs["memory"] / _GIB
    if all(number * amount <= free.get(kind, 0.0) for kind, amount in needs.items()):
        return ""
    return (
        f"cluster `{spec.name}`: {number} shards have no room: needs {number * cpus:g} CPUs, {free.get('CPU', 0):g} "
        f"are free; needs {number * memory:.1f} GiB of memory, {free.get('memory', 0) / _GIB:.1f} GiB are free; each "
        f"shard takes {cpus:g} CPUs and {memory:.1f} GiB on one node"
    )


def _check_num_shards(spec: ClusterSpec) -> None:
    for name in named_shards().get(spec.name, []):
        _check_same(dataclasses.replace(spec, num_shards=int(name.rpartition("-of-")[2])), spec)


def _check_same(there: ClusterSpec, wanted: ClusterSpec) -> None:
    """Refuse a cluster whose definition differs."""
    names = [field.name for field in dataclasses.fields(ClusterSpec)]
    pairs = {name: (repr(getattr(there, name)), repr(getattr(wanted, name))) for name in names}  # arrays do not compare
    differences = [f"{name} {one}, not {other}" for name, (one, other) in pairs.items() if one != other]
    if differences:
        raise SpecError(
            f"cluster `{wanted.name}` exists and has {'; '.join(differences)}. Attach to it, stop it, or "
            "choose another name."
        )
