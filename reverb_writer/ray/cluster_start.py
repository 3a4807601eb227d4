"""The start of a cluster's actors: those of their names that are missing, by as many processes at once as like to.

Ray gives a name to one actor only. The process whose actor is shard 0 has started the cluster; it removes all of it if
a shard does not start. Every other process has attached to it.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Mapping
from typing import Any

from reverb_writer.deadline import Deadline
from reverb_writer.errors import SpecError
from reverb_writer.ray.actors import NAMESPACE, actor_of, ask_actors, end_actors, named_shards
from reverb_writer.ray.shard_actor import ReplayShard
from reverb_writer.ray.shard_report import ClusterSpec, PlacementError, ShardReport, ShardStartError

_logger = logging.getLogger(__name__)
_POLL_S = 0.2
_ANSWER_TIMEOUT_S = 5.0
_LOG_EVERY_S = 5.0
_GIB = 2**30
_ENDING = ("draining", "stopped")  # states of what a `stop` has left, which is waited for
_KEEP_CHILDREN = {"RAY_kill_child_processes_on_worker_exit": "false"}  # a server outlives its actor by a checkpoint


def start_shards(
    spec: ClusterSpec,
    *,
    num_cpus: float,
    memory_bytes: int,
    runtime_env: Mapping[str, Any] | None,
    deadline: Deadline,
    placement_timeout_s: float,
) -> bool:
    """Have all actors of a cluster, and wait until all serve; return whether this call has started it.

    Raises:
        SpecError: a cluster of this name is there and is another one.
        PlacementError, ShardStartError, ReplayTimeoutError: if this call has started it, nothing is left behind.
    """
    _check_num_shards(spec)
    more = dict(runtime_env or {})
    more["env_vars"] = {**_KEEP_CHILDREN, **more.get("env_vars", {})}
    options = {"num_cpus": float(num_cpus), "memory": float(memory_bytes), "runtime_env": more}
    room = _Room(spec, options, placement_timeout_s)
    is_ours = False
    try:
        while True:
            for number, name in enumerate(spec.shard_names()):
                if actor_of(name) is None:
                    is_ours = is_ours or number == 0  # before: an interrupt may come while Ray creates it
                    is_new = _create_actor(spec, number, name, options)
                    is_ours = is_ours and (is_new or number > 0)
            reports = _look(spec, deadline)
            if [one.state for one in reports.values()] == ["serving"] * spec.num_shards:
                return is_ours
            room.check(reports)
            time.sleep(_POLL_S)
    except BaseException:
        if is_ours:
            end_actors(spec.name, spec.shard_names())
        raise


def _look(spec: ClusterSpec, deadline: Deadline) -> dict[str, ShardReport]:
    """Return how the shards fare that have an actor, and refuse those of another cluster or that have failed."""
    _check_num_shards(spec)
    timeout_s = min(_ANSWER_TIMEOUT_S, deadline.left_s(f"cluster `{spec.name}`: not all shards serve"))
    answers = ask_actors(spec.shard_names(), "describe", timeout_s)
    for there, report in answers.values():
        if report.state not in _ENDING:
            _check_same(there, spec)
        if report.state == "failed":
            raise ShardStartError(f"{report.name} on node {report.node} does not start: {report.detail}")
    return {name: report for name, (_, report) in answers.items()}


class _Room:
    """What a cluster needs of Ray, and what Ray has had for it.

    Ray does not tell an actor that waits for room from one whose process starts slowly. So only what has never been
    free is missing.
    """

    def __init__(self, spec: ClusterSpec, options: Mapping[str, Any], timeout_s: float) -> None:
        self._spec, self._timeout_s = spec, timeout_s
        self._need = {"CPU": options["num_cpus"], "memory": options["memory"]}
        self._free = dict.fromkeys(self._need, 0.0)
        self._note(0)
        self._end = time.monotonic() + timeout_s
        self._tell_at = time.monotonic() + _LOG_EVERY_S

    def check(self, reports: Mapping[str, ShardReport]) -> None:
        """Say while actors wait what they wait for, and refuse when that has taken too long."""
        self._note(len(reports))
        number, now = self._spec.num_shards, time.monotonic()
        if self._fit() >= number and all(self._free[name] >= number * amount for name, amount in self._need.items()):
            return
        if len(reports) == number:  # what it has had is what it needs
            self._free = {name: number * amount for name, amount in self._need.items()}
        elif now > self._end:
            raise PlacementError(
                f"cluster `{self._spec.name}`: {self._lack()}. Waited {self._timeout_s:g} s. Stop what has it, add "
                "nodes, or ask for fewer shards, or less for each (`num_cpus`, `memory_bytes`)."
            )
        elif now > self._tell_at:
            self._tell_at = now + _LOG_EVERY_S
            _logger.warning("cluster `%s` waits: %s", self._spec.name, self._lack())

    def _fit(self) -> int:
        """Return how many shards the nodes would have room for if nothing else were there."""
        import ray  # noqa: PLC0415  # of the extra

        need = {name: amount for name, amount in self._need.items() if amount}
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        if not need:
            return self._spec.num_shards
        return sum(min(int(node.get(name, 0) / amount) for name, amount in need.items()) for node in nodes)

    def _note(self, num_placed: int) -> None:
        import ray  # noqa: PLC0415  # of the extra

        free = ray.available_resources()
        for name, amount in self._need.items():
            self._free[name] = max(self._free[name], free.get(name, 0.0) + num_placed * amount)

    def _lack(self) -> str:
        """Say what is needed and what is free, such as "needs 9 CPUs, 8 are free"."""
        number, cpus, memory = self._spec.num_shards, self._need["CPU"], self._need["memory"] / _GIB
        return (
            f"{number} shards have no room: needs {number * cpus:g} CPUs, {self._free['CPU']:g} are free; "
            f"needs {number * memory:.1f} GiB of memory, {self._free['memory'] / _GIB:.1f} GiB are free; "
            f"each shard takes {cpus:g} CPUs and {memory:.1f} GiB, each on one node"
        )


def _create_actor(spec: ClusterSpec, number: int, name: str, options: Mapping[str, Any]) -> bool:
    """Create an actor; return False if there is one of its name."""
    import ray  # noqa: PLC0415  # of the extra

    actor = ray.remote(ReplayShard).options(
        name=name,
        namespace=NAMESPACE,
        lifetime="detached",
        max_restarts=-1,
        scheduling_strategy="SPREAD",  # a preference: without a spare node a lost shard shares one
        **options,
    )
    try:
        actor.remote(spec, number)
    except ValueError:
        return False
    return True


def _check_num_shards(spec: ClusterSpec) -> None:
    for one in named_shards().get(spec.name, []):
        if one.num_shards != spec.num_shards:
            raise _different(spec.name, [f"num_shards {one.num_shards}, not {spec.num_shards}"])


def _check_same(there: ClusterSpec, wanted: ClusterSpec) -> None:
    """Refuse a cluster that is not the wanted one."""
    differences = [
        f"{field.name} {getattr(there, field.name)!r}, not {getattr(wanted, field.name)!r}"
        for field in dataclasses.fields(ClusterSpec)
        # A signature's arrays do not compare.
        if repr(getattr(there, field.name)) != repr(getattr(wanted, field.name))
    ]
    if differences:
        raise _different(there.name, differences)


def _different(name: str, differences: list[str]) -> SpecError:
    return SpecError(
        f"cluster `{name}` is there already and has {'; '.join(differences)}. Attach to it, stop it, or take another "
        "name."
    )
