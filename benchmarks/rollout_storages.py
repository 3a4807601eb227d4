"""Rollouts of legged-robot training, [T=24, B=4096]: ours on NumPy and on PyTorch's CPU, and PyTorch used plainly.

The plain version is what one writes from the papers: a backward loop for GAE, a permutation and `x[rows]` for
minibatches, `split` and `pad_sequence` for trajectories. All take their turn in one process.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from benchmarks.comparison import Effort, progress
from benchmarks.report import Table, ratio
from reverb_writer.rollouts import RolloutStorage

T, B, NUM_OBSERVATIONS, NUM_ACTIONS = 24, 4096, 48, 12
NUM_MINI_BATCHES, NUM_EPOCHS = 4, 5
GAMMA, LAM = 0.99, 0.95


class Rollout:
    """The same random rows for all contenders; an episode ends in every 50th row."""

    def __init__(self) -> None:
        """Draw them."""
        rng = np.random.default_rng(0)
        self.observations = rng.normal(size=(T, B, NUM_OBSERVATIONS)).astype(np.float32)
        self.actions = rng.normal(size=(T, B, NUM_ACTIONS)).astype(np.float32)
        self.rewards, self.values = rng.normal(size=(2, T, B, 1)).astype(np.float32)
        self.dones = (rng.random((T, B, 1)) < 1 / 50).astype(np.uint8)
        self.last_values = rng.normal(size=(B, 1)).astype(np.float32)

    def storage(self, device: Any) -> RolloutStorage:
        """Return one of ours that has them, its returns computed."""
        storage = RolloutStorage(B, T, NUM_OBSERVATIONS, None, NUM_ACTIONS, device=device)
        for t in range(T):
            storage.add_transitions(
                storage.Transition(
                    observations=self.observations[t],
                    actions=self.actions[t],
                    rewards=self.rewards[t],
                    dones=self.dones[t],
                    values=self.values[t],
                    actions_log_prob=self.values[t],
                    action_mean=self.actions[t],
                    action_sigma=self.actions[t],
                )
            )
        return storage


class Plain:
    """A rollout in PyTorch, written down plainly."""

    def __init__(self, rollout: Rollout) -> None:
        """Make tensors."""
        import torch
        from torch.nn.utils.rnn import pad_sequence

        self._torch, self._pad_sequence = torch, pad_sequence
        self.observations, self.actions, self.rewards, self.values, self.dones, self.last_values = map(
            torch.as_tensor,
            (
                rollout.observations,
                rollout.actions,
                rollout.rewards,
                rollout.values,
                rollout.dones,
                rollout.last_values,
            ),
        )
        self.advantages = self.returns = self.values
        self.columns = [self.actions, self.values, self.values, self.values, self.values, self.actions, self.actions]

    def compute_returns(self) -> None:
        """GAE by a backward loop, then normalized."""
        advantage, returns = 0.0, self._torch.empty_like(self.values)
        for t in reversed(range(T)):
            following = self.last_values if t == T - 1 else self.values[t + 1]
            goes_on = 1.0 - self.dones[t].float()
            error = self.rewards[t] + GAMMA * goes_on * following - self.values[t]
            advantage = error + GAMMA * LAM * goes_on * advantage
            returns[t] = advantage + self.values[t]
        advantages = returns - self.values
        self.returns, self.advantages = returns, (advantages - advantages.mean()) / (advantages.std() + 1e-8)

    def mini_batches(self) -> Iterable[Any]:
        """One permutation an epoch, and its parts as indices."""
        flat = [column.flatten(0, 1) for column in (self.observations, *self.columns)]
        for _ in range(NUM_EPOCHS):
            for rows in self._torch.randperm(T * B).chunk(NUM_MINI_BATCHES):
                yield [column[rows] for column in flat]

    def recurrent_mini_batches(self) -> Iterable[Any]:
        """All trajectories as a list of views, padded at once, and the environments in slices."""
        dones = self.dones[..., 0].clone()
        dones[-1] = 1
        ends = dones.T.flatten().nonzero()[:, 0]
        lengths = self._torch.diff(ends, prepend=ends.new_tensor([-1]))
        trajectories = self.observations.transpose(0, 1).flatten(0, 1).split(lengths.tolist())
        padded = self._pad_sequence(trajectories)
        masks = lengths > self._torch.arange(T)[:, None]
        edges = [0, *dones.sum(dim=0).cumsum(0).tolist()]
        size = B // NUM_MINI_BATCHES
        for _ in range(NUM_EPOCHS):
            for first in range(0, B, size):
                which = slice(edges[first], edges[first + size])
                yield padded[:, which], masks[:, which], [x[:, first : first + size] for x in self.columns]


def rollout_gae(effort: Effort) -> Table:
    """Advantages and returns of a rollout."""

    def ours(storage: RolloutStorage, last_values: Any) -> None:
        storage.compute_returns(last_values, GAMMA, LAM)

    return _compare(effort, "GAE, normalized", ours, Plain.compute_returns)


def rollout_mini_batches(effort: Effort) -> Table:
    """Shuffled minibatches."""

    def ours(storage: RolloutStorage, _: Any) -> None:
        _drain(storage.mini_batch_generator(NUM_MINI_BATCHES, NUM_EPOCHS))

    title = f"{NUM_EPOCHS} epochs of {NUM_MINI_BATCHES} shuffled minibatches"
    return _compare(effort, title, ours, lambda plain: _drain(plain.mini_batches()))


def rollout_recurrent_mini_batches(effort: Effort) -> Table:
    """Minibatches of padded trajectories."""

    def ours(storage: RolloutStorage, _: Any) -> None:
        _drain(storage.recurrent_mini_batch_generator(NUM_MINI_BATCHES, NUM_EPOCHS))

    title = f"{NUM_EPOCHS} epochs of {NUM_MINI_BATCHES} recurrent minibatches, trajectories padded"
    return _compare(effort, title, ours, lambda plain: _drain(plain.recurrent_mini_batches()))


def _compare(
    effort: Effort, title: str, ours: Callable[[RolloutStorage, Any], None], plainly: Callable[[Plain], None]
) -> Table:
    title = f"{title}, T={T}, B={B}, {NUM_OBSERVATIONS} observations, {NUM_ACTIONS} actions"
    columns = ["", "ms", "ours is x times", "required"]
    missing = [name for name in ("torch", "array_api_compat") if importlib.util.find_spec(name) is None]
    if missing:
        return Table(title, columns, [], f"Not measured: {' and '.join(missing)} not installed.")
    rollout = Rollout()
    plain = Plain(rollout)
    contenders: dict[str, Callable[[], None]] = {"plain PyTorch": lambda: plainly(plain)}
    for name, device in (("ours, NumPy", None), ("ours, PyTorch", "cpu")):
        storage = rollout.storage(device)
        last_values = rollout.last_values if device is None else plain.last_values
        storage.compute_returns(last_values, GAMMA, LAM)
        contenders[name] = lambda storage=storage, last_values=last_values: ours(storage, last_values)  # type: ignore[misc]
    times: dict[str, list[float]] = {name: [] for name in contenders}
    deadline = time.perf_counter() + effort.seconds * effort.rounds
    while time.perf_counter() < deadline or min(map(len, times.values())) < effort.rounds + 1:
        for name, contender in contenders.items():
            start = time.perf_counter()
            contender()
            times[name].append(time.perf_counter() - start)
    progress(f"{len(times['plain PyTorch'])} turns of each")
    best = {name: min(of) for name, of in times.items()}
    rows = []
    for name, seconds in best.items():
        times_ours = ("", "") if name == "plain PyTorch" else ratio(best["plain PyTorch"], seconds, 1)
        rows.append([name, f"{1e3 * seconds:.2f}", *times_ours])
    return Table(
        title, columns, rows, "The least disturbed of the turns that each took after the other, in one process."
    )


def _drain(batches: Iterable[Any]) -> None:
    for _ in batches:
        pass
