"""A `RolloutDataset` in a training loop, in NumPy: imitate an expert from its trajectories on disk.

    python examples/imitate_rollouts.py

An expert pushes eight carts on a line to the middle, with the force -1.0 x position - 1.5 x velocity. Each episode is
written to a folder when it ends. The learner reads the episodes as if sixteen environments stepped through them, and
finds the two numbers.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np

from reverb_writer.files import RolloutDataset, RolloutWriter

EXPERT = np.array([[-1.0], [-1.5]], np.float32)
NUM_CARTS, EPISODE, DT = 8, 40, 0.1
LEARNING_RATE = 0.3


def push(carts: Any, forces: Any) -> Any:
    """Return positions and velocities [B, 2] after a step with forces [B, 1]."""
    return np.concatenate([carts[:, :1] + DT * carts[:, 1:], carts[:, 1:] + DT * forces], axis=1, dtype=np.float32)


def record(folder: str, num_episodes: int, seed: int = 0) -> None:
    """Write `num_episodes` episodes of each cart, with the expert's forces."""
    rng = np.random.default_rng(seed)
    with RolloutWriter(folder, num_envs=NUM_CARTS, metadata={"expert": EXPERT.ravel().tolist()}) as writer:
        for _ in range(num_episodes):
            carts = rng.uniform(-1, 1, (NUM_CARTS, 2)).astype(np.float32)
            for t in range(EPISODE):
                forces = carts @ EXPERT
                following = push(carts, forces)
                step = {"observation": carts, "action": forces, "reward": -(following**2).sum(1)}
                is_over = np.full(NUM_CARTS, t == EPISODE - 1)  # by a time limit, so the final state has a value
                writer(step, truncated=is_over, final_observation=following)
                carts = following


def imitate(folder: str, num_epochs: int) -> Iterator[tuple[float, Any]]:
    """Yield after each epoch the mean squared error of the forces, and the policy [2, 1]."""
    policy = np.zeros((2, 1), np.float32)
    dataset = RolloutDataset(folder, num_envs=16, seed=0)
    for _ in range(num_epochs):
        errors = []
        for batch in dataset:  # leaves [16, ...], one transition per environment
            error = (batch.observation @ policy - batch.action) * batch.mask[:, None]  # 0 without a trajectory
            policy -= LEARNING_RATE * batch.observation.T @ error / max(batch.mask.sum(), 1)
            errors.append(float((error**2).mean()))
        yield sum(errors) / len(errors), policy


def main(folder: str) -> None:
    """Record, imitate, and print the final distance of a cart from the middle with the learned policy."""
    record(folder, num_episodes=6)
    for epoch, (error, policy) in enumerate(imitate(folder, num_epochs=10), 1):
        print(f"epoch {epoch:2}: error {error:.2e}, policy {policy.ravel().round(3).tolist()}")
    carts = np.ones((1, 2), np.float32)
    for _ in range(100):
        carts = push(carts, carts @ policy)
    print(f"after 100 steps the cart is at {carts[0, 0]:.3f}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        main(scratch)
