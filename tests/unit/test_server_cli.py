"""The server's command line: what it is given wrongly is refused in a line, before anything is written."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("reverb_writer_server", reason="the server is not installed on this interpreter")

from reverb_writer_server import cli


@pytest.mark.parametrize("host", ["münchen", ""])
def test_certificate_for_a_host_that_is_none_is_refused(tmp_path: Path, host: str) -> None:
    folder = tmp_path / "certificates"
    with pytest.raises(SystemExit, match=f"`hosts`: must be addresses, or names in ASCII, got '{host}'"):
        cli.main(["certs", str(folder), "--host", host])
    assert not folder.exists()


@pytest.mark.parametrize("timeout", ["-1", "0", "soon"])
def test_time_out_that_is_none_is_wrong_usage(timeout: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ending:
        cli.main(["checkpoints", "save", "localhost:1", "--timeout", timeout])
    assert ending.value.code == 2
    assert "Invalid value for '--timeout'" in capsys.readouterr().err
