"""The benchmarks run. What they measure is not a matter for tests."""

from __future__ import annotations

import ctypes.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BENCHMARKS = [
    "write_small",
    "write_small_strided",
    "write_frames",
    "write_vector",
    "actor_processes",
    "read_small",
    "read_tf_agents",
    "read_frames",
    "read_episodes",
    "read_one_by_one",
    "read_ahead",
    "learner_processes",
    "call_times",
    "footprint",
    "endurance",
    "learner_endurance",
    "chunk_length_small",
    "chunk_length_frames",
    "in_flight",
    "allocator",
    "episode_steps",
    "episode_getters",
    "accumulator_add",
    "record_cartpole",
    "read_rollouts",
    "import_rollouts",
    "rollout_gae",
    "rollout_mini_batches",
    "rollout_recurrent_mini_batches",
]


@pytest.mark.slow
@pytest.mark.timeout(900)  # a benchmark with dozens of cells takes a minute even in a hurry, and more on a busy machine
@pytest.mark.parametrize("name", BENCHMARKS)
def test_benchmark_runs_and_prints_a_table(name: str, tmp_path: Path) -> None:
    pytest.importorskip("ale_py", reason="the benchmarks' packages are not installed")
    pytest.importorskip("optree", reason="the benchmarks' packages are not installed")
    pytest.importorskip("psutil", reason="the benchmarks' packages are not installed")
    if name == "allocator" and ctypes.util.find_library("jemalloc") is None:
        pytest.skip("the system has no jemalloc to compare with")
    report = tmp_path / "report.md"
    command = [sys.executable, "-m", "benchmarks", name, "--quick", "--output", str(report)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, check=False, text=True)
    assert ran.returncode == 0, ran.stderr
    assert "| -" in report.read_text()
