"""Recurrent minibatches of a storage, in NumPy: PPO learns to remember a cue.

    python examples/recurrent_rollouts.py

The first observation of an episode is the cue, -1 or 1; all others are 0. An action is right if it is the cue. Random
actions are right in half of the steps, a policy without memory in 5 of 8. Rollouts are longer than episodes, so each
column of the storage has several trajectories. Minibatches separate the trajectories, each with its initial state.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from reverb_writer.rollouts import RolloutStorage, unpad_trajectories

NUM_ENVS, NUM_STEPS, EPISODE, HIDDEN = 64, 10, 4, 8
GAMMA, LAM, CLIP, LEARNING_RATE = 0.5, 0.9, 0.2, 0.5


class Policy:
    """A recurrent network: h' = tanh(A x + B h). The action is 1 with the probability sigmoid(c h')."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.weights = [rng.normal(0, 0.5, shape) for shape in ((1, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, 1))]

    def __call__(self, observations: Any, states: Any) -> tuple[Any, Any]:
        """Return probabilities [T, n, 1] and states [T + 1, n, H] of observations [T, n, 1] and states [n, H]."""
        a, b, c = self.weights
        found = [states]
        for row in observations:
            found.append(np.tanh(row @ a + found[-1] @ b))
        return 1 / (1 + np.exp(-np.stack(found[1:]) @ c)), np.stack(found)

    def ascend(self, observations: Any, states: Any, slopes: Any) -> None:
        """Change the weights by backpropagation through time, given the slopes [T, n, 1] of the objective in c h'."""
        _, b, c = self.weights
        gradients, later = [np.zeros_like(weight) for weight in self.weights], np.zeros_like(states[0])
        for t in reversed(range(len(slopes))):
            gradients[2] += states[t + 1].T @ slopes[t]
            inner = (slopes[t] @ c.T + later) * (1 - states[t + 1] ** 2)
            gradients[0] += observations[t].T @ inner
            gradients[1] += states[t].T @ inner
            later = inner @ b.T
        self.weights = [w + LEARNING_RATE * gradient for w, gradient in zip(self.weights, gradients, strict=True)]


def learn(num_rollouts: int, seed: int = 0) -> Iterator[float]:
    """Yield the share of right actions of each rollout, and learn from it."""
    rng = np.random.default_rng(seed)
    policy, storage = Policy(rng), RolloutStorage(NUM_ENVS, NUM_STEPS, 1, None, 1, seed=seed)
    ages, cues = rng.integers(EPISODE, size=NUM_ENVS), rng.choice([-1, 1], NUM_ENVS)
    states, baseline = np.zeros((NUM_ENVS, HIDDEN)), np.full((NUM_ENVS, 1), 0.5 / (1 - GAMMA))
    for _ in range(num_rollouts):
        storage.clear()
        for _ in range(NUM_STEPS):
            observations = np.where(ages == 0, cues, 0)[:, None]
            probabilities, (_, following) = policy(observations[None], states)
            actions = rng.random((NUM_ENVS, 1)) < probabilities[0]
            right, dones = np.where(actions[:, 0], 1, -1) == cues, ages == EPISODE - 1
            transition = storage.Transition(observations, None, actions, right, dones, baseline)
            transition.actions_log_prob = np.log(np.where(actions, probabilities[0], 1 - probabilities[0]))
            transition.action_mean = transition.action_sigma = probabilities[0]
            transition.hidden_states = states[None]  # [layers, B, H], before the step
            storage.add_transitions(transition)
            states = np.where(dones[:, None], 0, following)
            ages, cues = np.where(dones, 0, ages + 1), np.where(dones, rng.choice([-1, 1], NUM_ENVS), cues)
        yield float(storage.rewards.mean())
        storage.compute_returns(baseline, GAMMA, LAM)
        for batch in storage.recurrent_mini_batch_generator(num_mini_batches=4, num_epochs=4, shuffle=True):
            probabilities, found = policy(batch.obs, batch.hidden_states[0])  # padded: [T, n, 1]
            ones = unpad_trajectories(probabilities, batch.masks)  # [T, b, 1], as the actions
            ratio = np.where(batch.actions, ones, 1 - ones) / np.exp(batch.old_actions_log_prob)
            is_clipped = np.where(batch.advantages > 0, ratio > 1 + CLIP, ratio < 1 - CLIP)
            slopes = np.where(is_clipped, 0, ratio * batch.advantages * (batch.actions - ones)) / ratio.size
            padded = np.zeros_like(probabilities)  # in PyTorch, gradients would flow through `unpad_trajectories`
            padded.swapaxes(0, 1)[batch.masks.T] = slopes.swapaxes(0, 1).reshape(-1, 1)
            policy.ascend(batch.obs, found, padded)


if __name__ == "__main__":
    for number, share in enumerate(learn(40), 1):
        print(f"{number:4} rollouts: {share:.3f} of the actions were right")
