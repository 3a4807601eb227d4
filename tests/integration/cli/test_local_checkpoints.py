"""`reverb-writer local --checkpoints`: a killed server comes back with its save, and with its writers' later items."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from kills import numbers_in
from ports import free_port
from waiting import eventually

import reverb_writer as rw


@contextlib.contextmanager
def serving(folder: Path, port: int) -> Iterator[subprocess.Popen[str]]:
    """Run the command until the block ends, and yield its process when it serves."""
    line = [sys.executable, "-m", "reverb_writer.cli", "local", "--port", str(port), "--checkpoints", str(folder)]
    with subprocess.Popen([*line, "--every", "0.2"], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            told = process.stdout.readline()
            assert told == f"serving replay at 127.0.0.1:{port}; Ctrl-C saves the data to {folder} and ends it\n"
            yield process
        finally:
            process.kill()


def test_killed_command_comes_back_with_its_save_and_the_later_items(tmp_path: Path) -> None:
    folder, port = tmp_path / "saved", free_port()

    def write(*numbers: int) -> None:
        for number in numbers:
            observer({"number": np.int64(number)}, end_of_episode=True)
        observer.flush()

    with serving(folder, port):
        observer = rw.TrajectoryObserver(f"127.0.0.1:{port}", "replay", 1, timeout_s=60)
        write(1, 2, 3)
        eventually(lambda: observer.stats().kept_bytes == 0, "a save has the items")
        write(4)
    with serving(folder, port) as process:
        write(5)
        observer.close()
        process.terminate()
        process.wait(60)
    assert numbers_in(folder) == Counter([1, 2, 3, 4, 5])
    assert observer.stats().acknowledged_items == 5
