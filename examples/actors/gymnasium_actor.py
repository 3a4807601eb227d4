"""Plays a Gymnasium environment (classic control, Atari or MuJoCo) at random, and records it.

    reverb-writer local --port 8000 --table replay
    python examples/actors/gymnasium_actor.py --server localhost:8000 --env CartPole-v1
    python examples/actors/gymnasium_actor.py --server localhost:8000 --env ALE/Breakout-v5
    python examples/actors/gymnasium_actor.py --server localhost:8000 --env HalfCheetah-v5

An item is a window of 16 rows. A learner reads transitions over n steps with `dataset.transitions(n=3, gamma=0.99)`.
"""

from __future__ import annotations

import argparse
import contextlib
from typing import Any

import gymnasium

import reverb_writer as rw


def make(name: str) -> gymnasium.Env[Any, Any]:
    if not name.startswith("ALE/"):
        return gymnasium.make(name)
    import ale_py

    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    gymnasium.register_envs(ale_py)
    return gymnasium.make(name, obs_type="grayscale")


def play(env: gymnasium.Env[Any, Any], num_steps: int, seed: int | None) -> None:
    env.action_space.seed(seed)
    env.reset(seed=seed)
    for _ in range(num_steps):
        _, _, terminated, truncated, _ = env.step(env.action_space.sample())
        if terminated or truncated:
            env.reset()


def main() -> None:
    parser = argparse.ArgumentParser(description="Record a Gymnasium environment.")
    parser.add_argument("--server", default="localhost:8000", metavar="ADDRESS")
    parser.add_argument("--env", default="CartPole-v1", metavar="ID")
    parser.add_argument("--steps", type=int, default=10_000, help="environment steps to take")
    parser.add_argument("--seed", type=int)
    arguments = parser.parse_args()

    # `align_end`: the last window of an episode moves back, so that the final observation is in a window.
    with rw.TrajectoryObserver(arguments.server, "replay", 16, 16, end_of_episode="align_end") as observer:
        with contextlib.closing(rw.environments.record(make(arguments.env), observer)) as env:
            play(env, arguments.steps, arguments.seed)
        observer.flush()
        stats = observer.stats()
    print(f"{stats.steps} steps of {stats.episodes} episodes, {stats.acknowledged_items} items")


if __name__ == "__main__":
    main()
