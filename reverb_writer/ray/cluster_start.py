"""The start of a cluster's actors: those of their names that are missing, by as many processes at once as like to.

Ray gives a name to one actor only. The process whose actor is shard 0 has started the cluster; it removes all of it if
a shard does not start. Every other process has attached to it.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from typing import Any

from reverb_writer.deadline import Deadline
from reverb_writer.errors import SpecError
from reverb_writer.ray.actors import NAMESPACE, actor_of, ask_actors, end_actors, named_shards
from reverb_writer.ray.shard_actor import ReplayShard
from reverb_writer.ray.shard_report import ClusterSpec, PlacementError, ShardReport, ShardStartError

_POLL_S = 0.2
_ANSWER_TIMEOUT_S = 5.0
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
    import ray  # noqa: PLC0415  # of the extra

    more = dict(runtime_env or {})
    more["env_vars"] = {**_KEEP_CHILDREN, **more.get("env_vars", {})}
    need = {"CPU": float(num_cpus), "memory": float(memory_bytes)}
    shard = ray.remote(ReplayShard)
    options: dict[str, Any] = {
        "namespace": NAMESPACE,
        "lifetime": "detached",
        "max_restarts": -1,
        "scheduling_strategy": "SPREAD",  # a preference: without a spare node a lost shard shares one
        "num_cpus": need["CPU"],
        "memory": need["memory"],
        "runtime_env": more,
    }
    most_free = dict.fromkeys(need, 0.0)
    num_placed = 0
    is_ours = False
    try:
        while True:
            _check_num_shards(spec)
            # Ray does not tell an actor that waits for room from one whose process starts slowly. So only what has
            # never been free is missing.
            free = ray.available_resources()
            for kind, amount in need.items():
                most_free[kind] = max(most_free[kind], free.get(kind, 0.0) + num_placed * amount)
            for number, name in enumerate(spec.shard_names()):
                if actor_of(name) is None:
                    is_ours = is_ours or number == 0  # before: an interrupt may come while Ray creates it
                    try:
                        shard.options(name=name, **options).remote(spec, number)
                    except ValueError:  # another process has just created it
                        is_ours = is_ours and number > 0
            reports = _look(spec, deadline)
            if [one.state for one in reports.values()] == ["serving"] * spec.num_shards:
                return is_ours
            num_placed = len(reports)
            if num_placed < spec.num_shards and deadline.spent_s > placement_timeout_s:
                _check_room(spec, need, most_free)
            time.sleep(_POLL_S)
    except BaseException:
        if is_ours:
            end_actors(spec.name, spec.shard_names())
        raise


def _look(spec: ClusterSpec, deadline: Deadline) -> dict[str, ShardReport]:
    """Return how the shards fare that have an actor, and refuse those of another cluster or that have failed."""
    timeout_s = min(_ANSWER_TIMEOUT_S, deadline.left_s(f"cluster `{spec.name}`: not all shards serve"))
    answers = ask_actors(spec.shard_names(), "describe", timeout_s)
    for there, report in answers.values():
        if report.state not in _ENDING:
            _check_same(there, spec)
        if report.state == "failed":
            raise ShardStartError(f"{report.name} on node {report.node} does not start: {report.detail}")
    return {name: report for name, (_, report) in answers.items()}


def _check_room(spec: ClusterSpec, need: Mapping[str, float], most_free: Mapping[str, float]) -> None:
    """Refuse a cluster that is larger than what Ray's nodes have, or than what they have had free at once.

    Both are by kind: what each shard needs, and what has been free for all of them.
    """
    import ray  # noqa: PLC0415  # of the extra

    number, cpus, memory = spec.num_shards, need["CPU"], need["memory"] / _GIB
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    fit = sum(
        min(int(node.get(kind, 0) / amount) if amount else number for kind, amount in need.items()) for node in nodes
    )
    if fit >= number and all(most_free[kind] >= number * amount for kind, amount in need.items()):
        return
    raise PlacementError(
        f"cluster `{spec.name}`: {number} shards have no room: needs {number * cpus:g} CPUs, {most_free['CPU']:g} are "
        f"free; needs {number * memory:.1f} GiB of memory, {most_free['memory'] / _GIB:.1f} GiB are free; each shard "
        f"takes {cpus:g} CPUs and {memory:.1f} GiB, each on one node. Stop what has it, add nodes, or ask for fewer "
        "shards, or less for each (`num_cpus`, `memory_bytes`)."
    )


def _check_num_shards(spec: ClusterSpec) -> None:
    for name in named_shards().get(spec.name, []):
        _check_same(dataclasses.replace(spec, num_shards=int(name.rpartition("-of-")[2])), spec)


def _check_same(there: ClusterSpec, wanted: ClusterSpec) -> None:
    """Refuse a cluster that is not the wanted one."""
    names = [field.name for field in dataclasses.fields(ClusterSpec)]
    pairs = {name: (repr(getattr(there, name)), repr(getattr(wanted, name))) for name in names}  # arrays do not compare
    differences = [f"{name} {one}, not {other}" for name, (one, other) in pairs.items() if one != other]
    if differences:
        raise SpecError(
            f"cluster `{wanted.name}` is there already and has {'; '.join(differences)}. Attach to it, stop it, or "
            "take another name."
        )
