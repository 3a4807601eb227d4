"""DQN in the style of Ape-X (Horgan et al., 2018) on CartPole: a learner, and actors that explore more or less.

    python examples/apex_dqn.py                                        # processes and a server on this machine
    python examples/apex_dqn.py --ray apex --shards 4 --python /opt/replay/bin/python --checkpoints /shared/replay

The second line is the same program on a Ray cluster: `on_ray` differs from `on_laptop` by ten lines. In plain NumPy.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import multiprocessing
import sys
from collections.abc import Generator, Sequence
from itertools import pairwise
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt

import reverb_writer as rw

Array = npt.NDArray[Any]

N_STEP, GAMMA, BATCH_SIZE, LEARNING_RATE, TARGET_RATE = 3, 0.99, 64, 1e-3, 0.01
PUBLISH_EVERY, EVALUATE_EVERY = 20, 100
SIZES = (4, 128, 128, 2)  # layers of the network: an observation, two hidden layers, the values of the actions
TABLES = [
    # Actors and learner wait for each other: a window is sampled eight times on average.
    rw.TableConfig("replay", 50_000, rw.Prioritized(0.6), rate_limiter=rw.SampleToInsertRatio(8, 500, 3_000)),
    rw.TableConfig.variables("variables"),  # each shard has a table of weights
]


def act(source: Any, number: int, num_actors: int) -> None:
    """Play until the learner ends the run; the first actor explores most."""
    rng = np.random.default_rng(number)
    epsilon = 0.4 ** (1 + 7 * number / max(1, num_actors - 1))
    network = QNetwork(rng)
    newest: dict[str, Any] = {}
    with (
        contextlib.suppress(rw.errors.FinishedError),  # the run has ended while a step waited for the rate limiter
        rw.Variables(source, "variables") as variables,
        rw.TrajectoryObserver(
            source,
            "replay",
            N_STEP + 1,
            end_of_episode="tile",
            # A new window gets the largest priority, so the learner soon samples it and corrects its priority.
            priority=lambda _: float(newest["priority"]),
            until=lambda: variables.finished,
        ) as observer,
    ):
        newest.update(variables.latest())
        env = rw.environments.record(gymnasium.make("CartPole-v1"), observer)
        observation, _ = env.reset(seed=number)
        while not variables.finished:
            newest.update(variables.poll({}))
            network.weights = newest["weights"]
            greedy = rng.random() >= epsilon
            action = int(network(observation).argmax()) if greedy else int(rng.integers(2))
            observation, _, terminated, truncated, _ = env.step(action)
            if terminated or truncated:
                observation, _ = env.reset()


def learn(source: Any, num_updates: int, seed: int = 0) -> Generator[tuple[int, float], None, None]:
    """Yield the number of updates, and the length of an episode without exploration."""
    online = QNetwork(np.random.default_rng(seed))
    target = copy.deepcopy(online)
    optimizer = Adam(online.weights, LEARNING_RATE)
    with (
        rw.Variables(source, "variables") as variables,
        rw.ReplayDataset(source, "replay", BATCH_SIZE, timeout_s=120.0) as batches,  # a cluster may start actors late
        contextlib.ExitStack() as end,
    ):
        end.callback(variables.finish)  # the actors end even if the goal is reached before the last update
        largest = 1.0
        variables.publish({"weights": online.weights, "priority": np.array(largest)})
        transitions = batches.transitions(N_STEP, GAMMA)
        for update in range(1, num_updates + 1):
            first = next(transitions)
            best = online(first.next_observation).argmax(-1, keepdims=True)
            following = np.take_along_axis(target(first.next_observation), best, -1)[:, 0]
            targets = first.reward + GAMMA * first.discount * following
            errors = np.take_along_axis(online(first.observation), first.action[:, None], -1)[:, 0] - targets
            real = first.mask
            gradients = online.gradient(first.observation[real], first.action[real], targets[real])
            optimizer.descend(online.weights, gradients)
            priorities = np.abs(errors) * real + 1e-3
            largest = max(largest, float(priorities.max()))
            batches.update_priorities(first.batch, priorities)
            for slow, fast in zip(target.weights, online.weights, strict=True):
                slow[:] += TARGET_RATE * (fast - slow)
            if update % PUBLISH_EVERY == 0:
                variables.publish({"weights": online.weights, "priority": np.array(largest)})
            if update % EVALUATE_EVERY == 0:
                yield update, evaluate(online)


def evaluate(network: QNetwork) -> float:
    """Return the mean length of three episodes."""
    env, num_steps = gymnasium.make("CartPole-v1"), 0
    for seed in range(3):
        observation, _ = env.reset(seed=seed)
        is_over = False
        while not is_over:
            observation, _, terminated, truncated, _ = env.step(int(network(observation).argmax()))
            is_over = terminated or truncated
            num_steps += 1
    return num_steps / 3


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


@contextlib.contextmanager
def on_laptop(num_actors: int) -> Generator[str, None, None]:
    """Run a server in this process, and actors in separate processes, within the block."""
    with rw.LocalServer(TABLES) as server:
        source = server.address
        context = multiprocessing.get_context("spawn")
        actors = [
            context.Process(target=act, args=(source, number, num_actors), daemon=True) for number in range(num_actors)
        ]
        for actor in actors:
            actor.start()
        yield source
        for actor in actors:
            actor.join()


@contextlib.contextmanager
def on_ray(num_actors: int, name: str, shards: int, **options: Any) -> Generator[Any, None, None]:
    """Run shards and actors on a Ray cluster within the block."""
    import ray

    from reverb_writer.ray import ReplayCluster

    with ReplayCluster.start(name, TABLES, shards, **options) as cluster:
        source = cluster.target()
        task = ray.remote(num_cpus=0, max_retries=-1)(act)  # Ray restarts an actor if its node is lost
        actors = [task.remote(source, number, num_actors) for number in range(num_actors)]
        try:
            yield source
        finally:
            for actor in actors:
                ray.cancel(actor, force=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Learn CartPole by DQN with many actors.")
    parser.add_argument("--actors", type=int, default=4)
    parser.add_argument("--updates", type=int, default=20_000)
    parser.add_argument("--goal", type=float, default=300.0, help="stop at this length of an episode")
    parser.add_argument("--ray", metavar="NAME", help="name of a cluster on Ray; by default all is on this machine")
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--python", default=sys.executable, help="interpreter of the servers, on every node")
    parser.add_argument("--checkpoints", metavar="DIR", help="folder of checkpoints that every node reaches")
    given = parser.parse_args()
    options = {"python": given.python, "checkpoints": given.checkpoints}
    where = on_ray(given.actors, given.ray, given.shards, **options) if given.ray else on_laptop(given.actors)
    with where as source, contextlib.closing(learn(source, given.updates)) as lengths:
        for update, length in lengths:
            print(f"{update:6} updates: {length:6.0f}", flush=True)
            if length >= given.goal:
                break


if __name__ == "__main__":
    main()
