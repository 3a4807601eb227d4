"""An actor and a learner in two processes learn with the default arguments of observer and dataset."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples/dqn_split.py"
MAIN = "if __name__ == '__main__':\n    "


def returns_of(num_steps: int, folder: Path) -> list[float]:
    """Run the example, from a file because processes that are spawned import it, and return its episodes' returns."""
    shutil.copy(SCRIPT, folder)  # it runs without the other examples
    program = folder / "run.py"
    program.write_text(f"import json, dqn_split\n{MAIN}print(json.dumps(dqn_split.run({num_steps}, seed=0)))\n")
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr, "the actor ends with the run"
    returns: list[float] = json.loads(done.stdout)
    return returns


def test_example_runs_and_ends(tmp_path: Path) -> None:
    pytest.importorskip("gymnasium")
    assert 1_500 < sum(returns_of(2_000, tmp_path)) < 3_200  # the actor is ahead by the rate limiter's buffer


@pytest.mark.slow
@pytest.mark.timeout(1600)
def test_actor_and_learner_in_two_processes_learn(tmp_path: Path) -> None:
    pytest.importorskip("gymnasium")
    returns = returns_of(30_000, tmp_path)
    total = sum(returns)
    last: list[float] = []
    while returns and sum(last) < total / 4:
        last.append(returns.pop())
    assert sum(last) / len(last) > 100
