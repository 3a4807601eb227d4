"""Every example of docs/how-to/episodes.md is made again and compared."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs/how-to/episodes.md"


def test_every_example_is_what_the_code_prints() -> None:
    pytest.importorskip("gymnasium", minversion="1.0")
    blocks = re.findall(r"^```pycon\n(.*?)^```$", PAGE.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    page = doctest.DocTestParser().get_doctest("\n".join(blocks), {}, PAGE.name, str(PAGE), 0)
    report: list[str] = []
    results = doctest.DocTestRunner(verbose=False).run(page, out=report.append)
    assert results.failed == 0, "".join(report)
    assert results.attempted > 30
