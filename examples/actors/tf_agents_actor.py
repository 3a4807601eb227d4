"""Plays CartPole with TF-Agents' own driver, which calls an observer of this package directly.

reverb-writer local --port 8000 --table replay
python examples/actors/tf_agents_actor.py --server localhost:8000
"""

from __future__ import annotations

import argparse

from tf_agents.drivers import py_driver
from tf_agents.environments import suite_gym
from tf_agents.policies import random_py_policy

import reverb_writer as rw


def main() -> None:
    parser = argparse.ArgumentParser(description="Record an environment of TF-Agents.")
    parser.add_argument("--server", default="localhost:8000", metavar="ADDRESS")
    parser.add_argument("--steps", type=int, default=10_000, help="environment steps to take")
    parser.add_argument("--seed", type=int)
    arguments = parser.parse_args()

    environment = suite_gym.load("CartPole-v1")
    policy = random_py_policy.RandomPyPolicy(
        environment.time_step_spec(), environment.action_spec(), seed=arguments.seed
    )
    with rw.TrajectoryObserver(arguments.server, "replay", sequence_length=2) as observer:
        driver = py_driver.PyDriver(environment, policy, [observer], max_steps=arguments.steps)
        driver.run(environment.reset())
        observer.flush()
        stats = observer.stats()
    print(f"{stats.steps} steps of {stats.episodes} episodes, {stats.acknowledged_items} items")


if __name__ == "__main__":
    main()
