"""Every example in pycon of these pages is run again and compared."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize(
    ("name", "needs"),
    [
        ("accumulator.md", "numpy"),
        ("environments.md", "gymnasium"),
        ("returns.md", "numpy"),
        ("steps.md", "gymnasium"),
        ("targets.md", "gymnasium"),
    ],
)
def test_every_example_prints_what_the_page_says(name: str, needs: str) -> None:
    pytest.importorskip(needs)
    blocks = re.findall(r"^```pycon\n(.*?)^```$", (DOCS / name).read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    assert blocks
    page = doctest.DocTestParser().get_doctest("\n".join(blocks), {}, name, name, 0)
    report: list[str] = []
    results = doctest.DocTestRunner(verbose=False).run(page, out=report.append)
    assert results.failed == 0, "".join(report)
