"""Every Python program of the documentation runs as it stands, page by page."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from pages import BLOCK, CHECKS, each_page, runnable

ENDS_WITHIN_S = 250  # TF-Agents takes 50 s on a busy machine


def program(page: str) -> str:
    """Return a page's blocks as one program, and after them its checks."""
    blocks = [text for kind, text in BLOCK.findall(page) if kind == "python"]
    return "\n".join([*blocks, *CHECKS.findall(page)])


def test_a_page_is_run_as_it_stands_and_then_checked() -> None:
    page = "a\n<!-- test:\nassert x\n-->\nb\n```python\nx = 1\n```\n```\nno\n```\n```pycon\n>>> 1\n1\n```\n"
    assert program(page) == "x = 1\n\nassert x\n"


def test_a_page_is_run_as_far_as_its_packages_are_here() -> None:
    assert runnable("a <!-- needs: re --> b <!-- needs: re, no_such_package --> c") == (
        "a <!-- needs: re --> b ",
        ["no_such_package"],
    )


@each_page
def test_every_program_of_a_page_runs(path: Path, tmp_path: Path) -> None:
    page, missing = runnable(path.read_text("utf-8"))
    if re.search(r"^```python$", page, re.MULTILINE):
        file = tmp_path / "page.py"  # a file, because processes that a page spawns import it
        file.write_text(program(page), "utf-8")
        done = subprocess.run(
            [sys.executable, str(file)],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=ENDS_WITHIN_S,
            check=False,
        )
        assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    if missing:
        pytest.skip(f"the rest of the page needs {', '.join(missing)}")
