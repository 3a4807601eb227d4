"""What a cluster is, what its shards say, and why it cannot start. Plain values: they pass between processes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from reverb_writer.errors import ReverbWriterError
from reverb_writer.tables import TableConfig

_SHARD = re.compile(r"replay:(?P<cluster>[^:]+):shard-(?P<number>\d+)-of-(?P<num_shards>\d+)")


class PlacementError(ReverbWriterError, RuntimeError):
    """Ray has no room for the shards; the message says what they need and what is free."""


class ShardStartError(ReverbWriterError, RuntimeError):
    """The server of a shard does not start; the message has its last log lines."""


class ShardName(NamedTuple):
    """What the name of a shard, which is that of its actor, too, tells.

    >>> str(ShardName("experiment", 3, 4))
    'replay:experiment:shard-3-of-4'
    >>> ShardName.parse("replay:experiment:shard-3-of-4"), ShardName.parse("replay:experiment:other")
    (ShardName(cluster='experiment', number=3, num_shards=4), None)
    """

    cluster: str
    number: int  # in the cluster, from 0
    num_shards: int  # of the cluster

    def __str__(self) -> str:
        """Return the name."""
        return f"replay:{self.cluster}:shard-{self.number}-of-{self.num_shards}"

    @classmethod
    def parse(cls, name: str) -> ShardName | None:
        """Return what a name tells; None if it is not a shard's."""
        match = _SHARD.fullmatch(name)
        return cls(match["cluster"], int(match["number"]), int(match["num_shards"])) if match else None


@dataclass(frozen=True)
class ClusterSpec:
    """What a cluster is, as each of its actors knows it."""

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
        """Return the names of the shards, which are those of their actors, too."""
        return tuple(str(ShardName(self.name, number, self.num_shards)) for number in range(self.num_shards))


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
        parsed = ShardName.parse(self.name)
        assert parsed is not None  # noqa: S101  # names are made by `ShardName`
        return parsed.number


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
        return {name: _sum([shard.tables[name] for shard in self.shards if name in shard.tables]) for name in names}


def _sum(figures: list[TableFigures]) -> TableFigures:
    def total(name: str) -> Any:
        return sum(getattr(one, name) for one in figures)

    return TableFigures(total("size"), total("max_size"), total("inserts"), total("samples"))
