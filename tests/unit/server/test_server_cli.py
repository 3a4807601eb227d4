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


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_folder_of_checkpoints_is_told_from_a_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    names = ("20260801T120000.123456Z", "20260802T120000.123456Z")
    for name in names:
        (tmp_path / "kept" / name).mkdir(parents=True)
        (tmp_path / "kept" / name / "DONE").touch()
    for folder in (tmp_path, tmp_path / "kept"):
        with pytest.raises(SystemExit) as ending:
            cli.main(["checkpoints", command, str(folder)])
        told = f"{ending.value.code}{capsys.readouterr().err}"
        assert (
            f"is not a checkpoint, but a folder with 2 in it. Name one, such as {tmp_path / 'kept' / names[1]}." in told
        )
        assert "incomplete" not in told


def test_folder_without_any_checkpoint_and_missing_folder_are_told(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="is not a checkpoint: it has none of"):
        cli.main(["checkpoints", "inspect", str(tmp_path)])
    with pytest.raises(SystemExit, match="the folder does not exist"):
        cli.main(["checkpoints", "inspect", str(tmp_path / "nothing")])
