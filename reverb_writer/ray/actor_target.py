"""Where a cluster's shards are: as the files beside their checkpoints say, else as their actors do.

While neither can be read, what is known stays: clients find out themselves whether a server answers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from reverb_writer.background import Outcome, in_background
from reverb_writer.client.targets import Shard, Target
from reverb_writer.errors import ServerUnavailableError
from reverb_writer.ray.actors import ask_actors
from reverb_writer.ray.addresses import newest_claim
from reverb_writer.ray.shard_report import ClusterSpec


class _Known(NamedTuple):
    generation: int = 0  # without checkpoints it stays 0
    address: str = ""
    state: str = ""


@dataclass(frozen=True)
class ActorTarget:
    """The target of a cluster: a source of its shards' addresses. Picklable, hashable and thread-safe.

    With checkpoints it reads the files beside them, which needs no Ray. Without, or where that folder is not mounted,
    it asks the actors, which needs a process that is connected to Ray. Where neither answers, it tells what was known
    where it was made or pickled.

    Attributes:
        spec: the cluster; targets are compared by its name.
    """

    spec: ClusterSpec = field(compare=False)
    cluster: str = field(init=False)
    _known: dict[str, _Known] = field(init=False, compare=False, repr=False)
    _looks: list[Outcome[None]] = field(init=False, compare=False, repr=False, default_factory=list)

    def __post_init__(self) -> None:
        object.__setattr__(self, "cluster", self.spec.name)
        object.__setattr__(self, "_known", dict.fromkeys(self.spec.shard_names(), _Known()))  # its size stays

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
        known = self._known.copy()
        shards = [
            Shard(name, one.address, "up" if one.state == "serving" else "lost")
            for name, one in known.items()
            if one.address
        ]
        if not shards:
            raise ServerUnavailableError(
                f"no shard of the cluster `{self.cluster}` has told its address yet. `reverb-writer ray status "
                f"{self.cluster}` says what they wait for."
            )
        return Target(tuple(shards))

    def _look(self, timeout_s: float) -> None:
        unread = []
        for number, name in enumerate(self.spec.shard_names()):
            claim = newest_claim(self.spec.shard_folder(number))
            if claim is None:
                unread.append(name)
            else:
                self._note(name, claim.number, claim.address, claim.phase)
        for name, report in ask_actors(unread, "report", timeout_s).items() if unread else ():
            self._note(name, report.generation, report.address, report.state)

    def _note(self, name: str, generation: int, address: str, state: str) -> None:
        """Take note of a server, unless a newer one of the shard is known; one that starts has no address yet."""
        if self._known[name].generation <= generation:
            self._known[name] = _Known(generation, address or self._known[name].address, state)
