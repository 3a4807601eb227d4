"""Every Python program of the documentation and of README.md runs as it stands, and the notebook."""

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


ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text("utf-8")
NOTEBOOK = ROOT / "examples/first_steps.ipynb"
MAX_LINES = 152
README_ENDS_WITHIN_S = 100


ONE_PROCESS, SEVERAL = re.findall(r"^```python\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


def printed_by(program: str, tmp_path: Path) -> str:
    """Run a program of the README, which logs nothing; return its output."""
    pytest.importorskip("gymnasium")
    file = tmp_path / "program.py"  # a spawned process imports it
    file.write_text(program)
    command = [sys.executable, str(file)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=README_ENDS_WITHIN_S, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if "no batch for" not in line]  # as on a busy machine
    assert not said, "the actors end with the run, without a word"
    return done.stdout


def test_first_program_shows_transitions_and_terminal_states(tmp_path: Path) -> None:
    """A random player of CartPole falls after 20 steps or so."""
    shapes, ends = printed_by(ONE_PROCESS, tmp_path).splitlines()
    assert shapes.startswith("NStepTransitions(observation=float32 [256, 4], action=int64 [256], reward=float32 [256]")
    assert 1 <= int(ends.partition(" ")[0]) <= 40
    assert ends.endswith("transitions to a terminal state")


def test_program_of_several_processes_runs_as_it_stands(tmp_path: Path) -> None:
    assert printed_by(SEVERAL, tmp_path) == "(256, 4) 1.0\n" * 10


def test_notebook_runs_and_shows_the_tables() -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    pytest.importorskip("gymnasium")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in cells), "commit it without outputs"
    *_, shown, _ = (cell.source for cell in cells)
    assert shown == 'print(client.server_info()["replay"])'
    with_outputs = nbclient.NotebookClient(notebook, timeout=README_ENDS_WITHIN_S, kernel_name="python3").execute()
    *_, of_client, _ = (cell.outputs for cell in with_outputs.cells if cell.cell_type == "code")
    (output,) = of_client
    assert re.search(r"name +replay\n", output.text)


def test_figures_stand_on_their_page() -> None:
    rows = re.findall(r"^\|(.*)\|$", README[README.index("## How fast") :].partition("\n## Where")[0], re.MULTILINE)
    figures = (ROOT / "docs/explanation/performance.md").read_text("utf-8")
    found = [number for row in rows[2:] for number in re.findall(r"\b[\d,]+\.?\d*x?\b", row.partition("|")[2])]
    assert len(found) > len(rows)
    assert not [number for number in found if not re.search(rf"(?<![\d.,]){re.escape(number)}(?![\d.,]\d)", figures)]


def test_readme_is_short_and_links_to_what_is_there() -> None:
    assert len(README.splitlines()) <= MAX_LINES
    targets = re.findall(r'\]\(([^)#:]+)\)|(?:src|srcset)="([^"]+)"', README)
    assert len(targets) > 1
    assert not [target for pair in targets for target in pair if target and not (ROOT / target).exists()]
