"""What takes longer than a second draws a bar in a terminal and in a notebook, and nothing in a pipe."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pty = pytest.importorskip("pty", reason="there are no pseudo-terminals here")

ENDS_WITHIN_S = 60
PROGRAM = """
import time
from reverb_writer.progress import progress
with progress("working", 3) as tell:
    for part in range(3):
        time.sleep({part_s})
        tell(f"part {{part}}")
"""


def in_terminal(program: str) -> str:
    """Return what a program writes to its standard error, a terminal."""
    ours, its = pty.openpty()
    with subprocess.Popen([sys.executable, "-c", program], stderr=its) as process:
        os.close(its)
        written = b""
        try:
            while piece := os.read(ours, 4096):
                written += piece
        except OSError:  # Linux's end of a terminal
            pass
        assert process.wait(ENDS_WITHIN_S) == 0
    os.close(ours)
    return written.decode()


def test_bar_is_drawn_in_a_terminal_after_a_second() -> None:
    written = in_terminal(PROGRAM.format(part_s=0.7))
    assert "working" in written
    assert "3/3" in written
    assert "part 2" in written


def test_nothing_is_drawn_in_a_pipe_nor_for_what_is_quick() -> None:
    command = [sys.executable, "-c", PROGRAM.format(part_s=0.7)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=ENDS_WITHIN_S, check=True)
    assert (done.stdout, done.stderr) == ("", "")
    assert in_terminal(PROGRAM.format(part_s=0)) == ""


def test_bar_is_drawn_in_a_notebook() -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    pytest.importorskip("ipywidgets")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(PROGRAM.format(part_s=0.7))])
    client = nbclient.NotebookClient(notebook, timeout=ENDS_WITHIN_S, kernel_name="python3")
    client.execute()
    drawn = [output for state in client.widget_state.values() for output in state.get("outputs", ())]
    assert any("working" in str(output) and "3/3" in str(output) for output in drawn)
