"""The room for a cluster's shards: a placement group of Ray, waited for with an end, and words when there is none."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any, Literal

from reverb_writer.ray.shard_report import ray_name
from reverb_writer.ray.start_errors import PlacementError

Spread = Literal["strict", "best"]
_logger = logging.getLogger(__name__)
_LOG_EVERY_S = 5.0
_FIRST_LOG_S = 1.0
_POLL_S = 0.1
_GIB = 2**30


def reserve_placement(
    cluster: str, num_shards: int, bundle: Mapping[str, float], spread: Spread, timeout_s: float
) -> tuple[Any, str | None]:
    """Reserve room for the shards; return the placement group, and a remark if they share nodes against the wish.

    Args:
        cluster: its name.
        num_shards: how many shards it has.
        bundle: what each needs: "CPU" in processors, "memory" in bytes.
        spread: "strict" for a node each where there are as many, "best" for as many nodes as there are.
        timeout_s: how long to wait for the room.

    Raises:
        PlacementError: there is no room in time. The group stays, as with any other error: `release_placement` ends it.
    """
    from ray.util.placement_group import placement_group  # noqa: PLC0415  # of the extra

    remark = None
    strategy = "SPREAD"
    if spread == "strict":
        num_nodes = sum(_fits(node, bundle) for node in _nodes())
        if num_nodes >= num_shards:
            strategy = "STRICT_SPREAD"
        else:
            remark = (
                f"{num_shards} shards share nodes, for only {num_nodes} have room for one: a node that is lost takes "
                "several shards with it. Add nodes and start again for one each."
            )
            _logger.warning("cluster `%s`: %s", cluster, remark)
    group = placement_group([dict(bundle)] * num_shards, strategy=strategy, name=ray_name(cluster), lifetime="detached")
    end, told_at = time.monotonic() + timeout_s, time.monotonic() - _LOG_EVERY_S + _FIRST_LOG_S
    while not group.wait(0):
        lack = f"{num_shards} shards have no room: {_lack(num_shards, bundle, strategy)}"
        if time.monotonic() >= end:
            raise PlacementError(
                f"cluster `{cluster}`: {lack}. Waited {timeout_s:g} s. Stop what has it, add nodes, or ask for fewer "
                "shards, or less for each (`num_cpus`, `memory_bytes`)."
            )
        if time.monotonic() - told_at >= _LOG_EVERY_S:
            told_at = time.monotonic()
            _logger.warning("cluster `%s` waits: %s", cluster, lack)
        time.sleep(_POLL_S)
    return group, remark


def release_placement(cluster: str) -> bool:
    """Give back the room of a cluster, and end every actor in it; return whether it had any."""
    import ray  # noqa: PLC0415  # of the extra
    from ray.util.placement_group import (  # noqa: PLC0415  # of the extra
        PlacementGroup,
        placement_group_table,
        remove_placement_group,
    )

    found = [
        one["placement_group_id"]
        for one in placement_group_table().values()
        if one["name"] == ray_name(cluster) and one["state"] != "REMOVED"
    ]
    for number in found:
        remove_placement_group(PlacementGroup(ray.PlacementGroupID(bytes.fromhex(number))))
    return bool(found)


def _nodes() -> list[Mapping[str, float]]:
    """Return the resources of the nodes that are alive."""
    import ray  # noqa: PLC0415  # of the extra

    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def _fits(node: Mapping[str, float], bundle: Mapping[str, float]) -> bool:
    return all(node.get(name, 0) >= amount for name, amount in bundle.items())


def _lack(num_shards: int, bundle: Mapping[str, float], strategy: str) -> str:
    """Say what is needed and what is free, such as "needs 9 CPUs, 8 are free"."""
    import ray  # noqa: PLC0415  # of the extra

    free = ray.available_resources()
    parts = [f"needs {num_shards * bundle['CPU']:g} CPUs, {free.get('CPU', 0):g} are free"]
    if "memory" in bundle:
        need, left = num_shards * bundle["memory"] / _GIB, free.get("memory", 0) / _GIB
        parts.append(f"needs {need:.1f} GiB of memory, {left:.1f} GiB are free")
    where = "each on a node of its own" if strategy == "STRICT_SPREAD" else "each on one node"
    memory = f" and {bundle['memory'] / _GIB:.1f} GiB" if "memory" in bundle else ""
    return f"{'; '.join(parts)}; each shard takes {bundle['CPU']:g} CPUs{memory}, {where}"
