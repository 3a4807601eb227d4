"""The demo, for as long as it takes to see that all its parts work together."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[2] / "examples" / "demo.py"
END_WITHIN_S = 100.0

pytest.importorskip("reverb_writer_server", reason="the demo starts a server of its own")
pytest.importorskip("rich")
pytest.importorskip("gymnasium")


def start(*arguments: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-u", DEMO, *arguments], stdout=pipe, stderr=subprocess.STDOUT, text=True)


def children_of(pid: int) -> set[int]:
    """Return the processes that a process has started."""
    return {int(pid) for pid in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}


def test_demo_plays_writes_samples_and_passes_a_modest_goal() -> None:
    demo = start("--seed", "0", "--goal", "12", "--seconds", "90")
    out, _ = demo.communicate(timeout=END_WITHIN_S)
    assert demo.returncode == 0, out
    assert "The mean return passed 12" in out
    counts = {
        name: int(number.replace(",", "")) for name, number in re.findall(r"(steps|items|samples) +([\d,]+)", out)
    }
    assert min(counts.values()) > 0
    assert len(counts) == 3


def test_ctrl_c_ends_the_demo_and_leaves_no_process_behind() -> None:
    demo = start("--seconds", "90")
    assert demo.stdout is not None
    assert "a learner, 2 actors" in demo.stdout.readline()
    children = children_of(demo.pid)
    assert len(children) == 4
    demo.send_signal(signal.SIGINT)
    out, _ = demo.communicate(timeout=END_WITHIN_S)
    assert demo.returncode == 128 + signal.SIGINT, out
    assert "Stopped by SIGINT." in out
    assert not [pid for pid in children if os.path.exists(f"/proc/{pid}")]  # noqa: PTH110  # a path that may vanish
