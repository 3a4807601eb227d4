"""Each example in PyTorch learns what it says, in a given number of environment steps; `make frameworks` runs them."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import reverb_writer as rw

torch = pytest.importorskip("torch")
gymnasium = pytest.importorskip("gymnasium")

EXAMPLES = str(Path(__file__).parents[2] / "examples")

# Steps are counted, not seconds: on a busy machine they take minutes.
pytestmark = pytest.mark.timeout(1500)


@pytest.fixture(autouse=True)
def examples_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The examples are scripts beside each other, not a package."""
    monkeypatch.syspath_prepend(EXAMPLES)
    for name in ("dqn", "r2d2", "ppo_vector", "sac", "offline_minari"):
        monkeypatch.delitem(sys.modules, name, raising=False)


# Of the last episodes, by chance: CartPole 22 steps, without velocities at most 50 with no memory; Pendulum -1200.
@pytest.mark.parametrize(
    ("name", "num_steps", "goal"),
    [("dqn", 40_000, 150.0), ("r2d2", 60_000, 100.0), ("ppo_vector", 200_000, 200.0), ("sac", 15_000, -300.0)],
)
def test_example_learns(name: str, num_steps: int, goal: float) -> None:
    example: Any = importlib.import_module(name)
    with rw.LocalServer([example.TABLE]) as server:
        reached = [mean for _, mean in _until(example.learn(server.address, num_steps), goal)]
    assert reached[-1] >= goal, f"best of {num_steps} steps: {max(reached):.0f}"


@pytest.mark.parametrize("name", ["dqn", "r2d2", "ppo_vector", "sac"])
def test_example_runs_when_it_is_copied_alone(name: str, tmp_path: Path) -> None:
    line = [sys.executable, shutil.copy(f"{EXAMPLES}/{name}.py", tmp_path), "--steps", "50"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=900, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_actor_processes_end_with_their_learner(tmp_path: Path) -> None:
    line = [sys.executable, shutil.copy(f"{EXAMPLES}/ppo.py", tmp_path), "--goal", "1"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=900, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


def _until(progress: Any, goal: float) -> Any:
    for step, mean in progress:
        yield step, mean
        if mean >= goal:
            progress.close()
            return


# Minari's collector leaves a folder to the garbage collector.
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_minari_data_set_is_imitated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    minari = pytest.importorskip("minari")
    pytest.importorskip("h5py")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    example: Any = importlib.import_module("offline_minari")
    # The expert pushes to the side to which the pole falls; it balances it for 200 steps and more.
    env = minari.DataCollector(gymnasium.make("CartPole-v1", max_episode_steps=300))
    for seed in range(12):
        (observation, _), over = env.reset(seed=seed), False
        while not over:
            action = int(observation[2] + 0.3 * observation[3] + 0.05 * observation[0] + 0.1 * observation[1] > 0)
            observation, _, terminated, truncated, _ = env.step(action)
            over = terminated or truncated
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Minari's, of an author that is not named and a folder that it removes
        data = env.create_dataset(dataset_id="cartpole/expert-v0")
    with rw.LocalServer([example.TABLE]) as server:
        assert example.fill(server.address, data) == data.total_steps + data.total_episodes
        policy, accuracy = example.imitate(server.address, 1500, 4, 2)
    assert accuracy > 0.9
    assert example.evaluate(gymnasium.make("CartPole-v1", max_episode_steps=300), policy) > 150
    env.close()
    assert np.isfinite(accuracy)
