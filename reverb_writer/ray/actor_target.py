"""Where a cluster's shards are, as their actors tell.

While Ray is away, or an actor does not answer, what it told last stays: whether a server is there, clients find out
themselves.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any, Literal

from reverb_writer.background import in_background
from reverb_writer.client.targets import Shard, Target
from reverb_writer.errors import ServerUnavailableError
from reverb_writer.ray.shard_report import ShardReport

NAMESPACE = "reverb-writer"  # of all actors, so that every job finds them

_lock = threading.Lock()
_handles: dict[str, Any] = {}  # of actors by name, for this process
_newest: dict[str, dict[str, ShardReport]] = {}  # by cluster and shard: what this process has been told


@dataclass(frozen=True)
class ActorTarget:
    """The target of a cluster: a source that asks the shards' actors. Picklable, hashable and thread-safe.

    It needs a process that is connected to Ray. In any other, and while Ray does not answer, it tells what was known
    where it was made or pickled.

    Attributes:
        cluster: name of the cluster.
        known: what the shards have told.
    """

    cluster: str
    known: tuple[ShardReport, ...] = field(compare=False, repr=False)

    def look_up(self, timeout_s: float) -> Target:
        """Return the newest target that is known within `timeout_s` seconds; asks the actors for it.

        Raises:
            ServerUnavailableError: no shard has told its address yet.
        """
        for report in ask_shards([report.name for report in self.known], timeout_s).values():
            self._note(report)
        return self._target()

    def __reduce__(self) -> tuple[Any, ...]:
        """Take along what this process knows."""
        return ActorTarget, (self.cluster, self._reports())

    def _note(self, report: ShardReport) -> None:
        with _lock:
            newest = _newest.setdefault(self.cluster, {})
            if report.name not in newest or newest[report.name].generation < report.generation:
                newest[report.name] = report

    def _reports(self) -> tuple[ShardReport, ...]:
        """Return the newest report of each shard."""
        with _lock:
            newest = _newest.get(self.cluster, {})
            return tuple(
                max(report, newest.get(report.name, report), key=lambda one: one.generation) for report in self.known
            )

    def _target(self) -> Target:
        reports = self._reports()
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


def ask_shards(
    names: list[str], timeout_s: float, method: Literal["report", "stop"] = "report"
) -> dict[str, ShardReport]:
    """Return what those shards tell that answer within `timeout_s` seconds, by name. Raises nothing."""
    answers: dict[str, ShardReport] = {}
    asked = in_background(lambda: answers.update(ask_actors(names, method, timeout_s)))
    asked.wait(timeout_s + 1.0)  # Ray may not come back at all
    return dict(answers)


def ask_actors(names: list[str], method: str, timeout_s: float) -> dict[str, Any]:
    """Return what a method of actors returns, of those that answer within `timeout_s` seconds; by name."""
    import ray  # noqa: PLC0415  # of the extra

    if not ray.is_initialized():
        return {}
    calls: dict[Any, str] = {}
    for name in names:
        handle = actor_of(name)
        if handle is not None:
            calls[getattr(handle, method).remote()] = name
    answers: dict[str, Any] = {}
    if not calls:
        return answers
    ready, _ = ray.wait(list(calls), num_returns=len(calls), timeout=timeout_s)
    for call in ready:
        try:
            answers[calls[call]] = ray.get(call, timeout=timeout_s)
        except ray.exceptions.ActorDiedError:  # for good: another one may have its name now
            forget_actor(calls[call])
        except ray.exceptions.RayError:
            continue
    return answers


def actor_of(name: str) -> Any:
    """Return the actor of that name, None if there is none now; Ray is asked for it once."""
    import ray  # noqa: PLC0415  # of the extra

    handle = _handles.get(name)
    if handle is None:
        try:
            handle = _handles[name] = ray.get_actor(name, namespace=NAMESPACE)
        except (ValueError, ray.exceptions.RayError):
            return None
    return handle


def forget_actor(name: str) -> None:
    """Have the actor of that name looked up again when it is next needed."""
    _handles.pop(name, None)
