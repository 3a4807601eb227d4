"""Every drawing of docs/explanation/windows.md is made again and compared, and its table is the one in the code."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest

from reverb_writer.windows import EndOfEpisode

PAGE = Path(__file__).parents[2] / "docs/explanation/windows.md"

# One drawing shows S > L.
pytestmark = pytest.mark.filterwarnings("ignore:`stride_length`")


def fenced_blocks() -> list[tuple[str, str]]:
    """Read the page's fenced blocks, each as its language and its text."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", PAGE.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)


def test_every_fenced_block_is_what_the_code_prints() -> None:
    blocks = fenced_blocks()
    assert {language for language, _ in blocks} == {"pycon"}
    page = doctest.DocTestParser().get_doctest("\n".join(text for _, text in blocks), {}, PAGE.name, str(PAGE), 0)
    report: list[str] = []
    results = doctest.DocTestRunner(verbose=False).run(page, out=report.append)
    assert results.failed == 0, "".join(report)


@pytest.mark.parametrize("mode", EndOfEpisode)
def test_every_mode_is_drawn_for_an_unaligned_and_for_a_short_episode(mode: EndOfEpisode) -> None:
    section = PAGE.read_text("utf-8").split(f"\n### {mode.name}\n")[1].split("\n#")[0]
    calls = re.findall(r'>>> print\(WindowSpec\(4, .*end_of_episode="(\w+)"\)\.preview\((\d+)\)\)', section)
    assert {*calls} >= {(mode.value, "6"), (mode.value, "3")}
    assert {name for name, _ in calls} == {mode.value}


def test_table_is_the_one_of_the_docstring() -> None:
    assert EndOfEpisode.__doc__ is not None
    rows = [row.strip() for row in EndOfEpisode.__doc__.splitlines() if row.strip().startswith("|")]
    assert "\n".join(rows) in PAGE.read_text("utf-8")
