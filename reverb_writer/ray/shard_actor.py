"""The actor of a shard: a thin one, which starts a server on its node, tells how it fares, and ends with it.

Ray starts it again without end, on another node if its own is lost; the server then restores its newest checkpoint.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from typing import Any

from reverb_writer.ray.addresses import newest_claim
from reverb_writer.ray.server_child import ChildEnd, ServerChild
from reverb_writer.ray.shard_report import ClusterSpec, ShardReport, TableFigures
from reverb_writer.tables.shares import share_of
from reverb_writer.tables.table_dicts import table_to_dict

_LOOPBACK, _ALL = "127.0.0.1", "0.0.0.0"  # noqa: S104  # whom the other nodes must reach
# How long an actor outlives its server, seconds: so that `stop` hears of the last checkpoint, that `start` hears why
# the server does not start, and that a node from which a server was sent away has gone when the next one starts.
_STOPPED_S, _FAILED_S, _SENT_AWAY_S = 10.0, 20.0, 60.0


class ReplayShard:
    """One shard of a cluster; runs as an actor of Ray."""

    def __init__(self, spec: ClusterSpec, number: int) -> None:
        """Start the server of a shard, whose `number` is from 0 on."""
        import ray  # noqa: PLC0415  # of the extra

        self._spec, self._number = spec, number
        self._itself = ray.get_runtime_context().current_actor
        self._node: str = ray.util.get_node_ip_address()
        self._folder = spec.shard_folder(number)
        bind = spec.bind or (_LOOPBACK if self._node == _LOOPBACK else _ALL)
        self._host = _LOOPBACK if bind == _LOOPBACK else self._node
        self._status: Mapping[str, Any] = {}
        self._generation = 0
        self._child = ServerChild(
            spec.python,
            server_configuration(spec, number),
            self._server_has_ended,
            port=None if spec.port is None else spec.port + number,
            options=["--bind", bind, "--claim", self._host],
        )

    def __repr__(self) -> str:
        """Return what Ray puts before each line of this actor's log."""
        return f"replay {self._spec.name}, shard {self._number} of {self._spec.num_shards}"

    def describe(self) -> tuple[ClusterSpec, ShardReport]:
        """Return what the cluster is, and how the shard fares."""
        return self._spec, self.report()

    def report(self) -> ShardReport:
        """Return how the shard fares."""
        child = self._child
        end = child.end
        if end is None:
            self._status = child.status() or self._status
        status = self._status
        state, detail = (end.state, end.detail) if end is not None else _state(status, is_asked=child.is_asked)
        claim = None if self._folder is None else newest_claim(self._folder)
        if claim is not None and claim.pid == child.pid:
            self._generation = claim.number
            state = claim.phase if state == "serving" else state  # clients read the file, which comes a moment later
        saved = status.get("checkpoints", {})
        return ShardReport(
            self._spec.shard_names()[self._number],
            f"{self._host}:{child.port}" if child.port else "",
            state,
            detail,
            self._generation,
            self._node,
            child.pid,
            status.get("starts", 0),
            status.get("memory", {}).get("used_bytes", 0),
            saved.get("name"),
            saved.get("age_s"),
            {
                table["name"]: TableFigures(table["size"], table["max_size"], table["inserts"], table["samples"])
                for table in status.get("tables", ())
            },
        )

    def stop(self) -> ShardReport:
        """Have the server write its last checkpoint and end; return how the shard fares. Idempotent."""
        self._child.stop()
        return self.report()

    def _server_has_ended(self, end: ChildEnd) -> None:
        """End the actor, for good if that was asked for; in the thread that has started the server."""
        import ray  # noqa: PLC0415  # of the extra

        if self._child.is_asked:
            time.sleep(_STOPPED_S)
        elif end.state == "stopped":
            time.sleep(_SENT_AWAY_S)
        elif not self._child.has_served:
            time.sleep(_FAILED_S)
        if not self._child.is_asked:  # meanwhile
            os._exit(1)  # so Ray starts it again, here or elsewhere
        ray.kill(self._itself, no_restart=True)


def _state(status: Mapping[str, Any], *, is_asked: bool) -> tuple[str, str]:
    """Return the state and its detail of a shard whose server runs."""
    phase, detail = str(status.get("phase", "starting")), str(status.get("detail", ""))
    if phase == "serving" and not status.get("ready"):
        detail = str(status.get("reason", ""))
    return ("draining", "") if is_asked or phase == "stopped" else (phase, detail)


def server_configuration(spec: ClusterSpec, number: int) -> str:
    """Return the configuration of a shard's server without its ports, as JSON.

    Raises:
        SpecError: a table cannot be split, or cannot be written in the server's configuration.
    """
    folder = spec.shard_folder(number)
    shares = (share_of(table, number, spec.num_shards) for table in spec.tables)
    values: dict[str, Any] = {"tables": {share.name: table_to_dict(share) for share in shares}}
    if folder is not None:
        values["checkpoints"] = {"directory": str(folder / "checkpoints"), "every_s": spec.checkpoint_every_s}
    return json.dumps(values)
