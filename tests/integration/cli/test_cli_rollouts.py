"""`reverb-writer import` and `export`, as a person runs them."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from episodes import expected, feed
from kinds import contents
from reading import Place, Serve, fifo, read

import reverb_writer as rw
from reverb_writer.cli import commands
from reverb_writer.files import RolloutWriter, list_trajectories

pytestmark = contents

COMMAND = [sys.executable, "-m", "reverb_writer.cli"]


def run(*arguments: Any, **options: Any) -> Result:
    """Run a command in this process: another one takes seconds to start on a busy machine."""
    return CliRunner().invoke(commands, [*map(str, arguments)], **options)


def write(data_dir: Path, lengths: tuple[int, ...]) -> None:
    with RolloutWriter(data_dir) as writer:
        feed(writer, lengths)


def test_import_writes_the_windows_that_its_arguments_name(place: Place, tmp_path: Path) -> None:
    write(tmp_path, (5, 2, 4))
    done = run("import", tmp_path, "-t", "a", "-a", place.address, "-l", 3, "-s", 2, "--end-of-episode", "cover")
    assert done.exit_code == 0, done.stderr
    assert done.stdout.startswith("3 trajectories, 11 steps, 5 items in ")
    assert place.column("a") == expected(rw.WindowSpec(3, 2, "cover"), (5, 2, 4))


def test_import_again_sends_nothing_until_asked(place: Place, tmp_path: Path) -> None:
    write(tmp_path, (3,))
    arguments = ("import", tmp_path, "--table", "a", "--table", "b", "--address", place.address, "--whole-episodes")
    assert run(*arguments).exit_code == 0
    again = run(*arguments)
    assert (again.exit_code, again.stdout[:15]) == (0, "0 trajectories,")
    assert "already delivered: 1" in again.stdout
    assert place.column("a") == place.column("b") == [[1, 2, 3]]
    assert run(*arguments, "--again").exit_code == 0
    assert place.column("a") == [[1, 2, 3]]


def test_files_of_one_name_in_two_runs_are_two_trajectories(place: Place, tmp_path: Path) -> None:
    arguments = ("import", tmp_path / "data", "-t", "a", "-a", place.address, "-l", 3)
    for number, run_name in enumerate(("run_a", "run_b"), 1):
        write(tmp_path / "data" / run_name, (2 + number,))
        (path,) = list_trajectories(tmp_path / "data" / run_name)
        path.rename(path.parent / "trajectory_0.npz")
        done = run(*arguments)
        assert (done.exit_code, done.stdout[:15]) == (0, "1 trajectories,"), done.stderr
    assert place.column("a") == [[1, 2, 3], [1, 2, 3], [2, 3, 4]]


def test_import_names_what_is_damaged_and_ends_with_3(place: Place, tmp_path: Path) -> None:
    write(tmp_path, (3, 3))
    damaged = list_trajectories(tmp_path)[0]
    damaged.write_bytes(b"x")
    done = run("import", tmp_path, "-t", "a", "-a", place.address, "-l", 3)
    assert done.exit_code == 3
    assert f"left out: trajectory `{damaged.name}`" in done.stderr
    assert place.column("a") == [[4, 5, 6]]


@pytest.mark.slow
def test_interrupted_import_goes_on_without_a_window_twice(place: Place, tmp_path: Path) -> None:
    write(tmp_path, (50,) * 400)
    arguments = ["import", str(tmp_path), "-t", "a", "-a", place.address, "-l", "2", "--timeout", "240"]
    with subprocess.Popen([*COMMAND, *arguments], stdout=subprocess.PIPE, text=True) as first:
        while not place.client.server_info()["a"].current_size and first.poll() is None:
            time.sleep(0.01)  # a busy loop would take the processor from the import
        first.send_signal(signal.SIGINT)
        output, _ = first.communicate(timeout=250)
    sent = int(output.split()[0])
    assert first.returncode == (130 if sent < 400 else 0)
    assert place.client.server_info()["a"].current_size == 49 * sent
    second = run(*arguments)
    assert second.exit_code == 0, second.stderr
    assert second.stdout.startswith(f"{400 - sent} trajectories,")
    assert place.column("a") == expected(rw.WindowSpec(2), (50,) * 400)


def test_export_and_import_bring_items_back_and_export_takes_none_out(serve: Serve, tmp_path: Path) -> None:
    client = serve(rw.TableConfig("t", 100), fifo("back"))
    for n in range(1, 4):
        client.insert({"n": np.arange(n)}, {"t": n / 2})
    out = run("export", "--table", "t", tmp_path / "new", "--address", client.address)
    assert (out.exit_code, out.stdout[:16]) == (0, "3 items, 6 steps"), out.stderr
    assert len(list_trajectories(tmp_path / "new")) == 3
    into = ("import", tmp_path / "new", "-t", "back", "-a", client.address)
    assert run(*into, "--whole-episodes", "--priority", "stored").exit_code == 0
    refused = run("export", "--table", "back", tmp_path / "out", "-a", client.address)
    assert refused.exit_code == 2
    assert "can only be read by removing its items" in refused.stderr
    found = sorted((item.info.priority, item.data[0].tolist()) for item in read(client, "back"))
    assert found == [(0.5, [0]), (1.0, [0, 1]), (1.5, [0, 1, 2])]


def test_no_server_and_no_table_end_with_1_and_say_so(place: Place, tmp_path: Path) -> None:
    write(tmp_path, (3,))
    gone = run("import", tmp_path, "-t", "a", "-l", 3, "-a", "localhost:1", "--timeout", "0.5")
    assert gone.exit_code == 1
    assert gone.stderr.startswith("Error: no Reverb server at localhost:1")
    for command in (["import", tmp_path, "-l", "3"], ["export", tmp_path / "out"]):
        unknown = run(*command, "-t", "nowhere", "-a", place.address)
        assert (unknown.exit_code, "nowhere" in unknown.stderr) == (1, True)
