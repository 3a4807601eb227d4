"""The start of a cluster's actors, all or none, by one process at a time; and their end."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from reverb_writer.deadline import Deadline
from reverb_writer.errors import ReplayTimeoutError
from reverb_writer.ray.actor_target import NAMESPACE, forget_actor
from reverb_writer.ray.placement import Spread, release_placement, reserve_placement
from reverb_writer.ray.server_child import server_environment
from reverb_writer.ray.shard_actor import ReplayShard, server_configuration
from reverb_writer.ray.shard_report import ClusterSpec, ShardName, ShardReport, ray_name
from reverb_writer.ray.start_errors import ShardStartError

_logger = logging.getLogger(__name__)
_POLL_S = 0.2
_LOG_EVERY_S = 5.0
_ESTIMATE_TIMEOUT_S = 60.0
_FREED_TIMEOUT_S = 10.0


class ClusterStarter:
    """An actor whose name one process at a time can have; meanwhile it asks a server for its estimate."""

    def memory_need(self, python: str, configuration: str, environment: Mapping[str, str]) -> dict[str, Any]:
        """Return what `reverb-writer-server validate --json` prints.

        Raises:
            ShardStartError: the interpreter cannot be run, or the server refuses the configuration.
        """
        line = [python, "-m", "reverb_writer_server", "validate", "--json", "/dev/stdin"]
        try:
            done = subprocess.run(  # noqa: S603  # the interpreter that the user has named, and our own module
                line,
                input=configuration,
                capture_output=True,
                text=True,
                timeout=_ESTIMATE_TIMEOUT_S,
                check=False,
                cwd="/",
                env=server_environment(environment),
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ShardStartError(
                f"{python} cannot be run on node {os.uname().nodename}: {error}. `python` must be the path of an "
                "interpreter that is on every node."
            ) from None
        if done.returncode:
            raise ShardStartError(
                f"the server refuses to start on node {os.uname().nodename}: {done.stderr.strip()}. `python` needs "
                "reverb-writer-server: pip install reverb-writer-server"
            )
        need: dict[str, Any] = json.loads(done.stdout)
        return need


def start_shards(
    spec: ClusterSpec,
    *,
    spread: Spread,
    num_cpus: float,
    memory_bytes: int | None,
    runtime_env: Mapping[str, Any] | None,
    deadline: Deadline,
    placement_timeout_s: float,
) -> list[str] | None:
    """Start the actors of a cluster and wait until all serve; return remarks, or None if the cluster is there already.

    Raises:
        PlacementError, ShardStartError, ReplayTimeoutError: nothing is left behind.
    """
    more: dict[str, Any] = {"namespace": NAMESPACE}
    if runtime_env is not None:
        more["runtime_env"] = dict(runtime_env)
    with _only_starter(spec.name, more, deadline) as starter:
        names = spec.shard_names()
        there = named_shards().get(spec.name, [])
        if there:
            if len(there) == there[0].num_shards:
                return None
            left = ", ".join(map(str, there))
            _logger.warning("cluster `%s`: a start that was cut short has left %s; removed", spec.name, left)
        remove_cluster(spec.name, map(str, there))
        bundle, remarks = {"CPU": float(num_cpus)}, []
        if memory_bytes is None:
            need = _memory_need(starter, spec, deadline)
            if need["unknown"]:
                remarks.append(
                    f"the size of {', '.join(f'`{name}`' for name in need['unknown'])} is unknown: give the table a "
                    "signature, or `memory_bytes`, so that Ray reserves enough."
                )
                _logger.warning("cluster `%s`: %s", spec.name, remarks[-1])
            memory_bytes = need["total_bytes"]
        bundle["memory"] = float(memory_bytes)
        wait_s = min(placement_timeout_s, deadline.left_s())
        try:
            group, remark = reserve_placement(spec.name, spec.num_shards, bundle, spread, wait_s)
            handles = {name: _start_actor(spec, number, name, group, bundle, more) for number, name in enumerate(names)}
            _wait_for(handles, deadline)
        except BaseException:
            remove_cluster(spec.name, names)
            raise
        return [*remarks, remark] if remark else remarks


def _memory_need(starter: Any, spec: ClusterSpec, deadline: Deadline) -> dict[str, Any]:
    """Return what the server estimates that a shard needs."""
    import ray  # noqa: PLC0415  # of the extra

    configuration = server_configuration(spec, 0, 1, 1, "127.0.0.1")
    failed = f"cluster `{spec.name}`: {spec.python} did not estimate the memory of a shard"
    asked = starter.memory_need.remote(spec.python, configuration, spec.environment)
    try:
        need: dict[str, Any] = ray.get(asked, timeout=deadline.left_s(failed))
    except ray.exceptions.GetTimeoutError:
        raise ReplayTimeoutError(f"{failed} within {deadline.timeout_s:.1f} s.") from None
    except ray.exceptions.RayError as error:
        cause = getattr(error, "cause", None)
        raise cause if isinstance(cause, ShardStartError) else ShardStartError(f"{failed}: {error}") from None
    return need


def _start_actor(
    spec: ClusterSpec, number: int, name: str, group: Any, bundle: Mapping[str, float], more: Mapping[str, Any]
) -> Any:
    import ray  # noqa: PLC0415  # of the extra
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy  # noqa: PLC0415  # of the extra

    options = {
        "name": name,
        "lifetime": "detached",
        "max_restarts": -1,
        "num_cpus": bundle["CPU"],
        "memory": bundle["memory"],
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group, number),
        **more,
    }
    return ray.remote(ReplayShard).options(**options).remote(spec, number)


def _wait_for(handles: Mapping[str, Any], deadline: Deadline) -> None:
    """Wait until all shards serve."""
    import ray  # noqa: PLC0415  # of the extra

    told_at, reports = time.monotonic(), {name: ShardReport(name, detail="its actor starts") for name in handles}
    while any(report.state != "serving" for report in reports.values()):
        waiting = "; ".join(
            f"{name} is {report.state} {report.detail}".strip()
            for name, report in reports.items()
            if report.state != "serving"
        )
        left_s = deadline.left_s(f"not every shard serves: {waiting}: not")
        if time.monotonic() - told_at > _LOG_EVERY_S:
            told_at = time.monotonic()
            _logger.info("waiting: %s", waiting)
        calls = {handle.report.remote(): name for name, handle in handles.items()}
        ready, _ = ray.wait(list(calls), num_returns=len(calls), timeout=min(_LOG_EVERY_S, left_s))
        for call in ready:
            try:
                reports[calls[call]] = ray.get(call)
            except ray.exceptions.ActorUnavailableError:
                continue
            except ray.exceptions.RayError as error:
                raise ShardStartError(f"{calls[call]}: its actor has ended: {error}") from error
        failed = next((report for report in reports.values() if report.state == "failed"), None)
        if failed is not None:
            raise ShardStartError(f"{failed.name} on node {failed.node} does not start: {failed.detail}")
        time.sleep(_POLL_S)


@contextlib.contextmanager
def _only_starter(cluster: str, more: Mapping[str, Any], deadline: Deadline) -> Iterator[Any]:
    """Be the only process that starts this cluster, within the block. A process that dies is so no longer."""
    import ray  # noqa: PLC0415  # of the extra

    while True:
        try:
            starter = (
                ray.remote(ClusterStarter).options(name=f"{ray_name(cluster)}:starter", num_cpus=0, **more).remote()
            )
            break
        except ValueError:  # somebody has the name
            deadline.left_s(f"another process starts the cluster `{cluster}` and has not come to an end")
            time.sleep(_POLL_S)
    try:
        yield starter
    finally:
        ray.kill(starter)


def named_shards() -> dict[str, list[ShardName]]:
    """Return the names of the shards' actors that are there, by cluster and in order."""
    import ray  # noqa: PLC0415  # of the extra

    found: dict[str, list[ShardName]] = {}
    for one in ray.util.list_named_actors(all_namespaces=True):
        shard = ShardName.parse(one["name"]) if one["namespace"] == NAMESPACE else None
        if shard:
            found.setdefault(shard.cluster, []).append(shard)
    return {cluster: sorted(shards) for cluster, shards in found.items()}


def remove_cluster(cluster: str, names: Iterable[str]) -> None:
    """End the actors of a cluster for good, their servers at once with them, and give the room back. Idempotent."""
    import ray  # noqa: PLC0415  # of the extra

    for name in names:
        forget_actor(name)
        with contextlib.suppress(ValueError, ray.exceptions.RayError):
            ray.kill(ray.get_actor(name, namespace=NAMESPACE), no_restart=True)
    release_placement(cluster)
    end = time.monotonic() + _FREED_TIMEOUT_S
    while cluster in named_shards() and time.monotonic() < end:
        time.sleep(_POLL_S)
