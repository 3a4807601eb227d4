"""The addresses of a cluster's shards: from the files beside their checkpoints, or from their actors.

If neither can be read, the last known addresses remain: clients check themselves whether a server answers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from reverb_writer.background import Outcome, in_background
from reverb_writer.errors import ServerUnavailableError
from reverb_writer.ray.actors import ask_actors
from reverb_writer.ray.addresses import newest_claim
from reverb_writer.ray.shard_report import ClusterSpec
from reverb_writer.shards.targets import Shard, Target


@dataclass(frozen=True)
class ActorTarget:
    """The target of a cluster: a source of its shards' addresses. Picklable, hashable and thread-safe.

    With checkpoints it reads the files beside them, without Ray. Without checkpoints, or if their folder is not
    mounted, it asks the actors, which needs a process that is connected to Ray. If neither answers, it returns the
    addresses that were known when it was made or pickled.

    Attributes:
        spec: the cluster; targets are compared by its name.
    """

    spec: ClusterSpec = field(compare=False)
    cluster: str = field(init=False)
    _known: dict[str, Shard] = field(init=False, compare=False, repr=False, default_factory=dict)
    _looks: list[Outcome[None]] = field(init=False, compare=False, repr=False, default_factory=list)

    def __post_init__(self) -> None:
        object.__setattr__(self, "cluster", self.spec.name)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the work of other threads."""
        return {**vars(self), "_known": self._known.copy(), "_looks": []}

    def look_up(self, timeout_s: float) -> Target:
        """Return the newest known target within `timeout_s` seconds, even if a folder or Ray does not answer.

        Raises:
            ServerUnavailableError: no shard has an address yet.
        """
        if not self._looks or self._looks[0].done():  # a look-up that a folder delays is not repeated
            self._looks[:] = [in_background(lambda: self._look(timeout_s))]
        self._looks[0].wait(timeout_s + 1.0)  # at its end, Ray reports the silent actors
        shards = [self._known[name] for name in self.spec.shard_names() if name in self._known]
        if not shards:
            raise ServerUnavailableError(
                f"no shard of the cluster `{self.cluster}` has an address yet. `reverb-writer ray status "
                f"{self.cluster}` shows the cause."
            )
        return Target(tuple(shards))

    def _look(self, timeout_s: float) -> None:
        unread = []
        for number, name in enumerate(self.spec.shard_names()):
            claim = newest_claim(self.spec.shard_folder(number))
            if claim is None:
                unread.append(name)
            else:
                self._note(name, claim.address, claim.phase)
        for name, report in ask_actors(unread, "report", timeout_s).items() if unread else ():
            self._note(name, report.address, report.state)

    def _note(self, name: str, address: str, state: str) -> None:
        if not address and name in self._known:  # a server that starts
            address = self._known[name].address
        if address:
            self._known[name] = Shard(name, address, "up" if state == "serving" else "lost")
