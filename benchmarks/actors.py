"""The contenders: each gets the same steps, one call a step, and confirms that the server has all items.

    ours, tf_agents, structured             one environment
    ours_vector, tf_agents_vector           many environments

Each function makes an `Actor` in the process that calls it; the peers are imported there and nowhere else.
"""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import tree

import reverb_writer as rw
from benchmarks.processes import TABLE
from benchmarks.workloads import Workload


@dataclass(frozen=True)
class Run:
    """What was written, from the first call until the server had confirmed the last item.

    Attributes:
        steps: environment steps.
        items: windows that they make.
        start_s, end_s: when that was, by `time.perf_counter`, which all processes share.
        cpu_s: CPU time of the actor's process, all threads.
        server_cpu_s: CPU time of the server's process.
    """

    steps: int
    items: int
    start_s: float
    end_s: float
    cpu_s: float
    server_cpu_s: float = 0.0

    @classmethod
    def together(cls, runs: Sequence[Run], server_cpu_s: float) -> Run:
        """Return the runs of several processes at once as one."""
        return cls(
            steps=sum(run.steps for run in runs),
            items=sum(run.items for run in runs),
            start_s=min(run.start_s for run in runs),
            end_s=max(run.end_s for run in runs),
            cpu_s=sum(run.cpu_s for run in runs),
            server_cpu_s=server_cpu_s,
        )

    @property
    def wall_s(self) -> float:
        """Its duration."""
        return self.end_s - self.start_s

    @property
    def steps_per_s(self) -> float:
        """Steps a second, until all items are confirmed."""
        return self.steps / self.wall_s

    @property
    def cpu_us_per_step(self) -> float:
        """CPU time of actor and server together, microseconds a step."""
        return 1e6 * (self.cpu_s + self.server_cpu_s) / self.steps

    @property
    def items_per_s(self) -> float:
        """Items a second, until all are confirmed."""
        return self.items / self.wall_s


@dataclass
class Actor:
    """A loop that has nothing to do but call the observer.

    Attributes:
        observe: takes a step.
        flush: returns when the server has confirmed all items.
        close: ends it.
        blocks: lists of steps, written over and over; each ends as it begins, so each gives the same number of items.
        num_envs: environments that a step is of.
        num_items: items that a block gives.
        end_block: is called at the end of a block.
    """

    observe: Callable[[Any], Any]
    flush: Callable[[], Any]
    close: Callable[[], Any]
    blocks: Sequence[Sequence[Any]]
    num_items: int
    num_envs: int = 1
    end_block: Callable[[], Any] = lambda: None

    def write(self, seconds: float, max_steps: float = math.inf) -> Run:
        """Write whole blocks, one at least, for `seconds` or until there are `max_steps` steps; then flush."""
        observe = self.observe
        steps = items = 0
        cpu_s, start = time.process_time(), time.perf_counter()
        for block in itertools.cycle(self.blocks):
            for step in block:
                observe(step)
            self.end_block()
            steps += len(block) * self.num_envs
            items += self.num_items
            if steps >= max_steps or time.perf_counter() - start >= seconds:
                break
        self.flush()
        return Run(steps, items, start, time.perf_counter(), time.process_time() - cpu_s)

    def call_times(self, num_calls: int, interval_s: float) -> npt.NDArray[np.float64]:
        """Return the seconds that each of many calls took; one starts `interval_s` after the other, if not later."""
        observe, clock = self.observe, time.perf_counter
        times = np.empty(num_calls)
        start = clock()
        for i, step in enumerate(itertools.islice(itertools.cycle(itertools.chain(*self.blocks)), num_calls)):
            if interval_s:
                time.sleep(max(0.0, start + i * interval_s - clock()))
            before = clock()
            observe(step)
            times[i] = clock() - before
        self.flush()
        return times


class Contender:
    """An actor that is connected to one server after the other. For `Remote`."""

    def __init__(self, connect: Callable[..., Actor], workload: Workload, **options: Any) -> None:
        """Remember how to make the actor: `connect(address, workload, **options)`."""
        self._connect = functools.partial(connect, workload=workload, **options)
        self._actor: Actor | None = None

    def open(self, address: str) -> None:
        """Connect."""
        self._actor = self._connect(address)

    def write(self, *arguments: float) -> Run:
        """See `Actor.write`."""
        return self._connected.write(*arguments)

    def call_times(self, num_calls: int, interval_s: float) -> npt.NDArray[np.float64]:
        """See `Actor.call_times`."""
        return self._connected.call_times(num_calls, interval_s)

    def close(self) -> None:
        """Disconnect."""
        if self._actor is not None:
            self._actor.close()
            self._actor = None

    @property
    def _connected(self) -> Actor:
        if self._actor is None:
            raise RuntimeError("open() comes first")
        return self._actor


def ours(client: str | rw.Client, workload: Workload, **options: Any) -> Actor:
    """Return an actor with our observer; `options` are the observer's."""
    observer = rw.TrajectoryObserver(client, TABLE, workload.sequence_length, workload.stride_length, **options)
    return Actor(observer, observer.flush, observer.close, workload.episodes(), workload.num_windows)


def tf_agents(address: str, workload: Workload) -> Actor:
    """Return an actor with TF-Agents' observer."""
    from tf_agents.trajectories import Trajectory

    observer = _tf_agents_observer(_reverb_client(address), workload)
    return Actor(observer, observer.flush, observer.close, workload.episodes(Trajectory), workload.num_windows)


def bare_copy(address: str, workload: Workload) -> Actor:
    """Return an actor that copies the leaves of a step into arrays, and does nothing else."""
    episodes = workload.episodes()
    columns = [np.zeros((len(episodes[0]), *np.shape(leaf)), leaf.dtype) for leaf in tree.flatten(episodes[0][0])]
    rows = itertools.cycle(range(len(episodes[0])))

    def observe(step: Any) -> None:
        row = next(rows)
        for column, leaf in zip(columns, tree.flatten(step), strict=True):
            column[row] = leaf

    return Actor(observe, lambda: None, lambda: None, episodes, 0)


def structured(address: str, workload: Workload) -> Actor:
    """Return an actor with Reverb's StructuredWriter, which cuts windows in C++."""
    from reverb import structured_writer as patterns

    length, stride = workload.sequence_length, workload.stride_length
    episodes = workload.episodes()
    pattern = tree.map_structure(lambda leaf: leaf[-length:], patterns.create_reference_step(episodes[0][0]))
    every = [patterns.Condition.step_index() % stride == (length - 1) % stride] if stride > 1 else []
    writer = _reverb_client(address).structured_writer([patterns.create_config(pattern, TABLE, every)])
    return Actor(
        writer.append, writer.flush, writer.flush, episodes, workload.num_windows, end_block=writer.end_episode
    )


def ours_vector(address: str, workload: Workload, num_envs: int) -> Actor:
    """Return an actor with one observer for many environments."""
    length, stride = workload.sequence_length, workload.stride_length
    observer = rw.TrajectoryObserver(address, TABLE, length, stride, num_envs=num_envs)
    num_items = num_envs * workload.num_windows
    return Actor(observer, observer.flush, observer.close, [workload.vector_steps(num_envs)], num_items, num_envs)


def tf_agents_vector(address: str, workload: Workload, num_envs: int) -> Actor:
    """Return an actor with an observer of TF-Agents for each environment; the steps are split beforehand."""
    from tf_agents.trajectories import Trajectory

    client = _reverb_client(address)
    observers = [_tf_agents_observer(client, workload) for _ in range(num_envs)]

    def of(env: int, step: rw.Trajectory) -> Any:
        return Trajectory(*tree.map_structure(lambda leaf: leaf[env, ...], step))

    def observe(steps: list[Any]) -> None:
        for observer, step in zip(observers, steps, strict=True):
            observer(step)

    return Actor(
        observe,
        lambda: [observer.flush() for observer in observers],
        lambda: [observer.close() for observer in observers],
        [[[of(env, step) for env in range(num_envs)] for step in workload.vector_steps(num_envs)]],
        num_envs * workload.num_windows,
        num_envs,
    )


def _reverb_client(address: str) -> Any:
    import reverb

    return reverb.Client(address)


def _tf_agents_observer(client: Any, workload: Workload) -> Any:
    from tf_agents.replay_buffers.reverb_utils import ReverbAddTrajectoryObserver

    return ReverbAddTrajectoryObserver(client, TABLE, workload.sequence_length, workload.stride_length)
