"""The example with many actors runs on one machine; tests/ray_shards has it on a Ray cluster."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "apex_dqn.py"


def test_actors_and_learner_run_on_a_laptop(tmp_path: Path) -> None:
    pytest.importorskip("gymnasium")
    line = [sys.executable, shutil.copy(SCRIPT, tmp_path), "--actors", "2", "--updates", "100"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr, "the actors end with the run"
    assert done.stdout.startswith("   100 updates:")
