"""n-step Q-learning with prioritised replay in PyTorch, in a corridor with a reward at its far end only.

    python examples/prioritized_torch.py localhost:8000

The server needs a table: `TableConfig("replay", 5000, sampler=Prioritized(0.6))`.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch

import reverb_writer as rw

NUM_CELLS, NUM_ACTIONS = 5, 2  # left, right
NUM_STEPS, DISCOUNT = 3, 0.9
TABLE = "replay"


def act(address: str, num_episodes: int, seed: int = 0) -> None:
    """Walk at random from random cells, and write windows of `NUM_STEPS` steps and the one after them."""
    rng = np.random.default_rng(seed)
    with rw.TrajectoryObserver(address, TABLE, NUM_STEPS + 1, end_of_episode="tile") as observer:
        for _ in range(num_episodes):
            cell, is_last = int(rng.integers(NUM_CELLS - 1)), False
            for step in range(30):
                action = int(rng.integers(NUM_ACTIONS))
                after = min(max(cell + 2 * action - 1, 0), NUM_CELLS - 1)
                is_last = after == NUM_CELLS - 1
                # `discount` is 0 where the corridor ended, and 1 where the time limit did: it could have gone on.
                observer(_step(cell, action, float(is_last), 1.0 - is_last), end_of_episode=False)
                cell = after
                if is_last or step == 29:
                    break
            observer(_step(cell), end_of_episode=True)


def _step(cell: int, action: int | None = None, reward: float = 0.0, discount: float = 0.0) -> dict[str, Any]:
    """Return a step; without an action the boundary step, which only holds the last position.

    Padding is zeros, and so it has no action either.
    """
    return {
        "cell": np.int64(cell),
        "has_action": np.bool_(action is not None),
        "action": np.int64(action or 0),
        "reward": np.float32(reward),
        "discount": np.float32(discount),
    }


def n_step_targets(data: dict[str, Any], values: Any) -> Any:
    """Return the targets for the first action of each window, [B], given windows [B, n + 1] and Q, [cells, actions].

    The rewards of the next n actions, or of as many as there were, and the value of what was seen after the last of
    them: that is the boundary step where a time limit ended the episode. Where `discount` is 0, nothing follows.
    """
    taken = data["has_action"][:, :NUM_STEPS].long().cumprod(dim=1)
    rows = torch.arange(len(taken))
    target, weight = torch.zeros(len(taken)), torch.ones(len(taken))
    for k in range(NUM_STEPS):
        target += weight * taken[:, k] * data["reward"][:, k]
        weight = torch.where(taken[:, k] == 1, weight * DISCOUNT * data["discount"][:, k], weight)
    after = data["cell"][rows, taken.sum(dim=1)]
    return target + weight * values[after].max(dim=1).values


def learn(address: str, num_batches: int) -> Any:
    """Return Q, [cells, actions], learnt from batches, with TD errors as priorities."""
    values = torch.zeros(NUM_CELLS, NUM_ACTIONS, requires_grad=True)
    optimizer = torch.optim.Adam([values], 0.05)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, num_batches)
    with rw.ReplayDataset(address, TABLE, batch_size=64) as dataset:
        for _, batch in zip(range(num_batches), dataset.as_torch(), strict=False):
            data = batch.data
            errors = n_step_targets(data, values.detach()) - values[data["cell"][:, 0], data["action"][:, 0]]
            errors = errors * data["has_action"][:, 0]  # a window that begins with the boundary step teaches nothing
            weights = batch.info.importance_weights(0.4)
            optimizer.zero_grad()
            (weights * errors**2).mean().backward()
            optimizer.step()
            schedule.step()
            dataset.update_priorities(batch, errors.abs() + 1e-3)
    return values.detach().numpy()


def main() -> None:
    """Act, learn, and print the best direction from each cell."""
    address = sys.argv[1] if len(sys.argv) > 1 else "localhost:8000"
    act(address, 200)
    values = learn(address, 500)
    print("".join("<>"[action] for action in values[:-1].argmax(axis=1)))


if __name__ == "__main__":
    main()
