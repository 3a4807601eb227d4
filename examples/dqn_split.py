"""DQN on CartPole with an actor and a learner in two processes, kept in step by the table's rate limiter.

    python examples/dqn_split.py

    actor --steps--> table `replay` --batches--> learner --weights--> table `variables` --> actor

Each transition is sampled eight times on average. If the learner is late, the actor waits; if the actor is late, the
learner waits. So the actor plays with weights that are only a few hundred steps old. In plain NumPy.
"""

from __future__ import annotations

import argparse
import copy
import multiprocessing
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from q_network import Adam, QNetwork

import reverb_writer as rw

N_STEP, GAMMA, BATCH_SIZE, LEARNING_RATE, TARGET_RATE = 3, 0.99, 64, 1e-3, 0.01
PUBLISH_EVERY = 10  # updates
EXPLORING_STEPS, EXPLORATION = 5_000, 0.05  # steps until the share of random actions has fallen to its last value
TIMEOUT_S = 60.0  # for the start of the other process, and for the end of both
SLOWEST_STEP_S = 0.05  # whatever the machine is busy with
LOOK_S = 1.0  # how often a learner without batches looks whether the run is over
TABLES = [
    rw.TableConfig("replay", 50_000, rate_limiter=rw.SampleToInsertRatio(8, min_size=500, error_buffer=800)),
    rw.TableConfig.variables("variables"),
]


def act(address: str, num_steps: int, seed: int, results: Any) -> None:
    """Play so many steps with the learner's weights, and put the return of each episode into `results`."""
    rng = np.random.default_rng(seed)
    network = QNetwork(rng)
    returns = [0.0]
    with (
        rw.Variables(address, "variables", timeout_s=TIMEOUT_S) as variables,
        rw.TrajectoryObserver(address, "replay", N_STEP + 1, end_of_episode="tile") as observer,
    ):
        env = rw.environments.record(gymnasium.make("CartPole-v1"), observer)
        network.weights = variables.latest()
        observation, _ = env.reset(seed=seed)
        for step in range(num_steps):
            network.weights = variables.poll(network.weights)
            is_random = rng.random() < max(EXPLORATION, 1 - step / EXPLORING_STEPS)
            action = int(rng.integers(2)) if is_random else int(network(observation).argmax())
            observation, reward, terminated, truncated, _ = env.step(action)
            returns[-1] += float(reward)
            if terminated or truncated:
                returns.append(0.0)
                observation, _ = env.reset()
    results.put(returns[:-1])


def learn(address: str, seed: int, is_over: Any) -> None:
    """Learn, and publish the weights, until the actor has played all its steps."""
    online = QNetwork(np.random.default_rng(seed))
    target = copy.deepcopy(online)
    optimizer = Adam(online.weights, LEARNING_RATE)
    with (
        rw.Variables(address, "variables", timeout_s=TIMEOUT_S) as variables,
        rw.ReplayDataset(address, "replay", BATCH_SIZE, timeout_s=LOOK_S) as dataset,
    ):
        variables.publish(online.weights)
        transitions = dataset.transitions(N_STEP, GAMMA)
        update = 0
        while not is_over.is_set():
            try:
                found = next(transitions)
            except rw.errors.ReplayTimeoutError:  # no new steps: the actor starts, is late, or has played all of them
                continue
            real = found.mask  # a window's first transition counts, unless its episode ended before
            following = found.next_observation[real]
            best = online(following).argmax(axis=-1)  # double Q-learning: one chooses, one judges
            values = target(following)[np.arange(len(best)), best]
            targets = found.reward[real] + GAMMA * found.discount[real] * values
            gradient = online.gradient(found.observation[real], found.action[real], targets)
            optimizer.descend(online.weights, gradient)
            for slow, fast in zip(target.weights, online.weights, strict=True):
                slow[:] += TARGET_RATE * (fast - slow)
            update += 1
            if update % PUBLISH_EVERY == 0:
                variables.publish(online.weights)


def run(num_steps: int, seed: int = 0) -> list[float]:
    """Play and learn in processes of their own; return the return of each episode."""
    context = multiprocessing.get_context("spawn")  # gRPC does not survive a fork
    results, is_over = context.Queue(), context.Event()
    with rw.LocalServer(TABLES) as server:
        actor = context.Process(target=act, args=(server.address, num_steps, seed, results), daemon=True)
        learner = context.Process(target=learn, args=(server.address, seed, is_over), daemon=True)
        actor.start()
        learner.start()
        try:
            returns: list[float] = results.get(timeout=TIMEOUT_S + num_steps * SLOWEST_STEP_S)
        finally:
            is_over.set()
            for process in (actor, learner):
                process.join(TIMEOUT_S)
                process.kill()  # does nothing to a process that has ended
        return returns


def means(returns: Sequence[float], num_parts: int = 8) -> list[float]:
    """Return the mean return in each part of the run, all with as many steps."""
    parts = np.minimum(np.cumsum(returns) * num_parts // (sum(returns) + 1), num_parts - 1).astype(int)
    return [float(np.mean(np.asarray(returns)[parts == part])) for part in np.unique(parts)]


def main() -> None:
    parser = argparse.ArgumentParser(description="Learn CartPole with an actor process and a learner process.")
    parser.add_argument("--steps", type=int, default=30_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    parts = means(run(given.steps, given.seed))
    print("mean return of each eighth of the run:", *(f"{part:.0f}" for part in parts))


if __name__ == "__main__":
    main()
