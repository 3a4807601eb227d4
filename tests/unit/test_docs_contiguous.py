"""Every drawing and example of docs/contiguous.md is made again and compared."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest

from reverb_writer.slices import By, Short

PAGE = Path(__file__).parents[2] / "docs" / "contiguous.md"


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


@pytest.mark.parametrize("option", [*By, *Short])
def test_every_option_is_on_the_page(option: By | Short) -> None:
    assert f'"{option.value}"' in PAGE.read_text("utf-8")
