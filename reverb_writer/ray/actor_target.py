"""Where a cluster's shards are: as the files beside their checkpoints say, else as their actors do.

While neither can be read, what is known stays: clients find out themselves whether a server answers.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from reverb_writer.background import Outcome, in_background
from reverb_writer.client.targets import Shard, Target
from reverb_writer.errors import ServerUnavailableError
from reverb_writer.ray.actors import ask_actors
from reverb_writer.ray.addresses import newest_claim
from reverb_writer.ray.shard_report import ClusterSpec, ShardReport


@dataclass(frozen=True)
class ActorTarget:
    """The target of a cluster: a source of its shards' addresses. Picklable, hashable and thread-safe.

    With checkpoints it reads the files beside them, which needs no Ray. Without, or where that folder is not mounted,
    it asks the actors, which needs a process that is connected to Ray. Where neither answers, it tells what was known
    where it was made or pickled.

    Attributes:
        spec: the cluster.
        known: what is known of each shard, by its name.
    """

    spec: ClusterSpec = field(compare=False)
    known: dict[str, ShardReport] = field(compare=False, repr=False, default_factory=dict)
    cluster: str = field(init=False)
    _looks: list[Outcome[None]] = field(init=False, compare=False, repr=False, default_factory=list)

    def __post_init__(self) -> None:
        """Take the cluster's name, which targets are compared by; `known` has all shards, so that its size stays."""
        object.__setattr__(self, "cluster", self.spec.name)
        for name in self.spec.shard_names():
            self.known.setdefault(name, ShardReport(name))

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what other threads do."""
        return {**vars(self), "_looks": []}

    def look_up(self, timeout_s: float) -> Target:
        """Return the newest target that is known within `timeout_s` seconds, though a folder or Ray may not answer.

        Raises:
            ServerUnavailableError: no shard has told its address yet.
        """
        if not self._looks or self._looks[0].done():  # one that a folder holds up is not joined by others
            self._looks[:] = [in_background(lambda: self._look(timeout_s))]
        self._looks[0].wait(timeout_s + 1.0)  # Ray tells at the end of it who is silent
        return self._target()

    def note(self, report: ShardReport) -> None:
        """Take note of a `report` of a shard, unless a newer server of it is known."""
        if self.known[report.name].generation <= report.generation:  # without checkpoints all are 0
            self.known[report.name] = report

    def _look(self, timeout_s: float) -> None:
        unread = [name for number, name in enumerate(self.spec.shard_names()) if not self._read(number, name)]
        for report in ask_actors(unread, "report", timeout_s).values() if unread else ():
            self.note(report)

    def _read(self, number: int, name: str) -> bool:
        """Read the file of a shard; return whether there is one."""
        folder = self.spec.shard_folder(number)
        claim = None if folder is None else newest_claim(folder)
        if claim is None:
            return False
        before = self.known[name]
        address = claim.address or before.address
        self.note(replace(before, address=address, state=claim.phase, generation=claim.number))
        return True

    def _target(self) -> Target:
        reports = list(self.known.values())
        shards = [
            Shard(report.name, report.address, "up" if report.state == "serving" else "lost")
            for report in reports
            if report.address
        ]
        if not shards:
            raise ServerUnavailableError(
                f"no shard of the cluster `{self.cluster}` has told its address yet. `reverb-writer ray status "
                f"{self.cluster}` says what they wait for."
            )
        return Target(sum(report.generation for report in reports), tuple(shards))
