"""The server's command line: what it is given wrongly is refused in a line, before anything is written."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("reverb_writer_server", reason="the server is not installed on this interpreter")

from reverb_writer_server import cli


@pytest.mark.parametrize("host", ["münchen", ""])
def test_certificate_for_a_host_that_is_none_is_refused(tmp_path: Path, host: str) -> None:
    folder = tmp_path / "certificates"
    with pytest.raises(SystemExit, match=f"`hosts` must be addresses, or names in ASCII, got '{host}'"):
        cli.main(["certs", str(folder), "--host", host])
    assert not folder.exists()


@pytest.mark.parametrize("timeout", ["-1", "0", "soon"])
def test_time_out_that_is_none_is_wrong_usage(timeout: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ending:
        cli.main(["checkpoints", "save", "localhost:1", "--timeout", timeout])
    assert ending.value.code == 2
    assert "Invalid value for '--timeout'" in capsys.readouterr().err


def test_folder_of_checkpoints_is_told_from_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ("20260801T120000.123456Z", "20260802T120000.123456Z")
    for name in names:
        (tmp_path / "kept" / name).mkdir(parents=True)
        (tmp_path / "kept" / name / "DONE").touch()
    for folder in (tmp_path, tmp_path / "kept"):
        with pytest.raises(SystemExit) as ending:
            cli.main(["checkpoints", "inspect", str(folder)])
        assert ending.value.code == 1
        said = f"is not a checkpoint, but a folder with 2 in it. Name one, such as {tmp_path / 'kept' / names[1]}."
        assert capsys.readouterr().err == f"{folder.name}: {folder}: {said}\n"


def test_folder_without_any_checkpoint_and_missing_folder_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ending:
        cli.main(["checkpoints", "inspect", str(tmp_path), str(tmp_path / "nothing")])
    assert ending.value.code == 1
    first, second = capsys.readouterr().err.splitlines()
    assert "is not a checkpoint: it has none of" in first
    assert "the folder does not exist" in second
