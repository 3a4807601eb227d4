"""The server's commands: what they are given wrongly is refused in a line, before anything is written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from reverb_writer_server import cli
from service_process import run_command


def code_of(*arguments: str) -> Any:
    """Run a command to its end; return its code, or the text that it ends with."""
    with pytest.raises(SystemExit) as ending:
        cli.main([*arguments])
    return ending.value.code


@pytest.mark.parametrize("host", ["münchen", ""])
def test_certificate_for_a_host_that_is_none_is_refused(tmp_path: Path, host: str) -> None:
    folder = tmp_path / "certificates"
    with pytest.raises(SystemExit, match=f"`hosts` must be addresses, or names in ASCII, got '{host}'"):
        cli.main(["certs", str(folder), "--host", host])
    assert not folder.exists()


@pytest.mark.parametrize("timeout", ["-1", "0", "soon"])
def test_time_out_that_is_none_is_wrong_usage(timeout: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of("checkpoints", "save", "localhost:1", "--timeout", timeout) == 2
    assert "Invalid value for '--timeout'" in capsys.readouterr().err


def test_option_without_a_command_is_one_of_serve(capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of("--no-such-option") == 2
    assert " serve [OPTIONS]" in capsys.readouterr().err


def test_folder_of_checkpoints_is_told_from_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ("20260801T120000.123456Z", "20260802T120000.123456Z")
    for name in names:
        (tmp_path / "kept" / name).mkdir(parents=True)
        (tmp_path / "kept" / name / "DONE").touch()
    for folder in (tmp_path, tmp_path / "kept"):
        assert code_of("checkpoints", "inspect", str(folder)) == 1
        said = f"is not a checkpoint, but a folder with 2 in it. Name one, such as {tmp_path / 'kept' / names[1]}."
        assert capsys.readouterr().err == f"{folder.name}: {folder}: {said}\n"


def test_folder_without_any_checkpoint_and_missing_folder_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert code_of("checkpoints", "inspect", str(tmp_path), str(tmp_path / "nothing")) == 1
    first, second = capsys.readouterr().err.splitlines()
    assert "is not a checkpoint: it has none of" in first
    assert "the folder does not exist" in second


LONG_DOUBLE = """
[tables.replay.signature]
reward = "longdouble"
"""
TWICE = """
tables: { table_name: "a" max_size: 5 sampler: { fifo: true } remover: { fifo: true }
          rate_limiter: { min_size_to_sample: 1 samples_per_insert: 1 min_diff: -1e300 max_diff: 1e300 } }
"""
IN_FOLDER = """
[checkpoints]
directory = "{folder}/checkpoints"
"""


def with_stranger(folder: Path) -> None:
    folder.mkdir()
    (folder / "thesis.tex").touch()


def with_incomplete(folder: Path) -> None:
    (folder / "kept" / "20260801T120000.123456Z").mkdir(parents=True)
    (folder / "OWNER.json").write_text("{}")


@pytest.mark.parametrize(
    ("text", "prepare", "message"),
    [
        pytest.param(LONG_DOUBLE, Path.exists, "longdouble", id="a dtype that Reverb does not have"),
        pytest.param(TWICE * 2, Path.exists, "more than once", id="a table twice"),
        pytest.param(IN_FOLDER, with_stranger, "found thesis.tex", id="a folder of somebody else"),
        pytest.param(IN_FOLDER, Path.touch, "/checkpoints: is a file, expected a folder", id="a file for a folder"),
        pytest.param(
            IN_FOLDER.replace("/checkpoints", "/checkpoints/of/mine"),
            Path.touch,
            "/checkpoints: is a file, expected a folder",
            id="a folder in a file",
        ),
        pytest.param(
            f'{IN_FOLDER}restore = "2026Z"\n', Path.exists, "has no checkpoint `2026Z`", id="no such checkpoint"
        ),
        pytest.param(
            IN_FOLDER,
            with_incomplete,
            "cannot be restored: tables.tfrecord, items.tfrecord",
            id="only incomplete checkpoints",
        ),
    ],
)
def test_validate_refuses_what_serve_refuses_and_leaves_everything_as_it_is(
    tmp_path: Path, text: str, prepare: Callable[[Path], object], message: str
) -> None:
    prepare(tmp_path / "checkpoints")
    file = tmp_path / ("server.textproto" if text == TWICE * 2 else "server.toml")
    file.write_text(text.replace("{folder}", str(tmp_path)))
    before = sorted(tmp_path.rglob("*"))
    assert message in code_of("validate", str(file))
    assert sorted(tmp_path.rglob("*")) == before
    served = run_command("serve", "--config", str(file), environment={"REVERB_WRITER__PORT": "0"})
    assert served.returncode != 0
    assert message in served.stderr


def test_validate_says_what_would_be_served(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "server.toml"
    file.write_text(IN_FOLDER.format(folder=tmp_path))
    assert code_of("validate", str(file)) == 0
    assert "table `replay`:" in capsys.readouterr().out
    assert not (tmp_path / "checkpoints").exists()
