"""DQN on CartPole with an actor and a learner in two processes; the table's rate limiter keeps their ratio.

    python examples/dqn_split.py

    actor --steps--> table `replay` --batches--> learner --weights--> table `variables` --> actor
    actor --returns of episodes--> table `returns` --> a line per eighth of the run

Each transition is sampled eight times on average. If the learner is late, the actor waits; if the actor is late, the
learner waits. So the actor plays with weights that are only a few hundred steps old. After its last update the learner
ends the run, and the actor ends. In plain NumPy.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import math
import multiprocessing
from collections.abc import Iterator, Sequence
from itertools import islice, pairwise
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt

import reverb_writer as rw

Array = npt.NDArray[Any]

N_STEP, GAMMA, BATCH_SIZE, LEARNING_RATE, TARGET_RATE = 3, 0.99, 64, 1e-3, 0.01
SAMPLES_PER_STEP = 8
PUBLISH_EVERY = 10  # updates
EXPLORING_STEPS, EXPLORATION = 5_000, 0.05  # the share of random actions falls over these steps to this share
NUM_PARTS = 8  # of a run: each prints its mean return
SIZES = (4, 128, 128, 2)  # layers of the network: an observation, two hidden layers, the values of the actions
RATIO = rw.SampleToInsertRatio(SAMPLES_PER_STEP, min_size=500, error_buffer=800)
TABLES = [
    rw.TableConfig("replay", 50_000, rate_limiter=RATIO),
    rw.TableConfig.variables("variables"),
    rw.TableConfig.returns("returns"),
]


def act(address: str, seed: int) -> None:
    """Play with the learner's weights until the run ends."""
    rng = np.random.default_rng(seed)
    network = QNetwork(rng)
    num_steps = 0
    with (
        contextlib.suppress(rw.errors.FinishedError),  # the run has ended while a step waited for the rate limiter
        rw.Variables(address, "variables") as variables,
        rw.EpisodeReturns(address, "returns") as returns,
        rw.TrajectoryObserver(
            address, "replay", N_STEP + 1, end_of_episode="tile", until=lambda: variables.finished
        ) as observer,
    ):
        env = rw.environments.record(gymnasium.make("CartPole-v1"), observer)
        network.weights = variables.latest()
        observation, _ = env.reset(seed=seed)
        while not variables.finished:
            network.weights = variables.poll(network.weights)
            is_random = rng.random() < max(EXPLORATION, 1 - num_steps / EXPLORING_STEPS)
            action = int(rng.integers(2)) if is_random else int(network(observation).argmax())
            observation, reward, terminated, truncated, _ = env.step(action)
            returns.add(reward, terminated or truncated)
            num_steps += 1
            if terminated or truncated:
                observation, _ = env.reset()


def learn(address: str, num_updates: int, seed: int) -> Iterator[int]:
    """Learn, and publish the weights; yield the number of each update. Then end the run."""
    online = QNetwork(np.random.default_rng(seed))
    target = copy.deepcopy(online)
    optimizer = Adam(online.weights, LEARNING_RATE)
    with rw.Variables(address, "variables") as variables, rw.ReplayDataset(address, "replay", BATCH_SIZE) as dataset:
        variables.publish(online.weights)
        for update, found in enumerate(islice(dataset.transitions(N_STEP, GAMMA), num_updates), start=1):
            real = found.mask  # a window's first transition counts, unless the window begins at a boundary step
            following = found.next_observation[real]
            best = online(following).argmax(axis=-1)  # double Q-learning: `online` chooses, `target` evaluates
            values = target(following)[np.arange(len(best)), best]
            targets = found.reward[real] + GAMMA * found.discount[real] * values
            gradient = online.gradient(found.observation[real], found.action[real], targets)
            optimizer.descend(online.weights, gradient)
            for slow, fast in zip(target.weights, online.weights, strict=True):
                slow[:] += TARGET_RATE * (fast - slow)
            if update % PUBLISH_EVERY == 0:
                variables.publish(online.weights)
            yield update
        variables.finish()


def run(num_steps: int, seed: int = 0) -> Iterator[list[float]]:
    """Learn while an actor plays about `num_steps` steps in another process.

    Yield the returns of the episodes of each eighth of the run.
    """
    num_updates = num_steps * SAMPLES_PER_STEP // BATCH_SIZE
    ends = {num_updates * part // NUM_PARTS for part in range(1, NUM_PARTS)}
    context = multiprocessing.get_context("spawn")  # gRPC does not survive a fork
    with rw.LocalServer(TABLES) as server, rw.EpisodeReturns(server, "returns") as returns:
        actor = context.Process(target=act, args=(server.address, seed), daemon=True)
        actor.start()
        for update in learn(server.address, num_updates, seed):
            if update in ends:
                yield returns.read()[0].tolist()
        actor.join()
        yield returns.read()[0].tolist()


class QNetwork:
    """The values of all actions, [..., actions], given observations [..., features].

    `weights` has the matrix and the bias of each layer. To copy a network, assign its weights.
    """

    def __init__(self, rng: np.random.Generator, sizes: Sequence[int] = SIZES) -> None:
        """Draw weights that keep the variance of the signal from layer to layer (He et al., 2015)."""
        self.weights: list[Array] = []
        for rows, columns in pairwise(sizes):
            matrix = rng.normal(0.0, np.sqrt(2.0 / rows), (rows, columns))
            self.weights += [matrix.astype(np.float32), np.zeros(columns, np.float32)]

    def __call__(self, observations: Array) -> Array:
        """Return the values."""
        return self._layers(observations)[-1]

    def gradient(self, observations: Array, actions: Array, targets: Array) -> list[Array]:
        """Return the gradient of the mean Huber loss, in the order of `weights`.

        Args:
            observations: [N, features].
            actions: [N], the actions that were taken.
            targets: [N], the targets of their values.
        """
        *inputs, values = self._layers(observations)
        taken = np.arange(len(actions)), actions
        errors = np.zeros_like(values)
        errors[taken] = np.clip(values[taken] - targets, -1.0, 1.0) / len(actions)
        gradients = []
        for layer, matrix in zip(reversed(inputs), self.weights[-2::-2], strict=True):
            gradients += [errors.sum(axis=0), layer.T @ errors]
            errors = (errors @ matrix.T) * (layer > 0)
        return gradients[::-1]

    def _layers(self, observations: Array) -> list[Array]:
        """Return the observations, the hidden layers and the values."""
        *hidden, last = zip(self.weights[::2], self.weights[1::2], strict=True)
        layers = [observations]
        for matrix, bias in hidden:
            layers.append(np.maximum(layers[-1] @ matrix + bias, 0.0))
        matrix, bias = last
        return [*layers, layers[-1] @ matrix + bias]


class Adam:
    """Gradient descent with a step size per weight (Kingma and Ba, 2015)."""

    def __init__(self, weights: Sequence[Array], learning_rate: float) -> None:
        """Begin without earlier gradients."""
        self._learning_rate = learning_rate
        self._num_steps = 0
        self._means = [np.zeros_like(weight) for weight in weights]
        self._squares = [np.zeros_like(weight) for weight in weights]

    def descend(self, weights: Sequence[Array], gradients: Sequence[Array]) -> None:
        """Move the weights one step, in place."""
        self._num_steps += 1
        bias = np.sqrt(1.0 - 0.999**self._num_steps) / (1.0 - 0.9**self._num_steps)
        for weight, gradient, mean, square in zip(weights, gradients, self._means, self._squares, strict=True):
            mean[:] += 0.1 * (gradient - mean)
            square[:] += 0.001 * (gradient**2 - square)
            weight[:] -= self._learning_rate * bias * mean / (np.sqrt(square) + 1e-7)


def main() -> None:
    parser = argparse.ArgumentParser(description="Learn CartPole with an actor process and a learner process.")
    parser.add_argument("--steps", type=int, default=30_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    for part, returns in enumerate(run(given.steps, given.seed), start=1):
        mean = sum(returns) / len(returns) if returns else math.nan
        print(f"part {part} of {NUM_PARTS}: {len(returns)} episodes, mean return {mean:.0f}", flush=True)


if __name__ == "__main__":
    main()
