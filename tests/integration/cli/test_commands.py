"""What all commands have in common, and the short ones: `--version`, help, `reset`, a port that is taken."""

from __future__ import annotations

import importlib
import socket

import numpy as np
import pytest
from click.testing import CliRunner, Result

import reverb_writer as rw
from reverb_writer.cli import commands


def run(*arguments: str) -> Result:
    """Run a command in this process: another one takes seconds to start on a busy machine."""
    return CliRunner().invoke(commands, arguments)


def test_version_is_told() -> None:
    assert CliRunner().invoke(commands, ["--version"]).output == f"reverb-writer, version {rw.__version__}\n"


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


def test_reset_empties_the_tables_that_it_names_and_no_other() -> None:
    tables = [rw.TableConfig(name) for name in ("replay", "other", "kept")]
    with rw.LocalServer(tables) as server, rw.Client(server.address) as client:
        for name in ("replay", "replay", "other", "kept"):
            client.insert(np.zeros(1), {name: 1.0})
        refused = run("reset", server.address, "--table", "replay", "--table", "repaly")
        assert refused.exit_code == 1
        assert refused.stderr == "Error: table `repaly` is not on the server; it has kept, other, replay.\n"
        assert client.server_info()["replay"].current_size == 2
        done = run("reset", server.address, "--table", "replay", "--table", "other")
        assert (done.exit_code, done.stdout) == (0, "replay: 2 items removed\nother: 1 items removed\n")
        assert {name: table.current_size for name, table in client.server_info().items()} == {
            "replay": 0,
            "other": 0,
            "kept": 1,
        }
        assert run("reset", server.address).exit_code == 2  # never all tables by mistake


def test_taken_port_is_told_in_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run("local", "--port", str(port))
    expected = f"Error: cannot listen on 127.0.0.1:{port}: Address already in use. Pass another --port.\n"
    assert (done.exit_code, done.stdout, done.stderr) == (1, "", expected)
