"""`reverb-writer tables`: a program's tables as the configuration of a server."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

import reverb_writer as rw
from reverb_writer.cli import commands
from reverb_writer.protocol.signatures import ArraySpec
from reverb_writer.tables.table_dicts import table_from_dict, tables_to_toml

tomllib: Any = pytest.importorskip("tomllib", reason="CPython 3.10 has no reader of TOML")

SIGNATURE = {
    "obs": {"camera 1": ArraySpec((8, 84, 84), np.dtype("uint8"), "camera 1")},
    "parts": [ArraySpec((8, None), np.dtype("float32"), "0"), ArraySpec((8,), np.dtype("int64"), "1")],
}
TABLES = [
    rw.TableConfig.replay("replay", 50_000, learning_starts=500, batch_size=64, train_frequency=8),
    rw.TableConfig("prio.1", 10, rw.Prioritized(0.6), "lifo", rw.SampleToInsertRatio(0.5, 3, (-7.5, 1e18)), 4),
    rw.TableConfig('quoted " \n é', signature=SIGNATURE),
    rw.TableConfig.queue("queue", 7),
    rw.TableConfig.variables("weights"),
]


def run(folder: Path, program: str, *arguments: str) -> Result:
    file = folder / "program.py"
    file.write_text(program)
    return CliRunner().invoke(commands, ["tables", str(file), *arguments])


def test_toml_has_every_rule_of_every_table() -> None:
    found = tomllib.loads(tables_to_toml(TABLES))["tables"]
    assert [table_from_dict(name, values) for name, values in found.items()] == TABLES


PROGRAM = """
import argparse
import beside
import reverb_writer as rw
def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", type=int)
    size = parser.parse_args().size
    try:
        print("my program")
        replay = rw.TableConfig.replay("replay", size, learning_starts=50, batch_size=32, train_frequency=4)
        with rw.LocalServer([replay, rw.TableConfig.queue(beside.NAME, 3)]):
            print("never")
    except Exception:
        print("never")
if __name__ == "__main__":
    main()
"""


def test_tables_are_those_of_the_first_server_that_the_program_makes(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("NAME = 'rollouts'\n")
    before = sys.argv, sys.path
    done = run(tmp_path, PROGRAM, "--size", "1000")
    assert done.exit_code == 0, done.output
    assert "my program" in done.stderr
    found = tomllib.loads(done.stdout)["tables"]
    assert found["replay"]["samples_per_insert"] == 8.0  # a batch of 32 for every 4 items
    assert (found["replay"]["rate_limiter"], found["replay"]["max_size"], found["replay"]["min_size"]) == (
        "ratio",
        1000,
        50,
    )
    assert found["rollouts"] == {"max_size": 3, "rate_limiter": "queue"}
    assert (sys.argv, sys.path) == before
    with rw.LocalServer([rw.TableConfig("works as before")]):
        pass


def test_tables_of_a_program_without_a_server_are_its_global_variables(tmp_path: Path) -> None:
    program = "import reverb_writer as rw\nT = rw.TableConfig('a', 5)\nMORE = [T, rw.TableConfig('b', 6)]\n"
    done = run(tmp_path, f"{program}BY_NAME = {{'c': rw.TableConfig('c', 7)}}\n")
    assert {name: one["max_size"] for name, one in tomllib.loads(done.output)["tables"].items()} == {
        "a": 5,
        "b": 6,
        "c": 7,
    }


def test_program_without_tables_is_refused(tmp_path: Path) -> None:
    done = run(tmp_path, "print('hello')")
    assert done.exit_code == 1
    assert "no tables found. The program must make a LocalServer or a ReplayServer" in done.output


def test_server_serves_the_tables_that_are_printed(tmp_path: Path) -> None:
    pytest.importorskip("reverb_writer_server", reason="the server is not installed on this interpreter")
    from reverb_writer_server.config.schema import load

    program = (
        "import reverb_writer as rw\nfrom reverb_writer_server import ReplayServer\n"
        "ReplayServer([rw.TableConfig('t', 9, rate_limiter=rw.SampleToInsertRatio(2.0, 3, 8.0))])\n"
    )
    done = run(tmp_path, program)
    (tmp_path / "server.toml").write_text(done.output)
    (table,) = load(tmp_path / "server.toml", {}, {}).tables
    assert table.config == rw.TableConfig("t", 9, rate_limiter=rw.SampleToInsertRatio(2.0, 3, 8.0))
