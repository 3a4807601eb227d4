"""The server in pure Python beside dm-reverb's: ours on the one, TF-Agents' observer and Reverb's dataset on the other.

one process     actor or learner, and the server
two processes   the server in one of its own
"""

from __future__ import annotations

import contextlib
import functools
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import reverb_writer as rw
from benchmarks import actors, learners
from benchmarks.actors import Contender, Run
from benchmarks.comparison import Effort, median, progress
from benchmarks.learners import Reader, ReadRun
from benchmarks.processes import TABLE, Remote, Server
from benchmarks.report import Table, ratio
from benchmarks.workloads import Workload, small_steps

__all__ = ["local_server"]

_NUM_ITEMS = 20_000
_BATCH_SIZE = 256
_ONE, _TWO = "ours, local server, one process", "ours, local server, two processes"
_WRITER, _READER = "TF-Agents' observer, dm-reverb", "reverb.TrajectoryDataset, dm-reverb"


class _Served:
    """A local server; for `Remote`."""

    def __init__(self) -> None:
        self._server = rw.LocalServer([rw.TableConfig(TABLE, 10_000_000)])

    def address(self) -> str:
        return self._server.address

    def close(self) -> None:
        self._server.close()


class _OneProcess:
    """A local server, and an actor and a learner beside it; for `Remote`."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._served: _Served | None = None
        self._actor = Contender(actors.ours, workload)

    def open(self) -> None:
        self._served = _Served()
        self._actor.open(self._served.address())

    def write(self, seconds: float) -> Run:
        return self._actor.write(seconds)

    def read(self, seconds: float) -> ReadRun:
        assert self._served is not None  # `open` comes first
        return _reader().read(self._served.address(), seconds)

    def close(self) -> None:
        self._actor.close()
        if self._served is not None:
            self._served.close()
            self._served = None


def local_server(effort: Effort) -> Table:
    """The server in pure Python, beside TF-Agents' observer and `reverb.TrajectoryDataset` on dm-reverb."""
    rows = []
    for stride in (1, 10):
        workload = Workload(small_steps(), stride_length=stride)
        runs = _write(workload, effort)
        rate = {name: run.steps_per_s for name, run in runs.items()}
        rows += _rows(f"S={stride}", "steps/s", rate, _WRITER, 4)
        if stride == 1:
            rows += _rows("B=256", "items/s", _read(workload, effort), _READER, 1)
    columns = ["", "", "", "ours is x times", "required"]
    note = "In one process the actor, or the learner, and the server take turns under one interpreter lock."
    return Table("The server in pure Python, six small leaves, L=20", columns, rows, note)


def _rows(kind: str, unit: str, rates: dict[str, float], peer: str, at_least: float) -> list[Sequence[str]]:
    return [
        [f"{kind}: {name}", f"{rate:,.0f}", unit, *(("", "") if name == peer else ratio(rate, rates[peer], at_least))]
        for name, rate in rates.items()
    ]


def _write(workload: Workload, effort: Effort) -> dict[str, Run]:
    runs: dict[str, list[Run]] = {_ONE: [], _TWO: [], _WRITER: []}
    with (
        Remote(_OneProcess, workload) as one,
        Remote(Contender, actors.ours, workload) as two,
        Remote(Contender, actors.tf_agents, workload) as peer,
    ):
        for _ in range(effort.rounds):
            runs[_ONE].append(_turn(one, [], effort))
            with Remote(_Served) as served:
                runs[_TWO].append(_turn(two, [served.call("address")], effort))
            with Server() as server:
                runs[_WRITER].append(_turn(peer, [server.address], effort))
            for name, of in runs.items():
                progress(f"{name}: {of[-1].steps_per_s:,.0f} steps/s")
    return {name: median(of) for name, of in runs.items()}


def _turn(contender: Any, where: Sequence[str], effort: Effort) -> Run:
    contender.call("open", *where)
    contender.call("write", effort.seconds / 4)
    run: Run = contender.call("write", effort.seconds)
    contender.call("close")
    return run


def _read(workload: Workload, effort: Effort) -> dict[str, float]:
    rates: dict[str, list[float]] = {_ONE: [], _TWO: [], _READER: []}
    step = workload.episodes()[0][0]
    leaves = [field for field in step if not isinstance(field, tuple)]
    dtypes, shapes = [leaf.dtype for leaf in leaves], [(workload.sequence_length, *leaf.shape) for leaf in leaves]
    peer = functools.partial(learners.trajectory_dataset, batch_size=_BATCH_SIZE, dtypes=dtypes, shapes=shapes)
    with contextlib.ExitStack() as stack:
        one = stack.enter_context(Remote(_OneProcess, workload))
        one.call("open")
        one.call("write", effort.seconds)
        served = stack.enter_context(Remote(_Served))
        address = served.call("address")
        server = stack.enter_context(Server())
        for where in (address, server.address):
            with contextlib.closing(Contender(actors.ours, workload)) as actor:
                actor.open(where)
                actor.write(effort.seconds, _NUM_ITEMS)
        two = stack.enter_context(Remote(_reader))
        theirs = stack.enter_context(Remote(Reader, peer))
        turns: list[tuple[str, Callable[[], ReadRun]]] = [
            (_ONE, lambda: one.call("read", effort.seconds)),
            (_TWO, lambda: two.call("read", address, effort.seconds)),
            (_READER, lambda: theirs.call("read", server.address, effort.seconds)),
        ]
        for _ in range(effort.rounds):
            for name, read in turns:
                rates[name].append(read().items_per_s)
                progress(f"{name}: {rates[name][-1]:,.0f} items/s")
    return {name: statistics.median(of) for name, of in rates.items()}


def _reader() -> Reader:
    return Reader(functools.partial(learners.ours, batch_size=_BATCH_SIZE))
