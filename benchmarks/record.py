"""The time that recording adds to a step of an environment."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import gymnasium
from gymnasium.wrappers import RecordEpisodeStatistics

import reverb_writer as rw
from benchmarks.comparison import Effort
from benchmarks.processes import TABLE, Server
from benchmarks.report import Table
from benchmarks.turns import in_turn

_AT_MOST = 2.0


def record_cartpole(effort: Effort) -> Table:
    """A step of CartPole, recorded, and with Gymnasium's statistics."""
    bare, statistics = "bare", "RecordEpisodeStatistics"
    wrapper, observer = "record, to a function", "record, to an observer"
    with (
        Server() as server,
        rw.TrajectoryObserver(server.address, TABLE, 20, 20) as writer,
        contextlib.ExitStack() as stack,
    ):
        environments: dict[str, gymnasium.Env[Any, Any]] = {
            bare: _cartpole(),
            statistics: RecordEpisodeStatistics(_cartpole()),
            wrapper: rw.environments.record(_cartpole(), _nothing),
            observer: rw.environments.record(_cartpole(), writer),
        }
        for environment in environments.values():
            stack.enter_context(contextlib.closing(environment))
        turns = in_turn({name: _playing(of) for name, of in environments.items()}, effort)
    rows = []
    for name in environments:
        times = turns.times(name, statistics)
        asked = "" if name != wrapper else f"<= {_AT_MOST:g}" + (": missed" if times > _AT_MOST else "")
        added = (turns.times(name, bare) - 1) * turns.micros(bare)
        rows.append([name, f"{turns.micros(name):.1f}", f"{added:.1f}", f"{times:.2f}", asked])
    return Table(
        "A step of CartPole",
        ["", "us/step", "added, us", "times the statistics", "asked"],
        rows,
        "CPU time of the whole step: `env.step` with the wrappers of `gymnasium.make`, and its share of `env.reset`. "
        "The aim is the wrapper's; an observer, which writes windows of L=20, S=20 to a server, comes on top.",
    )


def _cartpole() -> gymnasium.Env[Any, Any]:
    return gymnasium.make("CartPole-v1")


def _nothing(step: Any) -> None:
    """Take a step and forget it."""


def _playing(environment: gymnasium.Env[Any, Any]) -> Callable[[int], None]:
    environment.reset(seed=0)

    def play(num_steps: int) -> None:
        for number in range(num_steps):
            _, _, terminated, truncated, _ = environment.step(number & 1)
            if terminated or truncated:
                environment.reset()

    return play
