"""Recurrent Q-learning as in R2D2, in PyTorch: CartPole without velocities, stored states and burn-in.

    python examples/r2d2.py                       # on a server in this process
    python examples/r2d2.py --server HOST:PORT    # table `replay`, sampler "prioritized"

The agent sees only position and angle, so it needs a memory. Each step of the replay holds the state of the actor's
network before that step. The learner takes the state at the window's start, runs the newest network over the first
`BURN_IN` steps to refresh it, and trains on the other steps.
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

BURN_IN, NUM_STEPS, STRIDE = 2, 12, 6  # a window has one more step, whose observation is used
N_STEP, GAMMA, HIDDEN = 3, 0.97, 64
BATCH_SIZE, LEARNING_RATE, TARGET_EVERY = 32, 1e-3, 400
WARM_UP, UPDATE_EVERY, EXPLORE_STEPS = 1000, 2, 6000
TABLE = rw.TableConfig("replay", 10_000, rw.Prioritized(0.6))


class RecurrentQ(nn.Module):  # type: ignore[misc]  # PyTorch is not installed where mypy runs
    """The values of both actions after each observation, given a state."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.memory, self.values = (
            nn.Linear(2, HIDDEN),
            nn.GRU(HIDDEN, HIDDEN, batch_first=True),
            nn.Linear(HIDDEN, 2),
        )

    def forward(self, observations: Any, state: Any) -> tuple[Any, Any]:
        """Return values [B, T, 2] and the state after them [B, H], given observations [B, T, 2] and a state [B, H]."""
        outputs, state = self.memory(torch.relu(self.encode(observations)), state[None].contiguous())
        return self.values(outputs), state[0]


class Masked(gymnasium.ObservationWrapper):
    """CartPole's position and angle, without their velocities."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)

    def observation(self, observation: Any) -> Any:
        """Return the observation of the agent."""
        return (observation[[0, 2]] * np.array([0.4, 5.0])).astype(np.float32)


def td_errors(network: Any, target: Any, batch: rw.Batch) -> Any:
    """Return [B, T] errors of the steps after the burn-in, and the mask of transitions."""
    state = batch.data["extras"]["state"][:, 0]
    before, after = rw.burn_in(batch, BURN_IN)
    observations = after.data["observation"]
    with torch.no_grad():
        _, own_state = network(before.data["observation"], state)
        _, target_state = target(before.data["observation"], state)
        all_targets, _ = target(observations, target_state)
    values, _ = network(observations, own_state)
    pairs = rw.to_transitions(after)
    # Row numbers take the place of next observations, because the network has already run over the window.
    rows = torch.arange(1, observations.shape[1]).expand(pairs.mask.shape)
    found = rw.n_step(pairs._replace(next_observation=rows), N_STEP, GAMMA)
    best = values.detach().argmax(2, keepdim=True)
    following = all_targets.gather(2, best)[:, :, 0].gather(1, found.next_observation)
    targets = found.reward + GAMMA * found.discount * following
    taken = values[:, :-1].gather(2, found.action[:, :, None])[:, :, 0]
    return (taken - targets) * found.mask, found.mask


def learn(address: str, num_steps: int, seed: int = 0) -> Generator[tuple[int, float], None, None]:
    """Yield after each episode the number of environment steps, and the mean length of the last twenty episodes."""
    torch.set_num_threads(1)  # small networks
    torch.manual_seed(seed)
    rng = random.Random(seed)  # noqa: S311  # exploration
    network = RecurrentQ()
    target = copy.deepcopy(network)
    optimizer = torch.optim.Adam(network.parameters(), LEARNING_RATE)
    lengths: collections.deque[int] = collections.deque(maxlen=20)
    length, state = 0, torch.zeros(1, HIDDEN)
    with (
        rw.TrajectoryObserver(
            address, "replay", BURN_IN + NUM_STEPS + 1, STRIDE, end_of_episode="cover", priority="max"
        ) as observer,
        rw.ReplayDataset(address, "replay", BATCH_SIZE, max_in_flight_batches=1) as dataset,
    ):
        env = rw.environments.record(
            Masked(gymnasium.make("CartPole-v1")), observer, extras=lambda: {"state": before_action[0]}
        )
        batches = iter(dataset.as_torch())
        observation, _ = env.reset(seed=seed)
        for step in range(1, num_steps + 1):
            before_action = state
            with torch.no_grad():
                values, state = network(torch.as_tensor(observation)[None, None], state)
            epsilon = np.interp(step, (0, EXPLORE_STEPS), (1.0, 0.02))
            action = rng.randrange(2) if rng.random() < epsilon else int(values.argmax())
            observation, _, terminated, truncated, _ = env.step(action)
            length += 1
            if terminated or truncated:
                lengths.append(length)
                yield step, sum(lengths) / len(lengths)
                (observation, _), length, state = env.reset(), 0, torch.zeros(1, HIDDEN)
            if step >= WARM_UP and step % UPDATE_EVERY == 0:
                batch = next(batches)
                errors, mask = td_errors(network, target, batch)
                beta = np.interp(step, (0, num_steps), (0.4, 1.0))
                loss = nn.functional.huber_loss(errors, torch.zeros_like(errors), reduction="none")
                per_window = loss.sum(1) / mask.sum(1).clamp(min=1)
                optimizer.zero_grad()
                (batch.info.importance_weights(beta) * per_window).mean().backward()
                nn.utils.clip_grad_norm_(network.parameters(), 10.0)
                optimizer.step()
                dataset.update_priorities(batch, rw.returns.sequence_priorities(errors.detach(), mask) + 1e-3)
            if step % TARGET_EVERY == 0:
                target.load_state_dict(network.state_dict())
        env.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="Learn CartPole-v1 without velocities by recurrent Q-learning.")
    parser.add_argument(
        "--server", metavar="ADDRESS", help="address of a server with the table; by default a server in this process"
    )
    parser.add_argument("--steps", type=int, default=60_000)
    parser.add_argument("--goal", type=float, default=150.0, help="stop at this mean length of episodes")
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
