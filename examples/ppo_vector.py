"""PPO over vector environments in PyTorch: windows of eight CartPoles, each used once.

    python examples/ppo_vector.py                       # on a server in this process
    python examples/ppo_vector.py --server HOST:PORT    # a queue `rollouts` of eight items

The environments write windows that span episodes, with the policy's log-probabilities beside the actions. The learner
makes transitions of the windows, so it need not know how the environments reset.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import sys
from collections.abc import Generator
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import nn

import reverb_writer as rw

NUM_ENVS, NUM_STEPS = 8, 128
GAMMA, LAM, CLIP = 0.99, 0.95, 0.2
NUM_EPOCHS, NUM_MINI_BATCHES, LEARNING_RATE, ENTROPY = 6, 4, 1e-3, 0.005
TABLE = rw.TableConfig.queue("rollouts", NUM_ENVS)


class ActorCritic(nn.Module):  # type: ignore[misc]  # PyTorch is not installed where mypy runs
    """A policy and its critic; `log_prob` belongs to the last actions."""

    def __init__(self) -> None:
        super().__init__()
        self.policy, self.critic = (
            nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, size))
            for size in (2, 1)
        )
        self.log_prob: Any = None

    def act(self, observations: Any) -> Any:
        """Draw actions [N]."""
        with torch.no_grad():
            actions = self.distribution(torch.as_tensor(observations))
            drawn = actions.sample()
            self.log_prob = actions.log_prob(drawn)
        return drawn.numpy()

    def distribution(self, observations: Any) -> Any:
        """Return the distribution of actions."""
        return torch.distributions.Categorical(logits=self.policy(observations))

    def values(self, observations: Any) -> Any:
        """Return the values [...] of observations [..., 4]."""
        return self.critic(observations)[..., 0]


def train(agent: ActorCritic, optimizer: Any, batch: rw.Batch) -> None:
    """Learn from windows [B, T + 1] with PPO's clipped ratio (Schulman et al., 2017)."""
    found = rw.to_transitions(batch)
    with torch.no_grad():
        advantages, returns = rw.returns.gae(found, agent.values(batch.data["observation"]), gamma=GAMMA, lambda_=LAM)
    rows = found.mask.reshape(-1).nonzero()[:, 0]  # boundary steps have no action
    columns = [found.observation, found.action, found.extras["log_prob"], advantages, returns]
    columns = [column.flatten(0, 1)[rows] for column in columns]
    columns[3] = (columns[3] - columns[3].mean()) / (columns[3].std() + 1e-8)
    for _ in range(NUM_EPOCHS):
        for part in torch.randperm(len(rows)).chunk(NUM_MINI_BATCHES):
            observations, taken, old_log_prob, advantage, target = (column[part] for column in columns)
            actions = agent.distribution(observations)
            ratio = (actions.log_prob(taken) - old_log_prob).exp()
            gain = torch.min(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
            errors = (agent.values(observations) - target) ** 2
            optimizer.zero_grad()
            (errors.mean() / 2 - gain.mean() - ENTROPY * actions.entropy().mean()).backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()


def learn(address: str, num_steps: int, seed: int = 0) -> Generator[tuple[int, float], None, None]:
    """Yield after each rollout the number of environment steps, and the mean length of the last forty episodes."""
    torch.set_num_threads(1)  # small networks
    torch.manual_seed(seed)
    agent = ActorCritic()
    optimizer = torch.optim.Adam(agent.parameters(), LEARNING_RATE)
    lengths: collections.deque[int] = collections.deque([0], maxlen=40)
    length = np.zeros(NUM_ENVS, np.int64)
    with (
        rw.SequenceObserver(address, "rollouts", NUM_STEPS + 1, NUM_STEPS, num_envs=NUM_ENVS) as observer,
        rw.ReplayDataset(address, "rollouts", NUM_ENVS, max_in_flight_batches=1) as dataset,
    ):
        envs = rw.environments.record(
            gymnasium.make_vec("CartPole-v1", NUM_ENVS), observer, extras=lambda: {"log_prob": agent.log_prob}
        )
        batches = iter(dataset.as_torch())
        observations, _ = envs.reset(seed=seed)
        for step in range(1, num_steps // NUM_ENVS + 1):
            observations, _, terminated, truncated, _ = envs.step(agent.act(observations))
            length += 1
            over = terminated | truncated
            lengths.extend(length[over].tolist())
            length[over] = -1  # the next call only resets these environments
            if step > 1 and step % NUM_STEPS == 1:  # the observation after the window has arrived
                train(agent, optimizer, next(batches))
                yield step * NUM_ENVS, sum(lengths) / len(lengths)
        envs.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="Learn CartPole-v1 by PPO, with vector environments.")
    parser.add_argument(
        "--server", metavar="ADDRESS", help="address of a server with the table; by default a server in this process"
    )
    parser.add_argument("--ray", metavar="NAME", help="name of a cluster on Ray, which is started if it does not exist")
    parser.add_argument("--shards", type=int, default=1, help="of that cluster")
    parser.add_argument("--python", default=sys.executable, help="interpreter of its servers, on every node")
    parser.add_argument("--steps", type=int, default=200_000)
    parser.add_argument("--goal", type=float, default=300.0, help="stop at this mean length of episodes")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with contextlib.ExitStack() as stack:
        if given.ray:
            from reverb_writer.ray import ReplayCluster

            cluster = ReplayCluster.start(given.ray, [TABLE], given.shards, python=given.python)
            source: Any = stack.enter_context(cluster).target()
        else:
            source = given.server or stack.enter_context(rw.LocalServer([TABLE])).address
        for step, mean in learn(source, given.steps, given.seed):
            print(f"{step:6} steps: {mean:6.0f}", end="\r", flush=True)
            if mean >= given.goal:
                break
    print()


if __name__ == "__main__":
    main()
