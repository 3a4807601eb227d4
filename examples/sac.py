"""SAC on Pendulum in PyTorch: continuous actions, uniform replay of single transitions.

python examples/sac.py                       # on a server in this process
python examples/sac.py --server HOST:PORT    # table `replay`
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import copy
from collections.abc import Generator
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import nn

import reverb_writer as rw

GAMMA, TAU, LEARNING_RATE, BATCH_SIZE, WARM_UP = 0.98, 0.02, 2e-3, 128, 600
LIMIT = 2.0  # limit of Pendulum's torque
TABLE = rw.TableConfig("replay", 100_000)


def mlp(num_inputs: int, num_outputs: int) -> Any:
    """Return a network of two hidden layers."""
    return nn.Sequential(nn.Linear(num_inputs, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, num_outputs))


class Agent:
    """A policy, two critics with their targets, and the temperature (Haarnoja et al., 2018)."""

    def __init__(self) -> None:
        self.policy = mlp(3, 2)
        self.critics = [mlp(4, 1), mlp(4, 1)]
        self.targets = copy.deepcopy(self.critics)
        self.log_alpha = torch.zeros((), requires_grad=True)
        critics = [weight for critic in self.critics for weight in critic.parameters()]
        self.optimizers = [
            torch.optim.Adam(weights, LEARNING_RATE)
            for weights in (critics, self.policy.parameters(), [self.log_alpha])
        ]

    def act(self, observations: Any) -> tuple[Any, Any]:
        """Return actions [..., 1] and their log-probabilities [..., 1]."""
        mean, log_std = self.policy(observations).chunk(2, -1)
        normal = torch.distributions.Normal(mean, log_std.clamp(-5, 2).exp())
        drawn = normal.rsample()
        squashed = 2 * (np.log(2) - drawn - nn.functional.softplus(-2 * drawn))
        return LIMIT * torch.tanh(drawn), normal.log_prob(drawn) - squashed - np.log(LIMIT)

    def train(self, step: rw.NStepTransitions) -> None:
        """Update all networks once."""
        observations, actions, following = step.observation, step.action, step.next_observation
        rewards, discounts = step.reward[:, None] / 10, step.discount[:, None]
        alpha = self.log_alpha.exp().detach()
        with torch.no_grad():
            next_actions, next_log_prob = self.act(following)
            next_values = self.values(self.targets, following, next_actions) - alpha * next_log_prob
            targets = rewards + GAMMA * discounts * next_values
        both = torch.cat([observations, actions], 1)
        self._descend(0, sum(((critic(both) - targets) ** 2).mean() for critic in self.critics))
        drawn, log_prob = self.act(observations)
        self._descend(1, (alpha * log_prob - self.values(self.critics, observations, drawn)).mean())
        self._descend(2, -(self.log_alpha.exp() * (log_prob.detach() - 1.0)).mean())  # the target entropy is -1
        with torch.no_grad():
            for target, critic in zip(self.targets, self.critics, strict=True):
                for old, new in zip(target.parameters(), critic.parameters(), strict=True):
                    old.lerp_(new, TAU)

    def values(self, critics: Any, observations: Any, actions: Any) -> Any:
        """Return the smaller of the critics' values, [..., 1]."""
        both = torch.cat([observations, actions], -1)
        return torch.min(critics[0](both), critics[1](both))

    def _descend(self, number: int, loss: Any) -> None:
        self.optimizers[number].zero_grad()
        loss.backward()
        self.optimizers[number].step()


def learn(address: str, num_steps: int, seed: int = 0) -> Generator[tuple[int, float], None, None]:
    """Yield after each episode the number of environment steps, and the mean return of the last five episodes."""
    torch.set_num_threads(1)  # small networks
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    agent = Agent()
    returns: collections.deque[float] = collections.deque(maxlen=5)
    with (
        rw.TrajectoryObserver(address, "replay", 2) as observer,  # a step, and the observation after it
        rw.ReplayDataset(address, "replay", BATCH_SIZE, max_in_flight_batches=1) as dataset,
    ):
        env = rw.environments.record(gymnasium.make("Pendulum-v1"), observer)
        transitions = dataset.transitions().as_torch()
        observation, _ = env.reset(seed=seed)
        total = 0.0
        for step in range(1, num_steps + 1):
            if step < WARM_UP:
                action = rng.uniform(-LIMIT, LIMIT, 1).astype(np.float32)
            else:
                with torch.no_grad():
                    action = agent.act(torch.as_tensor(observation))[0].numpy()
            observation, reward, terminated, truncated, _ = env.step(action)
            total += float(reward)
            if terminated or truncated:
                returns.append(total)
                yield step, sum(returns) / len(returns)
                (observation, _), total = env.reset(), 0.0
            if step >= WARM_UP:
                agent.train(next(transitions))
        env.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="Learn Pendulum-v1 by SAC.")
    parser.add_argument(
        "--server", metavar="ADDRESS", help="address of a server with the table; by default a server in this process"
    )
    parser.add_argument("--steps", type=int, default=15_000)
    parser.add_argument("--goal", type=float, default=-200.0, help="stop at this mean return of episodes")
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
