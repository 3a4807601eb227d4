"""The actors of shards on Ray: started by name, found by name, asked with an end, stopped, killed.

Ray gives a name to one actor only. The process whose actor is shard 0 has started the cluster; it removes all of it if
a shard does not start. Every other process has attached to it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Iterable, Mapping
from typing import Any

from reverb_writer.background import in_background
from reverb_writer.deadline import Deadline
from reverb_writer.errors import SpecError
from reverb_writer.lazy import needs
from reverb_writer.ray.shard_actor import ReplayShard
from reverb_writer.ray.shard_report import ClusterSpec, PlacementError, ShardReport, ShardStartError

_logger = logging.getLogger(__name__)
NAMESPACE = "reverb-writer"  # of all actors, so that every job finds them
_POLL_S = 0.2
_FREED_TIMEOUT_S = 10.0
_ANSWER_TIMEOUT_S = 5.0  # then they are asked again
_GIB = 2**30
_ENDING = ("draining", "stopped")  # states of what a `stop` has left, which is waited for
_KEEP_CHILDREN = {"RAY_kill_child_processes_on_worker_exit": "false"}  # a server outlives its actor by a checkpoint
_PATIENCE_S = 60.0  # with an actor that is silent: Ray may be starting it again, and its node may be busy

_handles: dict[str, Any] = {}  # of actors by name, for this process: without the control store they still answer


def connect_ray(address: str | None = None) -> None:
    """Connect to Ray if this process is not connected yet; `address` is as `ray.init` takes it.

    Raises:
        MissingExtraError: Ray is not installed.
        ConnectionError: nothing answers there.
    """
    with needs("reverb_writer.ray", "reverb-writer[ray]"):
        import ray  # noqa: PLC0415  # of the extra
    if not ray.is_initialized():
        ray.init(address)


def ask_actors(names: Iterable[str], method: str, timeout_s: float) -> dict[str, Any]:
    """Return what a method of actors returns, of those that answer within `timeout_s` seconds; by name."""
    asked = in_background(lambda: _ask(list(names), method, timeout_s))
    return asked.result() if asked.wait(timeout_s + 1.0) else {}  # Ray may not come back at all


def _ask(names: list[str], method: str, timeout_s: float) -> dict[str, Any]:
    import ray  # noqa: PLC0415  # of the extra

    handles = {name: actor_of(name) for name in names} if ray.is_initialized() else {}
    calls = {getattr(handle, method).remote(): name for name, handle in handles.items() if handle is not None}
    answers: dict[str, Any] = {}
    ready, _ = ray.wait(list(calls), num_returns=len(calls), timeout=timeout_s) if calls else ([], [])
    for call in ready:
        try:
            answers[calls[call]] = ray.get(call, timeout=timeout_s)
        except ray.exceptions.ActorDiedError:  # for good: another one may have its name now
            _handles.pop(calls[call], None)
        except ray.exceptions.RayError:
            continue
    return answers


def actor_of(name: str) -> Any:
    """Return the actor of that name, None if there is none now; Ray is asked for it once."""
    import ray  # noqa: PLC0415  # of the extra

    handle = _handles.get(name)
    if handle is None:
        try:
            handle = _handles[name] = ray.get_actor(name, namespace=NAMESPACE)
        except (ValueError, ray.exceptions.RayError):
            return None
    return handle


def named_shards() -> dict[str, list[str]]:
    """Return the names of the shards' actors that exist, by cluster."""
    import ray  # noqa: PLC0415  # of the extra

    found: dict[str, list[str]] = {}
    for one in ray.util.list_named_actors(all_namespaces=True):
        if one["namespace"] == NAMESPACE and one["name"].startswith("replay:"):
            found.setdefault(one["name"].split(":")[1], []).append(one["name"])
    return found


def end_actors(cluster: str, names: Iterable[str]) -> None:
    """End the actors of a cluster for good; a server that still runs is told to end. Idempotent."""
    import ray  # noqa: PLC0415  # of the extra

    for name in names:
        _handles.pop(name, None)
        with contextlib.suppress(ValueError, ray.exceptions.RayError):
            ray.kill(ray.get_actor(name, namespace=NAMESPACE), no_restart=True)
    end = time.monotonic() + _FREED_TIMEOUT_S
    while cluster in named_shards() and time.monotonic() < end:
        time.sleep(_POLL_S)


def stop_shards(
    cluster: str, names: Iterable[str], timeout_s: float, patience_s: float = _PATIENCE_S
) -> dict[str, str]:
    """End all servers, each with a last checkpoint, then remove the cluster; log and return what has written none.

    An actor is asked again until it tells that its server has ended: one that Ray starts again does not know of it.
    All may take `timeout_s` seconds, and each may be silent for `patience_s`.

    Returns:
        By the name of the shard, why it has no last checkpoint.
    """
    names = list(names)
    now = time.monotonic()
    end = now + timeout_s
    heard_at = {name: now for name in names if actor_of(name) is not None}  # of those that have not ended
    unsaved: dict[str, str] = {}
    while heard_at and now < end:
        answers = ask_actors(heard_at, "stop", min(_ANSWER_TIMEOUT_S, end - now))
        now = time.monotonic()
        heard_at |= dict.fromkeys(answers, now)
        for name, at in list(heard_at.items()):
            if name in answers and answers[name].state == "stopped":
                why = answers[name].detail
            elif actor_of(name) is None:
                why = "its actor is gone"
            elif now - at >= patience_s:
                why = f"its actor has not answered for {patience_s:g} s"
            else:
                continue
            del heard_at[name]
            if why:
                unsaved[name] = why
        time.sleep(_POLL_S)
    unsaved |= dict.fromkeys(heard_at, f"it has not ended within {timeout_s:g} s")
    if unsaved:
        reasons = "; ".join(f"{name}: {why}" for name, why in sorted(unsaved.items()))
        _logger.warning("cluster `%s` ends without a last checkpoint of %s", cluster, reasons)
    end_actors(cluster, names)
    return unsaved


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
        SpecError: another cluster has this name.
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

    Both are by kind: the need of each shard, and the room that all shards have together.
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
            f"cluster `{wanted.name}` exists and has {'; '.join(differences)}. Attach to it, stop it, or "
            "take another name."
        )
