"""The definition of a cluster, the reports of its shards, and the error of a start: values for other processes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from reverb_writer.errors import ReverbWriterError
from reverb_writer.tables import TableConfig


class ShardStartError(ReverbWriterError, RuntimeError):
    """The server of a shard does not start; the error has its last log lines."""


@dataclass(frozen=True)
class ClusterSpec:
    """The definition of a cluster, as each of its actors knows it."""

    name: str  # name of the cluster
    tables: tuple[TableConfig, ...]  # tables of all shards together
    num_shards: int  # number of shards
    python: str  # interpreter of the servers
    checkpoints: str | None = None  # folder of checkpoints that every node reaches; None for no checkpoints
    checkpoint_every_s: float = 600.0  # seconds between checkpoints
    port: int | None = None  # port of the first shard, then the next ports; None for free ports

    def shard_folder(self, number: int) -> Path | None:
        """Return the folder of a shard, which is the same after each start; None without checkpoints."""
        if self.checkpoints is None:
            return None
        return Path(self.checkpoints) / self.name / f"shard-{number}-of-{self.num_shards}"

    def shard_names(self) -> tuple[str, ...]:
        """Return the names of the shards, which are also the names of their actors.

        >>> ClusterSpec("experiment", (), 2, "python").shard_names()
        ('replay:experiment:shard-0-of-2', 'replay:experiment:shard-1-of-2')
        """
        return tuple(f"replay:{self.name}:shard-{number}-of-{self.num_shards}" for number in range(self.num_shards))


@dataclass(frozen=True)
class ShardReport:
    """A shard at one moment; `rw.Client(address)` has its tables.

    Attributes:
        name: name of the shard.
        address: `host:port`; "" before it serves for the first time.
        state: "starting", "restoring", "serving", "draining", "stopped", or "failed" while it waits to start again;
            "no answer" if its actor does not answer.
        detail: the end of the server's log, for example the progress of a restore; "" while it serves.
        node: IP address of the node.
        pid: process id of the server; None if it does not run.
    """

    name: str
    address: str = ""
    state: str = "starting"
    detail: str = ""
    node: str = ""
    pid: int | None = None


@dataclass(frozen=True)
class ClusterStatus:
    """All shards at one moment.

    Attributes:
        name: name of the cluster.
        shards: reports of the shards, in order.
    """

    name: str
    shards: tuple[ShardReport, ...]

    @property
    def is_serving(self) -> bool:
        """Whether every shard serves."""
        return all(shard.state == "serving" for shard in self.shards)
