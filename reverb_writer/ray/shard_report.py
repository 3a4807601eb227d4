"""The shards of a cluster, their reports, and why it cannot start. Plain values: they pass between processes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass, field
from pathlib import Path

from reverb_writer.errors import ReverbWriterError
from reverb_writer.tables import TableConfig


class PlacementError(ReverbWriterError, RuntimeError):
    """Ray has no room for the shards; the message says what they need and what is free."""


class ShardStartError(ReverbWriterError, RuntimeError):
    """The server of a shard does not start; the message has its last log lines."""


@dataclass(frozen=True)
class ClusterSpec:
    """The definition of a cluster, as each of its actors knows it."""

    name: str  # of the cluster
    tables: tuple[TableConfig, ...]  # of all shards together
    num_shards: int  # how many there are
    python: str  # interpreter of the servers
    checkpoints: str | None = None  # folder of all checkpoints, on storage that every node reaches; None for none
    checkpoint_every_s: float = 600.0  # seconds between checkpoints
    port: int | None = None  # of the first shard, the next one has the next; None for free ones
    bind: str | None = None  # address that servers accept on; None for all, unless nodes know each other by 127.0.0.1

    def shard_folder(self, number: int) -> Path | None:
        """Return the folder of a shard, which is the same after each start; None without checkpoints."""
        if self.checkpoints is None:
            return None
        return Path(self.checkpoints) / self.name / f"shard-{number}-of-{self.num_shards}"

    def shard_names(self) -> tuple[str, ...]:
        """Return the names of the shards, which are those of their actors, too.

        >>> ClusterSpec("experiment", (), 2, "python").shard_names()
        ('replay:experiment:shard-0-of-2', 'replay:experiment:shard-1-of-2')
        """
        return tuple(f"replay:{self.name}:shard-{number}-of-{self.num_shards}" for number in range(self.num_shards))


@dataclass(frozen=True)
class TableFigures:
    """A table of a shard.

    Attributes:
        size: items it holds.
        max_size: items it holds at most.
        inserts: items inserted so far.
        samples: items sampled so far.
    """

    size: int
    max_size: int
    inserts: int
    samples: int


@dataclass(frozen=True)
class ShardReport:
    """A shard at one moment.

    Attributes:
        name: of the shard.
        address: `host:port`; "" before the first start.
        state: "starting", "restoring", "serving", "draining", "stopped", or "failed" while it waits to start again;
            "no answer" if its actor does not answer.
        detail: more about the state, such as the progress of a restore or the last lines of the log.
        generation: number of the server among those on this shard's checkpoints; 0 without checkpoints.
        node: IP address of the node.
        pid: of the server; None if it does not run.
        starts: starts of a server on this shard's checkpoints.
        memory_bytes: resident memory of the server, bytes.
        checkpoint: name of the newest checkpoint; None if there is none.
        checkpoint_age_s: its age in seconds; None if there is none.
        tables: by name.
    """

    name: str
    address: str = ""
    state: str = "starting"
    detail: str = ""
    generation: int = 0
    node: str = ""
    pid: int | None = None
    starts: int = 0
    memory_bytes: int = 0
    checkpoint: str | None = None
    checkpoint_age_s: float | None = None
    tables: Mapping[str, TableFigures] = field(default_factory=dict)

    @property
    def number(self) -> int:
        """The shard's number in its cluster, from 0."""
        return int(self.name.rpartition("shard-")[2].partition("-of-")[0])


@dataclass(frozen=True)
class ClusterStatus:
    """All shards at one moment.

    Attributes:
        name: of the cluster.
        shards: in order.
        remarks: sentences about what is not as asked for, such as shards that share a node.
    """

    name: str
    shards: tuple[ShardReport, ...]
    remarks: tuple[str, ...] = ()

    @property
    def is_serving(self) -> bool:
        """Whether every shard serves."""
        return all(shard.state == "serving" for shard in self.shards)

    def tables(self) -> dict[str, TableFigures]:
        """Return the tables of all shards together."""
        names = dict.fromkeys(name for shard in self.shards for name in shard.tables)
        return {name: _sum(shard.tables[name] for shard in self.shards if name in shard.tables) for name in names}


def _sum(figures: Iterable[TableFigures]) -> TableFigures:
    return TableFigures(*map(sum, zip(*map(astuple, figures), strict=True)))
