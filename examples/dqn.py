"""DQN on CartPole in PyTorch: double Q-learning, n-step returns, prioritised replay.

python examples/dqn.py                       # on a server in this process
python examples/dqn.py --server HOST:PORT    # table `replay`, sampler "prioritized"
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import copy
import random
from collections.abc import Generator
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import nn

import reverb_writer as rw

N_STEP, GAMMA = 3, 0.99
BATCH_SIZE, LEARNING_RATE, TARGET_EVERY = 64, 1e-3, 300
WARM_UP, UPDATE_EVERY, EXPLORE_STEPS = 1000, 3, 5000
TABLE = rw.TableConfig("replay", 50_000, rw.Prioritized(0.6))


def q_network() -> Any:
    """Return a network from observations to the values of both actions."""
    return nn.Sequential(nn.Linear(4, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2))


def td_errors(network: Any, target: Any, first: rw.NStepTransitions) -> Any:
    """Return [B] errors of transitions over n steps or up to the episode's end."""
    values = network(first.observation).gather(1, first.action[:, None])[:, 0]
    with torch.no_grad():
        best = network(first.next_observation).argmax(1, keepdim=True)
        following = target(first.next_observation).gather(1, best)[:, 0]
        targets = first.reward + GAMMA * first.discount * following
    return (values - targets) * first.mask


def learn(address: str, num_steps: int, seed: int = 0) -> Generator[tuple[int, float], None, None]:
    """Yield after each episode the number of environment steps, and the mean length of the last twenty episodes."""
    torch.set_num_threads(1)  # small networks
    torch.manual_seed(seed)
    rng = random.Random(seed)  # noqa: S311  # exploration
    network = q_network()
    target = copy.deepcopy(network)
    optimizer = torch.optim.Adam(network.parameters(), LEARNING_RATE)
    lengths: collections.deque[int] = collections.deque(maxlen=20)
    with (
        # "tile": every step of an episode begins a window; windows at the end have padding.
        rw.TrajectoryObserver(address, "replay", N_STEP + 1, end_of_episode="tile", priority="max") as observer,
        rw.ReplayDataset(address, "replay", BATCH_SIZE, max_in_flight_batches=1) as dataset,
    ):
        env = rw.environments.record(gymnasium.make("CartPole-v1"), observer)
        transitions = dataset.transitions(N_STEP, GAMMA).as_torch()
        observation, _ = env.reset(seed=seed)
        length = 0
        for step in range(1, num_steps + 1):
            if rng.random() < np.interp(step, (0, EXPLORE_STEPS), (1.0, 0.02)):
                action = rng.randrange(2)
            else:
                with torch.no_grad():
                    action = int(network(torch.as_tensor(observation)).argmax())
            observation, _, terminated, truncated, _ = env.step(action)
            length += 1
            if terminated or truncated:
                lengths.append(length)
                yield step, sum(lengths) / len(lengths)
                (observation, _), length = env.reset(), 0
            if step >= WARM_UP and step % UPDATE_EVERY == 0:
                found = next(transitions)
                errors = td_errors(network, target, found)
                beta = np.interp(step, (0, num_steps), (0.4, 1.0))
                loss = nn.functional.huber_loss(errors, torch.zeros_like(errors), reduction="none")
                optimizer.zero_grad()
                (found.batch.info.importance_weights(beta) * loss).mean().backward()
                optimizer.step()
                dataset.update_priorities(found, errors.abs() + 1e-3)
            if step % TARGET_EVERY == 0:
                target.load_state_dict(network.state_dict())
        env.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="Learn CartPole-v1 by DQN.")
    parser.add_argument(
        "--server", metavar="ADDRESS", help="of a server with the table; without it, one in this process"
    )
    parser.add_argument("--steps", type=int, default=40_000)
    parser.add_argument("--goal", type=float, default=200.0, help="mean length of episodes at which to stop")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with contextlib.ExitStack() as stack:
        source = given.server or stack.enter_context(rw.LocalServer([TABLE])).address
        for step, mean in learn(source, given.steps, given.seed):
            print(f"{step:6} steps: {mean:6.0f}", end="\r", flush=True)
            if mean >= given.goal:
                break
    print()


if __name__ == "__main__":
    main()
