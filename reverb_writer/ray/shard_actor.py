"""The actor of a shard: a thin one, which keeps a server running on its node and tells how it fares.

All of its methods return at once. Ray starts it again without end, on another node if its own is lost; the server then
restores its newest checkpoint.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from reverb_writer.ray.server_child import ChildView, ServerChild
from reverb_writer.ray.server_toml import table_toml, values_toml
from reverb_writer.ray.shard_metrics import ShardMetrics
from reverb_writer.ray.shard_report import ClusterSpec, ShardReport, TableFigures
from reverb_writer.tables.shares import share_of

_LOOPBACK, _ALL = "127.0.0.1", "0.0.0.0"  # noqa: S104  # whom the other nodes must reach
_ADDRESS = "ADDRESS.json"
_CHECKPOINTS = "checkpoints"


class ReplayShard:
    """One shard of a cluster; runs as an actor of Ray."""

    def __init__(self, spec: ClusterSpec, number: int) -> None:
        """Start to start the server.

        Args:
            spec: the cluster.
            number: of the shard, from 0.
        """
        import ray  # noqa: PLC0415  # of the extra

        self._spec, self._number = spec, number
        self._node: str = ray.util.get_node_ip_address()
        self._folder = None if spec.checkpoints is None else shard_folder(spec, number)
        self._metrics = ShardMetrics(spec.name, number)
        self._generation = time.time_ns() // 1_000_000
        self._told: tuple[Any, ...] = ()
        self._bind = spec.bind or (_LOOPBACK if self._node == _LOOPBACK else _ALL)
        self._child: ServerChild | None = None
        self._child = ServerChild(
            spec.python,
            self._configuration,
            self._changed,
            port=None if spec.port is None else spec.port + number,
            last_port=self._last_port(),
            environment=spec.environment,
        )

    def __repr__(self) -> str:
        """Return what Ray puts before each line of this actor's log."""
        return f"replay {self._spec.name}, shard {self._number} of {self._spec.num_shards}"

    def spec(self) -> ClusterSpec:
        """Return what the cluster is."""
        return self._spec

    def report(self) -> ShardReport:
        """Return how the shard fares."""
        return self._report(self._child.view if self._child is not None else ChildView())

    def stop(self) -> ShardReport:
        """Have the server write its last checkpoint and end; return how the shard fares. Idempotent."""
        if self._child is not None:
            self._child.stop()
        return self.report()

    def _configuration(self, port: int, http_port: int) -> str:
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
        return server_configuration(self._spec, self._number, port, http_port, self._bind)

    def _report(self, view: ChildView) -> ShardReport:
        status = view.status
        saved = status.get("checkpoints", {})
        return ShardReport(
            self._spec.shard_names()[self._number],
            f"{_LOOPBACK if self._bind == _LOOPBACK else self._node}:{view.port}" if view.port else "",
            view.state,
            view.detail,
            self._generation,
            self._node,
            view.pid,
            view.attempts,
            status.get("starts", 0),
            status.get("memory", {}).get("used_bytes", 0),
            saved.get("name"),
            saved.get("age_s"),
            {
                table["name"]: TableFigures(table["size"], table["max_size"], table["inserts"], table["samples"])
                for table in status.get("tables", ())
            },
        )

    def _changed(self, view: ChildView) -> None:
        """Take note of a look at the server."""
        now = (view.port, view.state, view.attempts)
        if now != self._told:
            self._told = now
            self._generation = max(self._generation + 1, time.time_ns() // 1_000_000)
            if view.state == "serving":
                self._keep_port(view.port)
        self._metrics.set(self._report(view))

    def _last_port(self) -> int | None:
        """Return the port of the server that was here before: clients that have its address find this one, too."""
        if self._folder is None:
            return None
        try:
            before = json.loads((self._folder / _ADDRESS).read_text())
            return int(before["port"]) if before["node"] == self._node else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _keep_port(self, port: int | None) -> None:
        if self._folder is None:
            return
        partial = self._folder / f"{_ADDRESS}.{os.getpid()}"
        try:
            partial.write_text(json.dumps({"node": self._node, "port": port}))
            partial.replace(self._folder / _ADDRESS)
        except OSError as error:
            print(f"{self._folder}: the address cannot be kept ({error}); the next server has another one")  # noqa: T201  # to the actor's log


def shard_folder(spec: ClusterSpec, number: int) -> Path:
    """Return the folder of a shard, which is the same after each restart."""
    return Path(spec.checkpoints or "") / spec.name / f"shard-{number}-of-{spec.num_shards}"


def server_configuration(spec: ClusterSpec, number: int, port: int, http_port: int, bind: str) -> str:
    """Return the TOML of a shard's server.

    Raises:
        SpecError: a table cannot be split, or cannot be written in the server's configuration.
    """
    checkpoints: dict[str, Any] = {}
    if spec.checkpoints is not None:
        directory = str(shard_folder(spec, number) / _CHECKPOINTS)
        checkpoints = {"directory": directory, "every_s": spec.checkpoint_every_s}
    top = f"port = {port}\nbind = {json.dumps(bind)}\n"
    sections = [values_toml("http", {"port": http_port}), values_toml("checkpoints", checkpoints)]
    tables = [table_toml(share_of(table, number, spec.num_shards)) for table in spec.tables]
    return "\n".join([top, *sections, *tables])
