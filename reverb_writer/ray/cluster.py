"""A cluster of shards on Ray: started once, found by its name from everywhere, stopped by what has started it.

start   1 memory         the estimate, as the server's command prints it, too
        2 actors         a detached one for each shard that has none, or an error that says what room is missing
        3 serve          all shards; if one does not, all that this start has begun is undone
"""

from __future__ import annotations

import contextlib
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
from reverb_writer.ray.actors import ask_actors, connect_ray, named_shards, start_shards, stop_shards
from reverb_writer.ray.shard_actor import server_configuration
from reverb_writer.ray.shard_report import ClusterSpec, ClusterStatus, ShardReport
from reverb_writer.tables import TableConfig, check_tables
from reverb_writer.tables.shares import share_of
from reverb_writer.writing.memory_estimate import estimate, need

_logger = logging.getLogger(__name__)
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")  # also that of a folder, which is not above it
_POLL_S = 0.2
_ANSWER_TIMEOUT_S = 10.0


class ReplayCluster:
    """Replay servers that Ray places, watches and starts again: one replay, whose data never pass through Ray.

    Thread-safe. A context manager: its end stops the cluster if this object has started it, and leaves it if it was
    attached to.

    Attributes:
        name: of the cluster.
        spec: definition of the cluster.
        started: whether this object has started it.

    Example:
        with ReplayCluster.start("experiment", tables=[...], shards=4, python="/opt/replay/bin/python") as cluster:
            with rw.TrajectoryObserver(cluster.target(), "replay", sequence_length=20) as observer:
                ...
    """

    def __init__(self, spec: ClusterSpec, *, started: bool) -> None:
        """Use `start` or `attach`."""
        self.name = spec.name
        self.started = started
        self.spec = spec
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
        bind: str | None = None,
        runtime_env: Mapping[str, Any] | None = None,
        timeout_s: float = 300.0,
        placement_timeout_s: float = 30.0,
    ) -> ReplayCluster:
        """Start a cluster and wait until it serves; attach to it if it exists already.

        It outlives this process. If Ray is not connected yet, `ray.init()` does that first.

        Args:
            name: of the cluster: letters, digits, `_`, `.` and `-`; the first is a letter, a digit or `_`.
            tables: of all shards together: each has its share of `max_size`, `min_size` and error buffers.
            shards: number of servers, >= 1.
            python: interpreter of the servers, at the same path on every node; needs `reverb-writer-server`.
            checkpoints: folder on storage that every node reaches by this path; each shard has one of its own in it.
                Without one, the data of a shard that is lost are lost.
            checkpoint_every_s: seconds between checkpoints; 0 for none but the last.
            num_cpus: processors that Ray reserves for each shard.
            memory_bytes: memory that Ray reserves for each shard, in bytes; None for the estimate.
            port: of the first shard, the next one has the next; None for free ones.
            bind: address that the servers accept connections on: 127.0.0.1 for those of this machine; None for all,
                unless nodes know each other by 127.0.0.1.
            runtime_env: Ray's, of the actors, as for this package if the cluster does not have it. The servers get its
                `env_vars`.
            timeout_s: time-out of the whole start, seconds.
            placement_timeout_s: part of it that may pass until there is room, seconds.

        Raises:
            SpecError: an argument can never work, or a cluster of this name differs in what describes it.
            PlacementError: there is no room; says what is needed and what is free.
            ShardStartError: a server does not start; has its last log lines.
            ReplayTimeoutError: the time is up. After these three, nothing is left of what this call has begun.
            MissingExtraError: Ray is not installed.
        """
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise SpecError(f"`name` must be letters, digits, `_`, `.` and `-`, not `.` or `-` first, got {name!r}.")
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
            bind,
        )
        for number in range(num_shards):
            server_configuration(spec, number)  # refuses tables that cannot be split
        deadline = Deadline(check_timeout(timeout_s))
        connect_ray()
        started = start_shards(
            spec,
            num_cpus=num_cpus,
            memory_bytes=_estimate(spec) if memory_bytes is None else memory_bytes,
            runtime_env=runtime_env,
            deadline=deadline,
            placement_timeout_s=check_timeout(placement_timeout_s, "placement_timeout_s"),
        )
        if not started:
            _logger.info("cluster `%s` exists already: attached to it", name)
        return cls(spec, started=started)

    @classmethod
    def attach(cls, name: str, *, timeout_s: float = 30.0) -> ReplayCluster:
        """Return the cluster of that name.

        Raises:
            ServerUnavailableError: there is none; names those that there are.
            ReplayTimeoutError: none of its actors answers within `timeout_s` seconds. `remove` ends it all the same.
        """
        connect_ray()
        deadline = Deadline(check_timeout(timeout_s))
        found = named_shards()
        if name not in found:
            raise _unknown(name, found)
        silent = f"`reverb-writer ray down {name}` ends the cluster all the same. No actor of it answered"
        while True:
            answers = ask_actors(found[name], "describe", min(_ANSWER_TIMEOUT_S, deadline.left_s(silent)))
            for spec, _ in answers.values():
                return cls(spec, started=False)
            time.sleep(_POLL_S)

    @staticmethod
    def remove(name: str, timeout_s: float = 600.0) -> dict[str, str]:
        """End the cluster of that name as `stop` does, within `timeout_s` seconds, also one whose actors cannot run.

        Returns:
            Why there is no last checkpoint of a shard, by its name; empty if all have written theirs.

        Raises:
            ServerUnavailableError: there is none; names those that there are.
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
            self._target.look_up(_ANSWER_TIMEOUT_S)
        return self._target

    def status(self, timeout_s: float = 5.0) -> ClusterStatus:
        """Return what the shards tell within `timeout_s` seconds; what is silent has the state "no answer"."""
        answers = ask_actors(self.spec.shard_names(), "report", check_timeout(timeout_s))
        shards = []
        for name in self.spec.shard_names():
            before = self._target.known[name]
            silent = ShardReport(name, before.address, "no answer", "its actor does not answer: see Ray's dashboard")
            shards.append(answers.get(name, silent))
        for report in answers.values():
            self._target.note(report)
        nodes = {one.node for one in answers.values()}
        remark = f"{len(answers)} shards share {len(nodes)} nodes: a node that is lost takes several with it."
        return ClusterStatus(self.name, tuple(shards), (remark,) if len(answers) > len(nodes) else ())

    def stop(self, timeout_s: float = 600.0) -> None:
        """End all servers, each with a last checkpoint, and give the room back. Idempotent.

        Args:
            timeout_s: time for the last checkpoints, seconds. Servers that take longer are left to themselves,
                and so are those whose actors are silent for 60 s; which is logged with their names.
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
    return ServerUnavailableError(f"there is no cluster `{name}` on this Ray; there is {there}.")


def _estimate(spec: ClusterSpec) -> int:
    """Return the estimated memory of a shard, and say which tables are not in it."""
    estimates = [estimate(share_of(table, 0, spec.num_shards)) for table in spec.tables]
    total_bytes, _, unknown = need(estimates, saves=bool(spec.checkpoints))
    if unknown:
        _logger.warning(
            "cluster `%s`: the size of %s is unknown: give the table a signature, or `memory_bytes`, so that Ray "
            "reserves enough.",
            spec.name,
            ", ".join(f"`{name}`" for name in unknown),
        )
    return total_bytes
