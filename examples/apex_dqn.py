"""DQN in the style of Ape-X (Horgan et al., 2018) on CartPole: a learner, and actors that explore more or less.

    python examples/apex_dqn.py                                        # processes and a server of this machine
    python examples/apex_dqn.py --ray apex --shards 4 --python /opt/replay/bin/python --checkpoints /shared/replay

The second line is the same program on a Ray cluster: `on_ray` differs from `on_laptop` by ten lines. In plain NumPy.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import multiprocessing
import os
import sys
from collections.abc import Generator
from typing import Any

import gymnasium
import numpy as np

sys.path.insert(0, os.path.dirname(__file__))  # noqa: PTH120  # Ray's workers have another folder
from q_network import Adam, QNetwork

import reverb_writer as rw

N_STEP, GAMMA, BATCH_SIZE, LEARNING_RATE, TARGET_RATE = 3, 0.99, 64, 1e-3, 0.01
PUBLISH_EVERY, EVALUATE_EVERY = 20, 100
TABLES = [
    # Actors and learner keep in step: a window is sampled eight times on average.
    rw.TableConfig("replay", 50_000, rw.Prioritized(0.6), rate_limiter=rw.SampleToInsertRatio(8, 500, 3_000)),
    rw.TableConfig.variables("variables"),  # of all shards each has the weights
]


def act(source: Any, number: int, num_actors: int) -> None:
    """Play until the process is ended; the first actor explores most."""
    rng = np.random.default_rng(number)
    epsilon = 0.4 ** (1 + 7 * number / max(1, num_actors - 1))
    network = QNetwork(rng)
    newest: dict[str, Any] = {}
    with (
        rw.Variables(source, "variables") as variables,
        rw.TrajectoryObserver(
            source,
            "replay",
            N_STEP + 1,
            end_of_episode="tile",
            # A new window gets the learner's largest priority: it is sampled soon, and the learner corrects it.
            priority=lambda _: float(newest["priority"]),
            actor_id=f"actor-{number}",
        ) as observer,
    ):
        newest.update(variables.latest())
        env = rw.environments.record(gymnasium.make("CartPole-v1"), observer)
        for episode in range(1_000_000):
            observation, _ = env.reset(seed=number if episode == 0 else None)
            is_over = False
            while not is_over:
                newest.update(variables.poll({}))
                network.weights = newest["weights"]
                greedy = rng.random() >= epsilon
                action = int(network(observation).argmax()) if greedy else int(rng.integers(2))
                observation, _, terminated, truncated, _ = env.step(action)
                is_over = terminated or truncated


def learn(source: Any, num_updates: int, seed: int = 0) -> Generator[tuple[int, float], None, None]:
    """Yield the updates so far, and the length of an episode without exploration."""
    online = QNetwork(np.random.default_rng(seed))
    target = copy.deepcopy(online)
    optimizer = Adam(online.weights, LEARNING_RATE)
    with rw.Variables(source, "variables") as variables, rw.ReplayDataset(source, "replay", BATCH_SIZE) as batches:
        largest = 1.0
        variables.publish({"weights": online.weights, "priority": np.array(largest)})
        transitions = batches.transitions(N_STEP, GAMMA)
        for update in range(1, num_updates + 1):
            first = next(transitions)
            best = online(first.next_observation).argmax(-1, keepdims=True)
            following = np.take_along_axis(target(first.next_observation), best, -1)[:, 0]
            targets = first.reward + GAMMA * first.discount * following
            errors = np.take_along_axis(online(first.observation), first.action[:, None], -1)[:, 0] - targets
            real = first.mask
            gradients = online.gradient(first.observation[real], first.action[real], targets[real])
            optimizer.descend(online.weights, gradients)
            priorities = np.abs(errors) * real + 1e-3
            largest = max(largest, float(priorities.max()))
            batches.update_priorities(first.batch, priorities)
            for slow, fast in zip(target.weights, online.weights, strict=True):
                slow[:] += TARGET_RATE * (fast - slow)
            if update % PUBLISH_EVERY == 0:
                variables.publish({"weights": online.weights, "priority": np.array(largest)})
            if update % EVALUATE_EVERY == 0:
                yield update, evaluate(online)


def evaluate(network: QNetwork) -> float:
    """Return the mean length of three episodes."""
    env, num_steps = gymnasium.make("CartPole-v1"), 0
    for seed in range(3):
        observation, _ = env.reset(seed=seed)
        is_over = False
        while not is_over:
            observation, _, terminated, truncated, _ = env.step(int(network(observation).argmax()))
            is_over = terminated or truncated
            num_steps += 1
    return num_steps / 3


@contextlib.contextmanager
def on_laptop(num_actors: int) -> Generator[str, None, None]:
    """Have a server in this process, and actors in processes of their own, within the block."""
    with rw.LocalServer(TABLES) as server:
        source = server.address
        context = multiprocessing.get_context("spawn")
        actors = [context.Process(target=act, args=(source, number, num_actors)) for number in range(num_actors)]
        for actor in actors:
            actor.start()
        try:
            yield source
        finally:
            for actor in actors:
                actor.kill()


@contextlib.contextmanager
def on_ray(num_actors: int, name: str, shards: int, **options: Any) -> Generator[Any, None, None]:
    """Have shards and actors on a Ray cluster within the block."""
    import ray

    from reverb_writer.ray import ReplayCluster

    with ReplayCluster.start(name, TABLES, shards, **options) as cluster:
        source = cluster.target()
        task = ray.remote(num_cpus=0, max_retries=-1)(act)  # Ray starts an actor again whose node is lost
        actors = [task.remote(source, number, num_actors) for number in range(num_actors)]
        try:
            yield source
        finally:
            for actor in actors:
                ray.cancel(actor, force=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Learn CartPole by DQN with many actors.")
    parser.add_argument("--actors", type=int, default=4)
    parser.add_argument("--updates", type=int, default=20_000)
    parser.add_argument("--goal", type=float, default=300.0, help="length of an episode at which to stop")
    parser.add_argument("--ray", metavar="NAME", help="of a cluster on Ray; without it, all is on this machine")
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--python", default=sys.executable, help="interpreter of the servers, on every node")
    parser.add_argument("--checkpoints", metavar="DIR", help="folder that every node reaches")
    given = parser.parse_args()
    options = {"python": given.python, "checkpoints": given.checkpoints}
    where = on_ray(given.actors, given.ray, given.shards, **options) if given.ray else on_laptop(given.actors)
    with where as source:
        for update, length in learn(source, given.updates):
            print(f"{update:6} updates: {length:6.0f}", flush=True)
            if length >= given.goal:
                break


if __name__ == "__main__":
    main()
