"""Plays Catch, a dm_env environment, and records observations and actions of its agent.

    reverb-writer local --port 8000 --table replay
    python examples/actors/dm_env_actor.py --server localhost:8000

An item is a whole episode. The actor also records the log-probability of its action; without such extras,
`env = rw.environments.record(env, observer)` is enough.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import dm_env
import numpy as np

import reverb_writer as rw

ROWS, COLUMNS = 10, 5
ACTIONS = 3  # left, stay, right


class Catch(dm_env.Environment):  # type: ignore[misc]  # dm_env has no types
    """A ball falls by one row per step; the paddle at the bottom must catch it."""

    def __init__(self, seed: int | None) -> None:
        self._rng = np.random.default_rng(seed)
        self._reset_next_step = True

    def reset(self) -> dm_env.TimeStep:
        self._reset_next_step = False
        self._row, self._column, self._paddle = 0, int(self._rng.integers(COLUMNS)), COLUMNS // 2
        return dm_env.restart(self._observe())

    def step(self, action: int) -> dm_env.TimeStep:
        if self._reset_next_step:
            return self.reset()
        self._paddle = int(np.clip(self._paddle + action - 1, 0, COLUMNS - 1))
        self._row += 1
        if self._row < ROWS - 1:
            return dm_env.transition(0.0, self._observe())
        self._reset_next_step = True
        return dm_env.termination(1.0 if self._paddle == self._column else -1.0, self._observe())

    def observation_spec(self) -> Any:
        return dm_env.specs.BoundedArray((ROWS, COLUMNS), np.uint8, 0, 1)

    def action_spec(self) -> Any:
        return dm_env.specs.DiscreteArray(ACTIONS)

    def _observe(self) -> Any:
        board = np.zeros((ROWS, COLUMNS), np.uint8)
        board[self._row, self._column] = board[-1, self._paddle] = 1
        return board


def main() -> None:
    parser = argparse.ArgumentParser(description="Record catch.")
    parser.add_argument("--server", default="localhost:8000", metavar="ADDRESS")
    parser.add_argument("--steps", type=int, default=10_000, help="environment steps to take")
    parser.add_argument("--seed", type=int)
    arguments = parser.parse_args()

    rng = np.random.default_rng(arguments.seed)
    env = Catch(arguments.seed)
    with rw.EpisodeObserver(arguments.server, "replay", max_sequence_length=ROWS) as observer:
        recorder = rw.environments.TimeStepRecorder(observer)
        timestep = dm_env.TimeStep(dm_env.StepType.LAST, None, None, None)
        for _ in range(arguments.steps):
            if timestep.last():
                timestep = env.reset()
                recorder.observe_first(timestep)
            action = rng.integers(ACTIONS)
            timestep = env.step(int(action))
            recorder.observe(action, timestep, extras={"log_prob": np.float32(-math.log(ACTIONS))})
        recorder.end_episode()
        observer.flush()
        stats = observer.stats()
    print(f"{stats.steps} steps of {stats.episodes} episodes, {stats.acknowledged_items} items")


if __name__ == "__main__":
    main()
