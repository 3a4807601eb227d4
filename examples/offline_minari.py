"""Offline: from a Minari data set to batches, and a policy that imitates it, in PyTorch.

    python examples/offline_minari.py PATH    # a data set on disk whose actions are discrete

Minari -> trajectories on disk -> windows in a table -> batches -> transitions. On a server with online actors, an
`rw.MixedDataset` can mix this table with theirs.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import minari
import numpy as np
import torch
from torch import nn

import reverb_writer as rw
from reverb_writer.files import RolloutWriter, from_minari, import_trajectories, list_trajectories

BATCH_SIZE, NUM_STEPS, LEARNING_RATE = 32, 8, 2e-3
TABLE = rw.TableConfig("offline")


def fill(address: str, data: Any) -> int:
    """Write windows of all episodes of a data set to the table; return the number of steps."""
    with (
        tempfile.TemporaryDirectory() as folder,
        RolloutWriter(Path(folder)) as writer,
        rw.TrajectoryObserver(address, "offline", NUM_STEPS + 1, NUM_STEPS, end_of_episode="cover") as observer,
    ):
        from_minari(data, writer)
        return sum(imported.num_steps for imported in import_trajectories(list_trajectories(folder), observer))


def imitate(address: str, num_batches: int, num_features: int, num_actions: int, seed: int = 0) -> tuple[Any, float]:
    """Return a policy learned from batches, and the share of the last ten batches' actions that it also chooses."""
    torch.set_num_threads(1)  # a small network
    torch.manual_seed(seed)
    policy = nn.Sequential(nn.Linear(num_features, 64), nn.ReLU(), nn.Linear(64, num_actions))
    optimizer = torch.optim.Adam(policy.parameters(), LEARNING_RATE)
    accuracies: list[float] = []
    with rw.ReplayDataset(address, "offline", BATCH_SIZE) as dataset:
        for _, batch in zip(range(num_batches), dataset.as_torch(), strict=False):
            found = rw.to_transitions(batch)
            logits = policy(found.observation[found.mask].float())
            actions = found.action[found.mask]
            optimizer.zero_grad()
            nn.functional.cross_entropy(logits, actions).backward()
            optimizer.step()
            accuracies.append(float((logits.argmax(1) == actions).float().mean()))
    return policy, float(np.mean(accuracies[-10:]))


def evaluate(env: Any, policy: Any, num_episodes: int = 10) -> float:
    """Return the mean return of episodes in which the policy acts."""
    total = 0.0
    for episode in range(num_episodes):
        (observation, _), over = env.reset(seed=episode), False
        while not over:
            with torch.no_grad():
                action = int(policy(torch.as_tensor(observation).float()).argmax())
            observation, reward, terminated, truncated, _ = env.step(action)
            total, over = total + float(reward), terminated or truncated
    return total / num_episodes


def main(path: Path, num_batches: int = 1500) -> None:
    """Learn from a data set, and print the policy's return in its environment."""
    data = minari.MinariDataset(str(path / "data" if (path / "data").is_dir() else path))
    env = data.recover_environment()
    with rw.LocalServer([TABLE]) as server:
        num_steps = fill(server.address, data)
        sizes = env.observation_space.shape[0], int(env.action_space.n)
        policy, accuracy = imitate(server.address, num_batches, *sizes)
    print(f"{num_steps} steps, {accuracy:.0%} of the actions, mean return {evaluate(env, policy):.0f}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
