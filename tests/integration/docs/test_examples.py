"""Each example runs when it is copied alone, and learns as it says, in a given number of environment steps.

`make frameworks` runs those in PyTorch; tests/ray_shards has APEX on a Ray cluster.
"""

from __future__ import annotations

import importlib
import json
import re
import shutil
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from server_process import StartServer

import reverb_writer as rw

EXAMPLES = Path(__file__).parents[3] / "examples"
TORCH = ["dqn", "r2d2", "ppo_vector", "sac"]


@pytest.fixture(autouse=True)
def examples_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The examples are scripts beside each other, not a package."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    for path in EXAMPLES.glob("*.py"):
        monkeypatch.delitem(sys.modules, path.stem, raising=False)


def printed_by(name: str, folder: Path, *arguments: object, timeout_s: float = 900) -> list[str]:
    """Run a copy of an example as a program, whose actors end with it; return the lines that it prints."""
    line = [sys.executable, str(shutil.copy(EXAMPLES / f"{name}.py", folder)), *map(str, arguments)]
    return lines_of(line, folder, timeout_s)


def lines_of(line: list[str], folder: Path, timeout_s: float) -> list[str]:
    done = subprocess.run(line, capture_output=True, text=True, timeout=timeout_s, check=False, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout.splitlines()


def share_of(line: str) -> float:
    return float(re.findall(r": (\S+) of", line)[0])


# Of the last episodes, by chance: CartPole 22 steps, without velocities at most 50 with no memory; Pendulum -1200.
@pytest.mark.timeout(1500)  # steps are counted, not seconds: on a busy machine they take minutes
@pytest.mark.parametrize(
    ("name", "num_steps", "goal"),
    [("dqn", 40_000, 150.0), ("r2d2", 60_000, 100.0), ("ppo_vector", 200_000, 200.0), ("sac", 15_000, -300.0)],
)
def test_example_in_pytorch_learns(name: str, num_steps: int, goal: float) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("gymnasium")
    example: Any = importlib.import_module(name)
    reached = []
    with rw.LocalServer([example.TABLE]) as server:
        progress = example.learn(server.address, num_steps)
        for _, mean in progress:
            reached.append(mean)
            if mean >= goal:
                progress.close()
    assert reached[-1] >= goal, f"best of {num_steps} steps: {max(reached):.0f}"


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("line", [*([name, "--steps", 50] for name in TORCH), ["ppo", "--goal", 1]], ids=str)
def test_example_in_pytorch_runs_when_it_is_copied_alone(line: list[Any], tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("gymnasium")
    printed_by(line[0], tmp_path, *line[1:])


# Minari's collector leaves a folder to the garbage collector.
@pytest.mark.timeout(1500)
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_minari_data_set_is_imitated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    minari, gymnasium = pytest.importorskip("minari"), pytest.importorskip("gymnasium")
    pytest.importorskip("torch")
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
    assert 0.9 < accuracy <= 1
    assert example.evaluate(gymnasium.make("CartPole-v1", max_episode_steps=300), policy) > 150
    env.close()


@pytest.mark.slow
def test_learner_of_the_demo_keeps_its_weights_while_it_has_no_server(lone_server: StartServer) -> None:
    gymnasium = pytest.importorskip("gymnasium")
    server = lone_server(rw.TableConfig("cartpole"), rw.TableConfig.variables("variables"))

    def write_an_episode() -> None:
        with rw.TrajectoryObserver(server.address, "cartpole", 9, end_of_episode="pad") as observer:
            env = rw.environments.record(gymnasium.make("CartPole-v1"), observer)
            is_over, _ = False, env.reset(seed=0)
            while not is_over:
                _, _, is_over, _, _ = env.step(0)

    write_an_episode()
    script = "import sys, learner as it, reverb_writer as rw; it.learn(rw.Client(sys.argv[1], timeout_s=10), 0)"
    with subprocess.Popen([sys.executable, "-c", script, server.address], cwd=EXAMPLES) as learner:
        try:
            with rw.Variables(server.address, "variables") as variables:
                variables.latest()
                variables.wait()  # it learns
            server.process.kill()
            time.sleep(15)  # longer than its time-out
            server.process.restart()
            write_an_episode()
            with rw.Variables(server.address, "variables") as variables:
                variables.latest()
            assert learner.poll() is None
        finally:
            learner.kill()


def test_a_storage_teaches_a_recurrent_policy_to_remember(tmp_path: Path) -> None:
    shares = [share_of(line) for line in printed_by("recurrent_rollouts", tmp_path)]
    assert shares[0] < 0.75
    assert np.mean(shares[-5:]) > 0.97  # without memory: 5 of 8


def test_slices_teach_a_recurrent_network_to_remember(tmp_path: Path) -> None:
    assert share_of(printed_by("recurrent_slices", tmp_path)[-1]) > 0.85  # at best 0.9; without memory about 0.5


def test_post_training_learns_from_groups_of_older_weights(tmp_path: Path) -> None:
    rewards, ages = printed_by("post_training", tmp_path)
    first, last = map(float, re.findall(r"\d\.\d+", rewards))
    assert first < 0.3  # by chance about 0.1
    assert last > 0.7
    assert float(re.findall(r"\d+\.\d", ages)[0]) > 0  # the workers do not wait for the learner


def test_states_of_flat_slices_are_those_of_the_episodes() -> None:
    example: Any = importlib.import_module("recurrent_slices")
    rng = np.random.default_rng(2)
    network = example.Network(rng)
    with rw.LocalServer([example.TABLE]) as server:
        with rw.EpisodeObserver(server.address, "episodes", max_sequence_length=10) as observer:
            for _ in range(20):
                example.play(observer, network, rng, explore=1.0)
        with rw.SliceDataset(server.address, "episodes", 32, example.SLICE_LEN, seed=0) as dataset:
            batch = next(dataset)
    stored, starts = batch.data["state"], batch.slices.starts
    assert (starts & ~batch.is_first).any()  # a slice begins in the middle of its episode
    only_first_rows = np.where(starts[:, None], stored, np.nan)
    before, _ = network.run(batch.data["observation"], starts, only_first_rows)
    np.testing.assert_array_equal(before, stored)


def test_rollout_files_teach_the_expert_of_the_trajectories(tmp_path: Path) -> None:
    *epochs, last = printed_by("imitate_rollouts", tmp_path)
    assert epochs[-1].endswith("policy [-1.0, -1.5]")
    assert abs(float(last.rpartition(" ")[2])) < 0.01


def test_many_actors_and_a_learner_run_on_a_laptop(tmp_path: Path) -> None:
    pytest.importorskip("gymnasium")
    assert printed_by("apex_dqn", tmp_path, "--actors", 2, "--updates", 100)[0].startswith("   100 updates:")


def returns_of(num_steps: int, folder: Path) -> list[float]:
    """Run the example of two processes with the default arguments of observer and dataset; return its returns."""
    pytest.importorskip("gymnasium")
    shutil.copy(EXAMPLES / "dqn_split.py", folder)
    program = folder / "run.py"  # a file, because the processes that it spawns import it
    each = f"[one for part in dqn_split.run({num_steps}, seed=0) for one in part]"
    main = f"if __name__ == '__main__':\n    print(json.dumps({each}))\n"
    program.write_text(f"import json, dqn_split\n{main}")
    (line,) = lines_of([sys.executable, str(program)], folder, 1500)
    returns: list[float] = json.loads(line)
    return returns


def test_actor_and_learner_in_two_processes_run_and_end(tmp_path: Path) -> None:
    assert 1_500 < sum(returns_of(2_000, tmp_path)) < 3_200  # the actor is ahead by the rate limiter's buffer


@pytest.mark.slow
@pytest.mark.timeout(1600)
def test_actor_and_learner_in_two_processes_learn(tmp_path: Path) -> None:
    returns = returns_of(30_000, tmp_path)
    total = sum(returns)
    last: list[float] = []
    while returns and sum(last) < total / 4:
        last.append(returns.pop())
    assert sum(last) / len(last) > 100
