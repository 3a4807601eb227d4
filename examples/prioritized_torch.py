"""n-step Q-learning with prioritised replay in PyTorch, in a corridor with a reward at its far end only.

    python examples/prioritized_torch.py localhost:8000

The server needs a table: `TableConfig("replay", 5000, sampler=Prioritized(0.6))`.
"""

from __future__ import annotations

import sys
from typing import Any

import gymnasium
import numpy as np
import torch

import reverb_writer as rw

NUM_CELLS, NUM_ACTIONS = 5, 2  # left, right
NUM_STEPS, DISCOUNT = 3, 0.9
TABLE = "replay"


class Corridor(gymnasium.Env[Any, Any]):
    """Begins in any cell but the last one, which ends the episode; 30 steps are the limit, and no end."""

    observation_space, action_space = gymnasium.spaces.Discrete(NUM_CELLS), gymnasium.spaces.Discrete(NUM_ACTIONS)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        self._cell, self._num_steps = int(self.np_random.integers(NUM_CELLS - 1)), 0
        return self._cell, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._cell = min(max(self._cell + 2 * int(action) - 1, 0), NUM_CELLS - 1)
        self._num_steps += 1
        is_last = self._cell == NUM_CELLS - 1
        return self._cell, float(is_last), is_last, self._num_steps == 30, {}


def act(address: str, num_episodes: int, seed: int = 0) -> None:
    """Walk at random, and write windows of `NUM_STEPS` steps and the one after them."""
    rng = np.random.default_rng(seed)
    with rw.TrajectoryObserver(address, TABLE, NUM_STEPS + 1, end_of_episode="tile") as observer:
        env = rw.environments.record(Corridor(), observer)
        for episode in range(num_episodes):
            env.reset(seed=seed + episode)
            is_over = False
            while not is_over:
                _, _, terminated, truncated, _ = env.step(rng.integers(NUM_ACTIONS))
                is_over = terminated or truncated


def learn(address: str, num_batches: int) -> Any:
    """Return Q, [cells, actions], learnt from batches, with TD errors as priorities."""
    values = torch.zeros(NUM_CELLS, NUM_ACTIONS, requires_grad=True)
    optimizer = torch.optim.Adam([values], 0.05)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, num_batches)
    with rw.ReplayDataset(address, TABLE, batch_size=64) as dataset:
        transitions = dataset.transitions(NUM_STEPS, DISCOUNT).as_torch()
        for _, first in zip(range(num_batches), transitions, strict=False):
            after = values.detach()[first.next_observation].max(dim=1).values
            targets = first.reward + DISCOUNT * first.discount * after
            # Windows that begin with a boundary step are masked.
            errors = (targets - values[first.observation, first.action]) * first.mask
            weights = first.batch.info.importance_weights(0.4)
            optimizer.zero_grad()
            (weights * errors**2).mean().backward()
            optimizer.step()
            schedule.step()
            dataset.update_priorities(first.batch, errors.abs() + 1e-3)
    return values.detach().numpy()


def main() -> None:
    """Act, learn, and print the best direction from each cell."""
    address = sys.argv[1] if len(sys.argv) > 1 else "localhost:8000"
    act(address, 200)
    values = learn(address, 500)
    print("".join("<>"[action] for action in values[:-1].argmax(axis=1)))


if __name__ == "__main__":
    main()
