"""The addresses of a cluster's shards: from the files beside their checkpoints, or from their actors.

If neither can be read, the last known addresses remain: clients check themselves whether a server answers.
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
    generation: int = 0  # always 0 without checkpoints
    address: str = ""
    state: str = ""


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
    _known: dict[str, _Known] = field(init=False, compare=False, repr=False)
    _looks: list[Outcome[None]] = field(init=False, compare=False, repr=False, default_factory=list)

    def __post_init__(self) -> None:
        object.__setattr__(self, "cluster", self.spec.name)
        object.__setattr__(self, "_known", dict.fromkeys(self.spec.shard_names(), _Known()))  # its size never changes

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the work of other threads."""
        return {**vars(self), "_looks": []}

    def look_up(self, timeout_s: float) -> Target:
        """Return the newest known target within `timeout_s` seconds, even if a folder or Ray does not answer.

        Raises:
            ServerUnavailableError: no shard has an address yet.
        """
        if not self._looks or self._looks[0].done():  # a look-up that a folder delays is not repeated
            self._looks[:] = [in_background(lambda: self._look(timeout_s))]
        self._looks[0].wait(timeout_s + 1.0)  # at its end, Ray reports the silent actors
        known = self._known.copy()
        shards = [
            Shard(name, one.address, "up" if one.state == "serving" else "lost")
            for name, one in known.items()
            if one.address
        ]
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
                self._note(name, claim.number, claim.address, claim.phase)
        for name, report in ask_actors(unread, "report", timeout_s).items() if unread else ():
            self._note(name, report.generation, report.address, report.state)

    def _note(self, name: str, generation: int, address: str, state: str) -> None:
        """Note a server, unless a newer server of the shard is known; a starting server has no address yet."""
        if self._known[name].generation <= generation:
            self._known[name] = _Known(generation, address or self._known[name].address, state)
