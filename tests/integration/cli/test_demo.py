"""The demo, for as long as it takes to see that all its parts work together, and that all of them end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from waiting import eventually, process_state

END_WITHIN_S = 100.0

pytest.importorskip("gymnasium")

StartDemo = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[StartDemo]:
    """`start(*arguments)` runs the demo in a process group of its own; it and its processes end with the test."""
    demos: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-u", "-m", "reverb_writer.cli", "demo", *arguments]
        demo = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        demos.append(demo)
        return demo

    yield start
    for demo in demos:
        demo.terminate()
        demo.communicate(timeout=END_WITHIN_S)


def processes_of(demo: subprocess.Popen[str]) -> dict[int, str]:
    """Return the processes that the demo has started once it says so: script by process number."""
    assert demo.stdout is not None
    assert "a learner, 2 actors" in demo.stdout.readline()
    pids = Path(f"/proc/{demo.pid}/task/{demo.pid}/children").read_text().split()
    scripts = {int(pid): Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[1].decode() for pid in pids}
    return {pid: Path(script).name for pid, script in scripts.items()}


def alive(pid: int) -> bool:
    return process_state(pid) not in "ZX"


def test_demo_plays_writes_samples_and_passes_a_modest_goal(start: StartDemo) -> None:
    demo = start("--seed", "0", "--goal", "12", "--seconds", "90")
    out, _ = demo.communicate(timeout=END_WITHIN_S)
    assert demo.returncode == 0, out
    assert "The mean return passed 12" in out
    header = next(line for line in out.splitlines() if line.startswith("reverb-writer "))
    assert len(header) <= 80  # columns of a terminal
    counts = {
        name: int(number.replace(",", "")) for name, number in re.findall(r"(steps|items|samples) +([\d,]+)", out)
    }
    assert min(counts.values()) > 0
    assert len(counts) == 3


@pytest.mark.parametrize(
    ("send", "number"),
    [(os.killpg, signal.SIGINT), (os.kill, signal.SIGINT), (os.kill, signal.SIGTERM)],
    ids=["ctrl-c in its terminal", "SIGINT to the demo alone", "SIGTERM"],
)
def test_a_signal_ends_the_demo_and_leaves_no_process_behind(
    start: StartDemo, send: Callable[[int, int], None], number: signal.Signals
) -> None:
    demo = start("--seconds", "90")
    processes = processes_of(demo)
    assert sorted(processes.values()) == ["actor.py", "actor.py", "learner.py", "server.py"]
    send(demo.pid, number)
    out, _ = demo.communicate(timeout=END_WITHIN_S)
    assert demo.returncode == 128 + number, out
    assert f"Stopped by {number.name}." in out
    assert not [script for pid, script in processes.items() if alive(pid)]


@pytest.mark.parametrize(
    ("script", "name"), [("actor.py", "actor "), ("learner.py", "learner"), ("server.py", "server")]
)
def test_a_process_that_dies_ends_the_demo_which_says_which(start: StartDemo, script: str, name: str) -> None:
    demo = start("--seconds", "90")
    processes = processes_of(demo)
    os.kill(next(pid for pid, started in processes.items() if started == script), signal.SIGKILL)
    out, _ = demo.communicate(timeout=END_WITHIN_S)
    assert demo.returncode == 1, out
    assert re.search(rf"^(Error: )?{name}\d? ?was killed by SIGKILL", out, re.MULTILINE), out
    assert not [script for pid, script in processes.items() if alive(pid)]


def test_a_demo_that_is_killed_takes_its_processes_along(start: StartDemo) -> None:
    demo = start("--seconds", "90")
    processes = processes_of(demo)
    demo.kill()
    demo.communicate(timeout=END_WITHIN_S)
    eventually(lambda: not any(map(alive, processes)), "its processes end")
