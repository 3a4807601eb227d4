"""Commands of `reverb-writer` that need no server in another process: arguments, exit codes, help, what they print."""

from __future__ import annotations

import importlib
import json
import re
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from episodes import feed
from misbehaving import MisbehavingServer, server_info
from ports import free_port
from waiting import eventually

import reverb_writer as rw
from reverb_writer.cli import commands
from reverb_writer.files import StoredTrajectory, list_trajectories


def run(*arguments: Any, **options: Any) -> Result:
    """Run a command in this process: another one takes seconds to start on a busy machine."""
    return CliRunner().invoke(commands, [*map(str, arguments)], **options)


def test_missing_server_is_exit_code_2() -> None:
    address = f"localhost:{free_port()}"
    shown, machine = run("status", address, "--timeout", "0.5"), run("status", address, "--timeout", "0.5", "--json")
    assert (shown.exit_code, machine.exit_code) == (2, 2)
    assert f"unreachable: no Reverb server at {address}" in " ".join(shown.stdout.split())
    assert json.loads(machine.stdout)["health"] == "unreachable"


def test_what_cannot_be_asked_is_exit_code_3_and_a_line(tmp_path: Path) -> None:
    wrong = (["nowhere"], ["localhost:1", "--no-such-option"], ["localhost:1", "--token", "secret"])
    for arguments in (*wrong, ["localhost:1", "--ca", str(tmp_path)]):
        done = run("status", *arguments)
        assert done.exit_code == 3, arguments
        assert "Error: " in done.stderr
        assert "Traceback" not in done.stderr


def test_help_tells_the_exit_codes_and_the_version_is_told() -> None:
    codes = "0 healthy 1 a side of a table is blocked 2 unreachable: a server does not answer 3 not asked"
    assert codes in " ".join(run("status", "--help").stdout.split())
    assert run("--version").output == f"reverb-writer, version {rw.__version__}\n"


def test_shard_that_comes_while_the_others_are_asked_is_shown_next(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    shards = tmp_path / "shards"
    with MisbehavingServer() as first, rw.LocalServer([rw.TableConfig("replay")]) as second:

        def answer() -> bytes:
            shards.write_text(f"{first.address}\n{second.address}\n")
            eventually(lambda: "The target has changed" in caplog.text, "the client follows the file")
            return server_info("replay")

        shards.write_text(first.address)
        first.info = answer
        result = run("status", f"file:{shards}", "--json", "--interval", "0.1", "--timeout", "60")
    assert result.exit_code == 0, result.output
    assert [json.loads(line)["address"] for line in result.stdout.splitlines()] == [first.address, second.address]


@pytest.mark.parametrize(
    ("module", "group"),
    [("reverb_writer.cli", []), ("reverb_writer_server.cli", []), ("reverb_writer_server.cli", ["checkpoints"])],
)
def test_no_line_of_help_is_cut(module: str, group: list[str]) -> None:
    if "server" in module:
        pytest.importorskip("reverb_writer_server", reason="the server is not installed on this interpreter")
    told = CliRunner().invoke(importlib.import_module(module).commands, [*group, "--help"])
    assert told.exit_code == 0
    lines = told.output.partition("Commands:\n")[2].splitlines()
    assert len(lines) > 3
    assert not [line for line in lines if line.endswith("...")]


def test_reset_empties_the_tables_that_it_names_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = [rw.TableConfig(name) for name in ("replay", "other", "kept")]
    with rw.LocalServer(tables) as server, rw.Client(server.address) as client:
        for name in ("replay", "replay", "other", "kept"):
            client.insert(np.zeros(1), {name: 1.0})
        refused = run("reset", server.address, "--table", "replay", "--table", "repaly")
        assert refused.exit_code == 1
        assert refused.stderr == "Error: table `repaly` is not on the server; it has kept, other, replay.\n"
        assert client.server_info()["replay"].current_size == 2
        monkeypatch.setenv("REVERB_WRITER_ADDRESS", server.address)
        done = run("reset", "--table", "replay", "--table", "other")
        assert (done.exit_code, done.stdout) == (0, "replay: 2 items removed\nother: 1 items removed\n")
        left = {name: table.current_size for name, table in client.server_info().items()}
        assert left == {"replay": 0, "other": 0, "kept": 1}
        assert json.loads(run("status", "--json").stdout)["address"] == server.address
        assert run("reset", server.address).exit_code == 2  # never all tables by mistake


def test_taken_port_is_told_in_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run("local", "--port", str(port))
    expected = f"Error: cannot listen on 127.0.0.1:{port}: Address already in use. Pass another --port.\n"
    assert (done.exit_code, done.stdout, done.stderr) == (1, "", expected)


# Files and items.


def test_export_ends_when_each_item_has_come_and_leaves_out_those_of_an_earlier_one(tmp_path: Path) -> None:
    with rw.LocalServer([rw.TableConfig("t", 100)]) as server, rw.Client(server) as client:
        for lengths, told in (((1, 2, 3), "3 items, 6 steps in "), ((), "0 items, 0 steps"), ((4,), "1 items, 4 ")):
            for length in lengths:
                client.insert({"n": np.arange(length)}, {"t": 1.0})
            done = run("export", "--table", "t", tmp_path, "--address", server.address).stdout
            assert done.startswith(told)
        assert done.endswith(f"{tmp_path} has 4 trajectories.\n")


def test_export_of_a_saved_replay_needs_no_server(tmp_path: Path) -> None:
    with rw.LocalServer([rw.TableConfig("t", 100, "fifo", "fifo", max_times_sampled=1)]) as server:
        with rw.TrajectoryObserver(server.address, "t", 2) as observer:
            feed(observer, (4,))
        with rw.Client(server.address) as client:
            client.insert({"a": np.arange(3), "b": np.arange(2)}, {"t": 1.0})
        server.save(tmp_path / "saved")
    arguments = ("export", "--saved", tmp_path / "saved", "-t", "t", tmp_path / "out")
    out = run(*arguments)
    assert (out.exit_code, out.stdout[:16]) == (3, "3 items, 6 steps"), out.stderr
    assert out.stderr.startswith("left out: item ")
    found = [StoredTrajectory(path).load()["n"].tolist() for path in list_trajectories(tmp_path / "out")]
    assert found == [[1, 2], [2, 3], [3, 4]]
    assert "0 items, 0 steps" in run(*arguments).stdout
    unknown = run("export", "--saved", tmp_path / "saved", "-t", "nowhere", tmp_path / "out")
    assert (unknown.exit_code, "has no table `nowhere`; it has t" in unknown.stderr) == (1, True)
    empty = run("export", "--saved", tmp_path / "out", "-t", "t", tmp_path / "out")
    assert (empty.exit_code, "is no checkpoint" in empty.stderr) == (1, True)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("import", ".", "-t", "a"), "Give either --sequence-length or --whole-episodes"),
        (("import", ".", "-t", "a", "-l", "3", "--priority", "stored"), "needs --whole-episodes"),
        (("import", ".", "-t", "a", "-l", "3", "--priority", "much"), "must be a number or `stored`, got 'much'"),
        (("import", ".", "-t", "a", "--whole-episodes", "-s", "1"), "--stride-length is for windows"),
        (("import", ".", "-t", "a", "--whole-episodes", "--end-of-episode", "pad"), "--end-of-episode is for windows"),
        (("import", ".", "-l", "0", "-t", "a"), "--sequence-length"),
        (("import", "no/such/directory", "-t", "a", "-l", "3"), "no/such/directory"),
        (("export", "x"), "--table"),
    ],
)
def test_wrong_arguments_end_with_2(arguments: tuple[str, ...], text: str) -> None:
    done = run(*arguments)
    assert done.exit_code == 2
    assert text in done.stderr


@pytest.mark.parametrize("command", ["import", "export"])
def test_help_tells_examples_and_exit_codes(command: str) -> None:
    done = run(command, "--help", env={"COLUMNS": "200"})
    assert done.exit_code == 0
    assert f"reverb-writer {command} " in done.stdout
    codes = re.findall(r"^ +(\d+) +\S", done.stdout.partition("Exit codes:")[2], re.MULTILINE)
    assert codes == ["0", "1", "2", "3", "130"]
