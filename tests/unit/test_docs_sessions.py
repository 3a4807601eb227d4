"""Every drawing and example of the documentation is made again and compared, page by page, in its order."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest
from pages import BLOCK, ROOT, each_page, runnable

from reverb_writer.slices import By, Short
from reverb_writer.windows import EndOfEpisode

WINDOWS = ROOT / "docs/explanation/windows.md"


@pytest.mark.filterwarnings("ignore:`stride_length`")  # one drawing shows S > L
@each_page
def test_every_session_of_a_page_prints_what_the_page_says(path: Path) -> None:
    page, missing = runnable(path.read_text("utf-8"))
    blocks = [match[2] for match in BLOCK.finditer(page) if match[1] == "pycon"]
    session = doctest.DocTestParser().get_doctest("\n".join(blocks), {}, path.name, str(path), 0)
    report: list[str] = []
    results = doctest.DocTestRunner(verbose=False).run(session, out=report.append)
    assert results.failed == 0, "".join(report)
    if missing:
        pytest.skip(f"the rest of the page needs {', '.join(missing)}")


def test_every_block_about_windows_is_a_session() -> None:
    assert {*re.findall(r"^```(.*)\n(?:.*\n)*?```$", WINDOWS.read_text("utf-8"), re.MULTILINE)} == {"pycon"}


@pytest.mark.parametrize("mode", EndOfEpisode)
def test_every_mode_is_drawn_for_an_unaligned_and_for_a_short_episode(mode: EndOfEpisode) -> None:
    section = WINDOWS.read_text("utf-8").split(f"\n### {mode.name}\n")[1].split("\n#")[0]
    calls = re.findall(r'>>> print\(WindowSpec\(4, .*end_of_episode="(\w+)"\)\.preview\((\d+)\)\)', section)
    assert {*calls} >= {(mode.value, "6"), (mode.value, "3")}
    assert {name for name, _ in calls} == {mode.value}


def test_table_of_modes_is_the_one_of_the_docstring() -> None:
    assert EndOfEpisode.__doc__ is not None
    rows = [row.strip() for row in EndOfEpisode.__doc__.splitlines() if row.strip().startswith("|")]
    assert "\n".join(rows) in WINDOWS.read_text("utf-8")


@pytest.mark.parametrize("option", [*By, *Short])
def test_every_option_of_slices_is_on_their_page(option: By | Short) -> None:
    assert f'"{option.value}"' in (ROOT / "docs/how-to/slices.md").read_text("utf-8")
