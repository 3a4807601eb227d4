"""The server in pure Python beside dm-reverb's: ours on the one, TF-Agents' observer and Reverb's dataset on the other.

one process     actor, learner and server, each in threads of their own
two processes   the server in one, actor and learner in the other

An actor or a learner alone has a table without a ratio. At once, the table holds them at a ratio, as in training: else
each contender would divide the machine between the two in a way of its own.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import reverb_writer as rw
from benchmarks import actors, learners
from benchmarks.actors import Contender
from benchmarks.comparison import Effort, progress
from benchmarks.learners import Learner, Reader
from benchmarks.processes import TABLE, Remote, Served, Server
from benchmarks.report import Table, ratio
from benchmarks.workloads import Workload, small_steps

_BATCH_SIZE = 256
_SAMPLES_PER_INSERT = 2
_RATIO = rw.SampleToInsertRatio(_SAMPLES_PER_INSERT, 1_000, 20 * _BATCH_SIZE)
_END_S = 0.5  # within this time a learner that does not wait for samples ends
_WORKS = {"write": "an actor", "read": "a learner", "both": f"both, {_SAMPLES_PER_INSERT} samples per insert"}


class _LocalServed:
    """A local server; for `Remote`."""

    def __init__(self, **options: Any) -> None:
        self._server = rw.LocalServer([rw.TableConfig(TABLE, 10_000_000, **options)])

    def address(self) -> str:
        return self._server.address

    def close(self) -> None:
        self._server.close()


class _Job:
    """An actor and a learner in one process, and the server too if it is given; for `Remote`."""

    def __init__(
        self,
        workload: Workload,
        connect: Callable[..., actors.Actor],
        learn: Callable[[str], Learner],
        serve: Callable[..., Any] | None = None,
    ) -> None:
        self._actor, self._learn, self._serve = Contender(connect, workload), learn, serve
        self._server: Any = None
        self._address = ""

    def open(self, address: str, options: dict[str, Any]) -> None:
        """Connect the actor, to a server of this process with such a table if there is to be one."""
        if self._serve is not None:
            self._server = self._serve(**options)
            address = self._server.address()
        self._address = address
        self._actor.open(address)

    def write(self, seconds: float) -> tuple[float, float]:
        """Return steps/s of the actor, and 0."""
        return self._actor.write(seconds).steps_per_s, 0.0

    def read(self, seconds: float) -> tuple[float, float]:
        """Return 0, and items/s of the learner."""
        return 0.0, Reader(self._learn).read(self._address, seconds).items_per_s

    def both(self, seconds: float) -> tuple[float, float]:
        """Return steps/s of the actor, and items/s of a learner that reads as long as the actor writes."""
        with contextlib.closing(self._learn(self._address)) as learner:
            num_items, done = 0, False

            def read() -> None:
                nonlocal num_items
                while not done:
                    num_items += next(learner.counts)

            thread = threading.Thread(target=read)
            start = time.perf_counter()
            thread.start()
            steps_per_s = self._actor.write(seconds).steps_per_s
            items_per_s = num_items / (time.perf_counter() - start)
            done = True
            thread.join(_END_S)
            while thread.is_alive():  # the learner waits for samples that the actor's next items allow
                self._actor.write(0)
                thread.join(_END_S)
            return steps_per_s, items_per_s

    def close(self) -> None:
        """Disconnect the actor, and end the server of this process."""
        self._actor.close()
        if self._server is not None:
            self._server.close()
            self._server = None


def local_server(effort: Effort) -> Table:
    """The server in pure Python, beside TF-Agents' observer and `reverb.TrajectoryDataset` on dm-reverb."""
    rows: list[Sequence[str]] = []
    for stride in (1, 10):
        rates = _measure(Workload(small_steps(), stride_length=stride), effort)
        for work, words in _WORKS.items():
            for place in ("one process", "two processes"):
                for i, (unit, at_least) in enumerate((("steps/s", 4), ("items/s", 1))):
                    ours, theirs = rates["ours", place, work][i], rates["theirs", place, work][i]
                    if theirs:
                        name = f"S={stride}, {words}, {place}"
                        rows.append([name, unit, f"{ours:,.0f}", f"{theirs:,.0f}", *ratio(ours, theirs, at_least)])
    columns = ["", "", "ours on a local server", "peers on dm-reverb", "ours is x times", "required"]
    note = (
        "Peers: TF-Agents' observer, `reverb.TrajectoryDataset`. In one process, all of ours share an interpreter lock."
    )
    return Table("The server in pure Python, six small leaves, L=20, B=256", columns, rows, note)


def _measure(workload: Workload, effort: Effort) -> dict[tuple[str, str, str], tuple[float, float]]:
    """Return steps/s and items/s of each contender, place and work."""
    step = workload.episodes()[0][0]
    leaves = [field for field in step if not isinstance(field, tuple)]
    dtypes, shapes = [leaf.dtype for leaf in leaves], [(workload.sequence_length, *leaf.shape) for leaf in leaves]
    dataset = functools.partial(learners.trajectory_dataset, batch_size=_BATCH_SIZE, dtypes=dtypes, shapes=shapes)
    ours = (workload, actors.ours, functools.partial(learners.ours, batch_size=_BATCH_SIZE))
    theirs = (workload, actors.tf_agents, dataset)
    found: dict[tuple[str, str, str], list[tuple[float, float]]] = {}
    with contextlib.ExitStack() as stack:
        jobs = {
            ("ours", "one process"): stack.enter_context(Remote(_Job, *ours, _LocalServed)),
            ("ours", "two processes"): stack.enter_context(Remote(_Job, *ours)),
            ("theirs", "one process"): stack.enter_context(Remote(_Job, *theirs, Served)),
            ("theirs", "two processes"): stack.enter_context(Remote(_Job, *theirs)),
        }
        turns: list[tuple[dict[str, Any], tuple[str, ...]]] = [
            ({}, ("write", "read")),
            ({"rate_limiter": _RATIO}, ("both",)),
        ]
        for _ in range(effort.rounds):
            for ((contender, place), job), (options, works) in itertools.product(jobs.items(), turns):
                with contextlib.ExitStack() as turn:
                    address = ""
                    if place == "two processes":
                        remote = Remote(_LocalServed, **options) if contender == "ours" else Server(**options)
                        address = turn.enter_context(remote).call("address")
                    job.call("open", address, options)
                    for work in works:
                        found.setdefault((contender, place, work), []).append(job.call(work, effort.seconds))
                        steps, items = found[contender, place, work][-1]
                        progress(f"{contender}, {place}, {work}: {steps:,.0f} steps/s, {items:,.0f} items/s")
                    job.call("close")
    return {
        key: (statistics.median(steps for steps, _ in of), statistics.median(items for _, items in of))
        for key, of in found.items()
    }
