"""Plays eight environments together, in their own processes, and records them over one stream.

    reverb-writer local --port 8000 --table replay
    python examples/actors/vector_actor.py --server localhost:8000 --env CartPole-v1

The environments reset themselves; `record` finds their terminal observations.
"""

from __future__ import annotations

import argparse
import contextlib

import gymnasium

import reverb_writer as rw

NUM_ENVS = 8


def main() -> None:
    parser = argparse.ArgumentParser(description="Record a Gymnasium vector environment.")
    parser.add_argument("--server", default="localhost:8000", metavar="ADDRESS")
    parser.add_argument("--env", default="CartPole-v1", metavar="ID")
    parser.add_argument(
        "--steps", type=int, default=10_000, help="environment steps to take, all environments together"
    )
    parser.add_argument("--seed", type=int)
    arguments = parser.parse_args()

    envs = gymnasium.make_vec(arguments.env, num_envs=NUM_ENVS, vectorization_mode="async")
    with rw.TrajectoryObserver(
        arguments.server, "replay", sequence_length=16, stride_length=8, end_of_episode="cover", num_envs=NUM_ENVS
    ) as observer:
        with contextlib.closing(rw.environments.record(envs, observer)) as env:
            env.action_space.seed(arguments.seed)
            env.reset(seed=arguments.seed)
            for _ in range(arguments.steps // NUM_ENVS):
                env.step(env.action_space.sample())
        observer.flush()
        stats = observer.stats()
    print(f"{stats.steps} steps of {stats.episodes} episodes, {stats.acknowledged_items} items")


if __name__ == "__main__":
    main()
