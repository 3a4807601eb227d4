"""A learner, an actor and a local server in one process, beside the same program on arrays of its own.

The program is like CleanRL's DQN: a step of the environment, an action from a network, and after every tenth step a
batch of 128 and an update. The network is PyTorch's, with one thread. If PyTorch is not installed, NumPy does the same
work in less time, so the replay's share of the time is larger.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import time
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt

import reverb_writer as rw
from benchmarks.comparison import Effort, progress
from benchmarks.report import Table

_BATCH_SIZE, _TRAIN_EVERY, _CAPACITY = 128, 10, 10_000
_TURN_STEPS, _TURN_BATCHES = 1_000, 200
_MIN_TURNS = 5
_WINDOW = 4  # steps of the row of batches

_SIZES = 4, 120, 84, 2  # of the network's layers

Array = npt.NDArray[Any]
_HAS_TORCH = importlib.util.find_spec("torch") is not None
_AT_LEAST, _MAX_BATCH_MS, _MAX_STEP_US = 0.6, 0.3, 15.0


class _TorchNetwork:
    """CleanRL's network, loss and optimizer."""

    def __init__(self) -> None:
        import torch  # may be missing

        torch.set_num_threads(1)
        layers: list[Any] = []
        for sizes in itertools.pairwise(_SIZES):
            layers += torch.nn.Linear(*sizes), torch.nn.ReLU()
        self._torch, self._layers = torch, torch.nn.Sequential(*layers[:-1])
        self._optimizer = torch.optim.Adam(self._layers.parameters(), lr=1e-7)

    def action(self, observation: Array) -> int:
        """Return the best action."""
        return int(self._layers(self._torch.as_tensor(observation[None])).argmax(1)[0])

    def train(
        self, observations: Array, actions: Array, next_observations: Array, rewards: Array, go_on: Array
    ) -> None:
        """Make an update."""
        torch = self._torch
        with torch.no_grad():
            following = self._layers(torch.as_tensor(next_observations)).max(1).values
            targets = torch.as_tensor(rewards) + 0.99 * torch.as_tensor(go_on) * following
        values = self._layers(torch.as_tensor(observations)).gather(1, torch.as_tensor(actions)[:, None])[:, 0]
        self._optimizer.zero_grad()
        torch.nn.functional.mse_loss(values, targets).backward()
        self._optimizer.step()


class _NumpyNetwork:
    """The matrix products of CleanRL's network, forth and back, with their ReLUs, and an update of Adam."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.weights = [rng.normal(0, 0.1, size).astype(np.float32) for size in itertools.pairwise(_SIZES)]
        self._moments = [(np.zeros_like(one), np.zeros_like(one)) for one in self.weights]

    def action(self, observation: Array) -> int:
        """Return the best action."""
        return int(self.values(observation[None])[-1].argmax(1)[0])

    def values(self, observations: Array) -> list[Array]:
        """Return the activations of all layers."""
        layers = [observations]
        for number, weight in enumerate(self.weights):
            product = layers[-1] @ weight
            layers.append(np.maximum(product, 0) if number < len(self.weights) - 1 else product)
        return layers

    def train(
        self, observations: Array, actions: Array, next_observations: Array, rewards: Array, go_on: Array
    ) -> None:
        """Make an update."""
        targets = rewards + 0.99 * go_on * self.values(next_observations)[-1].max(1)
        layers = self.values(observations)
        rows = np.arange(len(actions))
        slope = np.zeros_like(layers[-1])
        slope[rows, actions] = 2 * (layers[-1][rows, actions] - targets) / len(rows)
        for number in reversed(range(len(self.weights))):
            gradient = layers[number].T @ slope
            slope = (slope @ self.weights[number].T) * (layers[number] > 0)
            first, second = self._moments[number]
            first *= 0.9
            first += 0.1 * gradient
            second *= 0.999
            second += 0.001 * gradient**2
            self.weights[number] -= 1e-7 * first / (np.sqrt(second) + 1e-8)


def _network() -> _TorchNetwork | _NumpyNetwork:
    return _TorchNetwork() if _HAS_TORCH else _NumpyNetwork()


class _OwnBuffer:
    """The ring of arrays that such a program has otherwise: that of Stable-Baselines3, for one environment."""

    def __init__(self) -> None:
        self._observations, self._next = (np.zeros((_CAPACITY, 1, 4), np.float32) for _ in range(2))
        self._actions = np.zeros((_CAPACITY, 1, 1), np.int64)
        self._rewards, self._dones = (np.zeros((_CAPACITY, 1), np.float32) for _ in range(2))
        self._at = self._size = 0

    def add(self, observation: Any, action: int, next_observation: Any, reward: float, *, done: bool) -> None:
        at = self._at
        self._observations[at] = np.array(observation)
        self._next[at] = np.array(next_observation)
        self._actions[at], self._rewards[at], self._dones[at] = action, reward, done
        self._at, self._size = (at + 1) % _CAPACITY, min(self._size + 1, _CAPACITY)

    def sample(self) -> tuple[Array, Array, Array, Array, Array]:
        rows = np.random.randint(0, self._size, size=_BATCH_SIZE)  # noqa: NPY002  # as it does
        envs = np.random.randint(0, 1, size=_BATCH_SIZE)  # noqa: NPY002
        observations, following = self._observations[rows, envs], self._next[rows, envs]
        return (
            observations,
            self._actions[rows, envs, 0],
            following,
            self._rewards[rows, envs],
            1 - self._dones[rows, envs],
        )


class _OnArrays:
    """The program with a buffer of its own."""

    def __init__(self) -> None:
        self._env, self._network, self._buffer = gymnasium.make("CartPole-v1"), _network(), _OwnBuffer()
        self._observation, _ = self._env.reset(seed=0)
        self._num_steps = 0

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            action = self._network.action(self._observation)
            following, reward, terminated, truncated, _ = self._env.step(action)
            self._buffer.add(self._observation, action, following, float(reward), done=terminated)
            self._observation = self._env.reset()[0] if terminated or truncated else following
            self._num_steps += 1
            if self._num_steps > _BATCH_SIZE and self._num_steps % _TRAIN_EVERY == 0:
                self._network.train(*self._buffer.sample())


class _OnServer:
    """The same program with an observer and a dataset."""

    def __init__(self, address: str, stack: contextlib.ExitStack) -> None:
        self._network = _network()
        observer = stack.enter_context(rw.TrajectoryObserver(address, "replay", 2))
        self._env = rw.environments.record(gymnasium.make("CartPole-v1"), observer)
        dataset = stack.enter_context(rw.ReplayDataset(address, "replay", _BATCH_SIZE))
        self._batches = dataset.transitions()
        self._observation, _ = self._env.reset(seed=0)
        self._num_steps = 0

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            action = self._network.action(self._observation)
            following, _, terminated, truncated, _ = self._env.step(action)
            self._observation = self._env.reset()[0] if terminated or truncated else following
            self._num_steps += 1
            if self._num_steps > _BATCH_SIZE and self._num_steps % _TRAIN_EVERY == 0:
                batch = next(self._batches)
                self._network.train(
                    batch.observation, batch.action, batch.next_observation, batch.reward, batch.discount
                )


def one_process(effort: Effort) -> Table:
    """A program like CleanRL's DQN on a local server of its own process, beside its own array buffer."""
    tables = [rw.TableConfig("replay", _CAPACITY), rw.TableConfig("windows", _CAPACITY)]
    with rw.LocalServer(tables) as server, contextlib.ExitStack() as stack:
        arrays, ours = _OnArrays(), _OnServer(server.address, stack)
        speeds = _in_turn({"arrays": arrays.run, "ours": ours.run}, _TURN_STEPS, effort)
        share = float(np.median(speeds["arrays"] / speeds["ours"]))
        batch_ms = _batch_ms(server.address, effort)
        step_us, bare_us = _step_us(server.address, effort)
    rows = [
        ["DQN on its own arrays", f"{1 / np.median(speeds['arrays']):,.0f} steps/s", ""],
        ["DQN on a local server", f"{1 / np.median(speeds['ours']):,.0f} steps/s", ""],
        ["of the arrays' speed", f"{share:.2f}", _asked(share >= _AT_LEAST, f">= {_AT_LEAST}")],
        [
            f"a batch of {_BATCH_SIZE} windows of {_WINDOW} steps",
            f"{batch_ms:.2f} ms",
            _asked(batch_ms <= _MAX_BATCH_MS, f"<= {_MAX_BATCH_MS} ms"),
        ],
        [
            "what recording adds to a step",
            f"{step_us:.1f} us",
            _asked(step_us <= _MAX_STEP_US, f"<= {_MAX_STEP_US:g} us"),
        ],
        ["the step alone", f"{bare_us:.1f} us", ""],
    ]
    library = "PyTorch" if _HAS_TORCH else "NumPy; the interpreter of .venv-frameworks has PyTorch"
    note = f"CPU time of all threads of the process, turns that alternate, the median. The network is {library}."
    return Table("A program and its replay in one process", ["", "", "required"], rows, note)


def _asked(is_met: bool, text: str) -> str:
    return text if is_met else f"{text}: missed"


def _batch_ms(address: str, effort: Effort) -> float:
    """Return how long a learner that does nothing else waits for a batch."""
    with rw.TrajectoryObserver(address, "windows", _WINDOW) as observer:
        env = rw.environments.record(gymnasium.make("CartPole-v1"), observer)
        _play(env)(_CAPACITY)
        env.close()
    with rw.ReplayDataset(address, "windows", _BATCH_SIZE) as dataset:
        times = _in_turn({"batch": lambda n: [next(dataset) for _ in range(n)]}, _TURN_BATCHES, effort)["batch"]
    return 1e3 * float(np.median(times))


def _step_us(address: str, effort: Effort) -> tuple[float, float]:
    """Return what an observer adds to a step of CartPole, all threads together, and what the step takes without it."""
    with rw.TrajectoryObserver(address, "windows", _WINDOW) as observer:
        bare, recorded = gymnasium.make("CartPole-v1"), rw.environments.record(gymnasium.make("CartPole-v1"), observer)
        times = _in_turn({"bare": _play(bare), "recorded": _play(recorded)}, _TURN_STEPS, effort)
        recorded.close()
    added = float(np.median(times["recorded"] - times["bare"]))
    return 1e6 * added, 1e6 * float(np.median(times["bare"]))


def _play(env: gymnasium.Env[Any, Any]) -> Callable[[int], None]:
    env.reset(seed=0)

    def play(num_steps: int) -> None:
        for number in range(num_steps):
            _, _, terminated, truncated, _ = env.step(number & 1)
            if terminated or truncated:
                env.reset()

    return play


def _in_turn(works: dict[str, Callable[[int], object]], count: int, effort: Effort) -> dict[str, Array]:
    """Return the seconds of one piece of work in each turn, A B A B ...; the first turn warms up."""
    times: dict[str, list[float]] = {name: [] for name in works}
    end = time.perf_counter() + effort.rounds * effort.seconds
    while time.perf_counter() < end or min(map(len, times.values())) <= _MIN_TURNS:
        for name, work in works.items():
            start = time.process_time()
            work(count)
            times[name].append((time.process_time() - start) / count)
    for name, of in times.items():
        progress(f"{name}: {1e6 * float(np.median(of[1:])):.1f} us, the median of {len(of) - 1} turns")
    return {name: np.array(of[1:]) for name, of in times.items()}
