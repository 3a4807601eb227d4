"""A recurrent network runs over flat slices, in NumPy: it learns to remember a cue.

    python examples/recurrent_slices.py

The first observation of an episode is the cue, -1 or 1; all others are 0. An action is right, and rewarded, if it is
the cue. One action in five is random, so at best 0.9 of the actions are right; without memory about half are. Episodes
have 4 to 10 steps and slices at most 5, so most slices begin in the middle of an episode, where only the state contains
the cue. The actor stores the state before each step. The learner runs over the rows of all slices at once, and takes
the stored state wherever a slice starts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

import reverb_writer as rw

HIDDEN, NUM_SLICES, SLICE_LEN, EPISODES_PER_UPDATE = 8, 32, 5, 2
LEARNING_RATE, EXPLORE = 0.2, 0.2
TABLE = rw.TableConfig("episodes", 1000)


class Network:
    """State h' = tanh(A x + B h), and values C h' of the two actions."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.a, self.b, self.c = (rng.normal(0, 0.5, shape) for shape in ((1, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, 2)))

    def step(self, observation: Any, state: Any) -> Any:
        """Return the state after an observation [1] and a state [H]."""
        return np.tanh(observation @ self.a + state @ self.b)

    def run(self, observations: Any, starts: Any, stored: Any) -> tuple[Any, Any]:
        """Return the states before and after each row, [N, H], of flat rows of any number of slices."""
        before, after = np.empty_like(stored), np.empty_like(stored)
        for row in range(len(stored)):
            before[row] = stored[row] if starts[row] else after[row - 1]
            after[row] = self.step(observations[row], before[row])
        return before, after

    def learn(self, observations: Any, starts: Any, stored: Any, actions: Any, targets: Any) -> None:
        """Move the values of actions [N] towards targets [N]: gradients go backwards to the first row of each slice."""
        before, after = self.run(observations, starts, stored)
        slopes = (after @ self.c - targets[:, None]) * (actions[:, None] == np.arange(2)) / len(actions)
        inner, later = np.zeros_like(after), np.zeros(HIDDEN)
        for row in reversed(range(len(after))):
            inner[row] = (slopes[row] @ self.c.T + later) * (1 - after[row] ** 2)
            later = np.zeros(HIDDEN) if starts[row] else inner[row] @ self.b.T
        self.a -= LEARNING_RATE * observations.T @ inner
        self.b -= LEARNING_RATE * before.T @ inner
        self.c -= LEARNING_RATE * after.T @ slopes


def play(observer: rw.EpisodeObserver, network: Network, rng: np.random.Generator, explore: float) -> float:
    """Write an episode; return the share of its actions that were right."""
    cue, length, state, rewards = rng.choice([-1, 1]), rng.integers(4, 11), np.zeros(HIDDEN), []
    for t in range(length):
        observation = np.array([cue if t == 0 else 0], float)
        following = network.step(observation, state)
        action = rng.integers(2) if rng.random() < explore else np.argmax(following @ network.c)
        rewards.append(float((-1, 1)[action] == cue))
        step = {"observation": observation, "state": state, "action": action, "reward": rewards[-1]}
        observer(step, truncated=t == length - 1)  # nothing is observed after the last action
        state = following
    return sum(rewards) / len(rewards)


def learn(address: str, num_updates: int, seed: int = 0) -> Iterator[float]:
    """Yield after each update the share of right actions in the last episodes."""
    rng = np.random.default_rng(seed)
    network = Network(rng)
    with (
        rw.EpisodeObserver(address, "episodes", max_sequence_length=10) as observer,
        rw.SliceDataset(address, "episodes", NUM_SLICES, SLICE_LEN, seed=seed, max_in_flight_batches=1) as dataset,
    ):
        for _ in range(num_updates):
            shares = [play(observer, network, rng, EXPLORE) for _ in range(EPISODES_PER_UPDATE)]
            observer.flush()
            batch = next(dataset)
            data = batch.data  # leaves [N, ...], N <= NUM_SLICES x SLICE_LEN
            network.learn(data["observation"], batch.slices.starts, data["state"], data["action"], data["reward"])
            yield sum(shares) / len(shares)


if __name__ == "__main__":
    with rw.LocalServer([TABLE]) as server:
        shares = list(learn(server.address, 250))
    for start in range(0, 250, 50):
        share = np.mean(shares[start : start + 50])
        print(f"updates {start:3} to {start + 49:3}: {share:.3f} of the actions were right")
