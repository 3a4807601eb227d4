"""How fast learners read a table: ours, Reverb's own readers and the raw stream in turn; items a second."""

from __future__ import annotations

import contextlib
import functools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

import reverb_writer as rw
from benchmarks import actors, learners
from benchmarks.comparison import Effort, progress
from benchmarks.learners import Learner, Reader, ReadRun
from benchmarks.processes import TABLE, Remote, Server
from benchmarks.report import Table, ratio
from benchmarks.workloads import EPISODE_LENGTH, Workload, frame_steps, small_steps

_NUM_ITEMS = 20_000
_NUM_EPISODES = 200
_AHEAD = (2, 4, 8, 16)
_NUM_SEQUENCES, _SEQUENCE_LENGTHS = 500, (1_024, 8_192)
_PEER, _RAW = "reverb.TrajectoryDataset", "the raw stream"
_COLUMNS = ["", "items/s", "learner CPU, us/item", "ours is x times", "required"]

Fill = Callable[[str, Workload], None]
Contenders = Mapping[str, Callable[[Any], Learner]]  # how to make each, by name


def read_small(effort: Effort) -> Table:
    """Six small leaves, batches of 256, beside what the server can send."""
    workload = Workload(small_steps())
    contenders: Contenders = {
        **_datasets(workload, 256),
        _RAW: functools.partial(learners.raw, batch_size=256),
    }
    with _table(workload, _fill_ours) as server:
        runs = _race(server.address, contenders, effort)
    return _report("Six small leaves, L=20, B=256", runs, {_PEER: 4, _RAW: 0.6})


def read_tf_agents(effort: Effort) -> Table:
    """The same, from a table that TF-Agents' observer has written."""
    workload = Workload(small_steps())
    with _table(workload, _fill_tf_agents) as server:
        runs = _race(server.address, _datasets(workload, 256), effort)
    return _report("Written by TF-Agents' observer, six small leaves, L=20, B=256", runs, {_PEER: 2})


def read_frames(effort: Effort) -> Table:
    """Frames of a real Atari game, from a table within the cache and from one four times as large."""
    workload = Workload(frame_steps())
    table_bytes = _NUM_ITEMS * workload.step_bytes  # about: a step begins a window, but for the last of an episode
    rows: list[Sequence[str]] = []
    with _table(workload, _fill_ours) as server:
        for name, cache_bytes, required in (("within", 2 * table_bytes, 2.0), ("four times", table_bytes // 4, 1.2)):
            options: dict[str, Any] = {"batch_size": 64, "max_cache_bytes": cache_bytes}
            runs = _race(server.address, _datasets(workload, **options), effort)
            found = _report("", runs, {_PEER: required}).rows
            rows += [[f"{name} the cache: {row[0]}", *row[1:]] for row in found]
    return Table("84 x 84 frames of Breakout, L=20, B=64", _COLUMNS, rows)


def read_episodes(effort: Effort) -> Table:
    """Whole episodes of 200 steps."""
    workload = Workload(small_steps(), sequence_length=EPISODE_LENGTH)
    with _table(workload, _fill_episodes) as server:
        runs = _race(server.address, _datasets(workload, 64), effort)
    return _report("Whole episodes of 200 steps, six small leaves, B=64", runs, {_PEER: 2})


def read_sequences(effort: Effort) -> Table:
    """Sequences of tokens, padded and packed, in batches of 16 and of 256, beside what the server can send."""
    rows: list[Sequence[str]] = []
    with Server(_NUM_SEQUENCES) as server:
        _fill_sequences(server.address)
        for batch_size in (16, 256):
            contenders: Contenders = {
                **{
                    f"ours, collate='{collate}'": functools.partial(
                        learners.ours, batch_size=batch_size, collate=collate
                    )
                    for collate in ("pad", "pack")
                },
                _RAW: functools.partial(learners.raw, batch_size=batch_size),
            }
            for name, run in _race(server.address, contenders, effort).items():
                cells = f"{run.items_per_s:,.0f}", f"{1e6 * run.cpu_s / run.items:.1f}"
                rows.append([name, str(batch_size), *cells])
    title = "Sequences of 1,024 to 8,192 tokens, int32, with log-probabilities, float32"
    return Table(title, ["", "batch", "items/s", "learner CPU, us/item"], rows)


def read_one_by_one(effort: Effort) -> Table:
    """Single samples."""
    workload = Workload(small_steps())
    contenders: Contenders = {"ours": learners.ours_one_by_one, "reverb.Client.sample": learners.reverb_client}
    with _table(workload, _fill_ours) as server:
        runs = _race(server.address, contenders, effort)
    return _report("Client.sample, six small leaves, L=20", runs, {"reverb.Client.sample": 10})


def read_ahead(effort: Effort) -> Table:
    """Small batches, by how many of them are fetched ahead."""
    workload = Workload(small_steps())
    contenders: Contenders = {
        str(ahead): functools.partial(learners.ours, batch_size=64, max_in_flight_batches=ahead) for ahead in _AHEAD
    }
    with _table(workload, _fill_ours) as server:
        runs = _race(server.address, contenders, effort)
    slowest = runs[str(_AHEAD[0])].items_per_s
    rows = [
        [ahead, f"{run.items_per_s:,.0f}", f"{1e6 * run.cpu_s / run.items:.1f}", f"{run.items_per_s / slowest:.2f}"]
        for ahead, run in runs.items()
    ]
    columns = ["max_in_flight_batches", "items/s", "learner CPU, us/item", f"times that of {_AHEAD[0]}"]
    return Table("Fetched ahead, six small leaves, L=20, B=64", columns, rows)


def learner_processes(effort: Effort) -> Table:
    """1, 2 and 4 learners on one server, and one learner on two."""
    workload = Workload(small_steps())
    rows = []
    with _table(workload, _fill_ours) as server, _table(workload, _fill_ours) as other:
        for num_learners, addresses in ((1, [server]), (2, [server]), (4, [server]), (1, [server, other])):
            of_all = [one.address for one in addresses]
            runs = [_together(of_all, num_learners, effort) for _ in range(effort.rounds)]
            cells = (str(num_learners), str(len(addresses)), f"{statistics.median(runs):,.0f}")
            rows.append(cells)
    return Table("Several learners, six small leaves, L=20, B=256", ["learners", "servers", "items/s, all"], rows)


def _datasets(workload: Workload, batch_size: int, **options: Any) -> dict[str, Callable[[Any], Learner]]:
    fields = [field for field in workload.steps if isinstance(field, np.ndarray)]
    dtypes = [field.dtype for field in fields]
    shapes = [(workload.sequence_length, *field.shape[2:]) for field in fields]
    return {
        "ours": functools.partial(learners.ours, batch_size=batch_size, **options),
        _PEER: functools.partial(learners.trajectory_dataset, batch_size=batch_size, dtypes=dtypes, shapes=shapes),
    }


def _race(address: str, contenders: Contenders, effort: Effort) -> dict[str, ReadRun]:
    """Have each contender read in turn, and return its median run."""
    runs: dict[str, list[ReadRun]] = {name: [] for name in contenders}
    with contextlib.ExitStack() as processes:
        readers = {name: processes.enter_context(Remote(Reader, connect)) for name, connect in contenders.items()}
        for i in range(effort.rounds):
            for name, reader in readers.items():
                runs[name].append(reader.call("read", address, effort.seconds))
                progress(f"round {i + 1} of {effort.rounds}: {name}: {runs[name][-1].items_per_s:,.0f} items/s")
    return {name: sorted(of, key=lambda run: run.items_per_s)[(len(of) - 1) // 2] for name, of in runs.items()}


def _report(title: str, runs: Mapping[str, ReadRun], required: Mapping[str, float]) -> Table:
    rows = []
    for name, run in runs.items():
        times = ratio(runs["ours"].items_per_s, run.items_per_s, required[name]) if name in required else ("", "")
        rows.append([name, f"{run.items_per_s:,.0f}", f"{1e6 * run.cpu_s / run.items:.1f}", *times])
    return Table(title, _COLUMNS, rows)


def _together(addresses: list[str], num_learners: int, effort: Effort) -> float:
    """Return how many items a second several learners read at once."""
    connect = functools.partial(learners.ours, batch_size=256)
    with contextlib.ExitStack() as processes:
        readers = [processes.enter_context(Remote(Reader, connect)) for _ in range(num_learners)]
        for reader in readers:
            reader.start("read", addresses, effort.seconds)
        return float(sum(reader.result().items_per_s for reader in readers))


@contextlib.contextmanager
def _table(workload: Workload, fill: Fill) -> Iterator[Server]:
    with Server(1_000_000) as server:
        fill(server.address, workload)
        yield server


def _fill_ours(address: str, workload: Workload) -> None:
    actor = actors.ours(address, workload)
    actor.write(600.0, _num_steps(workload))
    actor.close()


def _fill_tf_agents(address: str, workload: Workload) -> None:
    with Remote(actors.Contender, actors.tf_agents, workload) as actor:
        actor.call("open", address)
        actor.call("write", 600.0, _num_steps(workload))


def _fill_episodes(address: str, workload: Workload) -> None:
    with rw.EpisodeObserver(address, TABLE, EPISODE_LENGTH) as observer:
        episodes = workload.episodes()
        for number in range(_NUM_EPISODES):
            for step in episodes[number % len(episodes)]:
                observer(step)


def _fill_sequences(address: str) -> None:
    rng = np.random.default_rng(0)
    with rw.Client(address) as client:
        for length in rng.integers(*_SEQUENCE_LENGTHS, size=_NUM_SEQUENCES).tolist():
            tokens = rng.integers(50_000, size=length).astype(np.int32)
            sequence = {"tokens": tokens, "log_probs": rng.normal(size=length).astype(np.float32)}
            client.insert(sequence, {TABLE: 1.0})


def _num_steps(workload: Workload) -> int:
    return _NUM_ITEMS * EPISODE_LENGTH // workload.num_windows
