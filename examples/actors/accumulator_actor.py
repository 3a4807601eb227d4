"""Plays rollouts of CartPole, and writes each as one item: its steps, its last position, and its return.

    reverb-writer local --port 8000 --table replay
    python examples/actors/accumulator_actor.py --server localhost:8000

On-policy learners need such items: a fixed number of steps, across the ends of episodes, and one observation to
bootstrap from.
"""

from __future__ import annotations

import argparse

import gymnasium
import numpy as np

import reverb_writer as rw

LENGTH = 64
EXAMPLE = {
    "step": {
        "observation": np.zeros((LENGTH, 4), np.float32),
        "action": np.zeros(LENGTH, np.int64),
        "reward": np.zeros(LENGTH, np.float32),
        "done": np.zeros(LENGTH, bool),
    },
    "final": {"observation": np.zeros((1, 4), np.float32)},
    "rollout": {"return": np.float32(0), "episodes": np.int32(0)},
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Write rollouts of CartPole.")
    parser.add_argument("--server", default="localhost:8000", metavar="ADDRESS")
    parser.add_argument("--steps", type=int, default=10_000, help="environment steps to take")
    parser.add_argument("--seed", type=int)
    arguments = parser.parse_args()

    env = gymnasium.make("CartPole-v1")
    env.action_space.seed(arguments.seed)
    accumulator = rw.TrajectoryAccumulator(EXAMPLE)
    num_rollouts = arguments.steps // LENGTH
    with rw.Client(arguments.server) as client:
        observation, _ = env.reset(seed=arguments.seed)
        for _ in range(num_rollouts):
            rollout_return, num_episodes = 0.0, 0
            for _ in range(LENGTH):
                action = env.action_space.sample()
                following, reward, terminated, truncated, _ = env.step(action)
                done = terminated or truncated
                row = {"observation": observation, "action": action, "reward": reward, "done": done}
                accumulator.add("step", row)
                rollout_return += float(reward)
                num_episodes += done
                observation = env.reset()[0] if done else following
            accumulator.add("final", {"observation": observation})
            accumulator.add("rollout", {"return": rollout_return, "episodes": num_episodes})
            accumulator.insert(client, "replay", 1.0)
    env.close()
    print(f"{num_rollouts * LENGTH} steps, {num_rollouts} items")


if __name__ == "__main__":
    main()
