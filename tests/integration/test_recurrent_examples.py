"""The examples of storages, rollout files and slices in NumPy: each runs when it is copied alone, and learns."""

from __future__ import annotations

import importlib.util
import re
import runpy
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import reverb_writer as rw

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(name: str) -> Any:
    """Return an example as a module."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def printed_by(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Run a copy of an example as a program; return the lines that it prints."""
    copy = shutil.copy(EXAMPLES / f"{name}.py", folder)
    runpy.run_path(str(copy), run_name="__main__")
    return capsys.readouterr().out.splitlines()


def test_a_storage_teaches_a_recurrent_policy_to_remember(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed_by("recurrent_rollouts", tmp_path, capsys)
    shares = [float(re.findall(r": (\S+) of", line)[0]) for line in lines]
    assert shares[0] < 0.75
    assert np.mean(shares[-5:]) > 0.97  # without memory: 5 of 8


def test_gradients_through_time_are_the_slopes_of_the_objective() -> None:
    example = load("recurrent_rollouts")
    rng = np.random.default_rng(1)
    policy = example.Policy(rng)
    observations, states, slopes = (rng.normal(size=size) for size in ((5, 3, 1), (3, example.HIDDEN), (5, 3, 1)))

    def objective() -> float:
        probabilities, _ = policy(observations, states)
        return float((np.log(probabilities / (1 - probabilities)) * slopes).sum())

    before, expected, epsilon = policy.weights, [], 1e-6
    for weight in before:
        expected.append(np.zeros_like(weight))
        for index in np.ndindex(weight.shape):
            weight[index] += epsilon
            above = objective()
            weight[index] -= 2 * epsilon
            expected[-1][index] = (above - objective()) / (2 * epsilon)
            weight[index] += epsilon
    policy.ascend(observations, policy(observations, states)[1], slopes)
    for weight, changed, slope in zip(before, policy.weights, expected, strict=True):
        np.testing.assert_allclose((changed - weight) / example.LEARNING_RATE, slope, rtol=1e-5, atol=1e-6)


def test_slices_teach_a_recurrent_network_to_remember(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed_by("recurrent_slices", tmp_path, capsys)
    assert float(re.findall(r": (\S+) of", lines[-1])[0]) > 0.85  # at best 0.9; without memory about 0.5


def test_states_of_flat_slices_are_those_of_the_episodes() -> None:
    example = load("recurrent_slices")
    rng = np.random.default_rng(2)
    network = example.Network(rng)
    with rw.LocalServer([example.TABLE]) as server:
        with rw.EpisodeObserver(server.address, "episodes", max_sequence_length=10) as observer:
            for _ in range(20):
                example.play(observer, network, rng, explore=1.0)
        with rw.SliceDataset(server.address, "episodes", 32, example.SLICE_LEN, seed=0) as dataset:
            batch = next(dataset)
    stored, is_init = batch.data["state"], batch.markers.is_init
    assert is_init is not None
    assert (is_init & ~batch.data["is_first"]).any()  # a slice begins in the middle of its episode
    only_first_rows = np.where(is_init[:, None], stored, np.nan)
    before, _ = network.run(batch.data["observation"], is_init, only_first_rows)
    np.testing.assert_array_equal(before, stored)


def test_gradients_of_flat_slices_stop_at_their_first_rows() -> None:
    example = load("recurrent_slices")
    rng = np.random.default_rng(3)
    observations, stored = rng.normal(size=(7, 1)), rng.normal(size=(7, example.HIDDEN))
    actions, targets, is_init = rng.integers(2, size=7), rng.normal(size=7), np.isin(np.arange(7), [0, 4])
    together, apart = (example.Network(np.random.default_rng(4)) for _ in range(2))
    start = example.Network(np.random.default_rng(4))
    together.learn(observations, is_init, stored, actions, targets)
    changes = []
    for part in (slice(0, 4), slice(4, 7)):
        apart.a, apart.b, apart.c = (weight.copy() for weight in (start.a, start.b, start.c))
        apart.learn(observations[part], is_init[part], stored[part], actions[part], targets[part])
        rows = part.stop - part.start
        changes.append([(apart.a - start.a) * rows, (apart.b - start.b) * rows, (apart.c - start.c) * rows])
    for change, first, second in zip(
        (together.a - start.a, together.b - start.b, together.c - start.c), *changes, strict=True
    ):
        np.testing.assert_allclose(change * 7, first + second, atol=1e-12)


def test_rollout_files_teach_the_expert_of_the_trajectories(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["imitate_rollouts.py", str(tmp_path / "demos")])
    *epochs, last = printed_by("imitate_rollouts", tmp_path, capsys)
    assert epochs[-1].endswith("policy [-1.0, -1.5]")
    assert abs(float(last.rpartition(" ")[2])) < 0.01
    example = load("imitate_rollouts")
    dataset = example.RolloutDataset(tmp_path / "demos", num_envs=16, seed=0)
    num_episodes = 6 * example.NUM_CARTS
    for _ in range(2):  # each epoch has every transition once
        batches = list(dataset)
        assert sum(int(batch.mask.sum()) for batch in batches) == num_episodes * example.EPISODE
        assert sum(int(batch.truncated.sum()) for batch in batches) == num_episodes
