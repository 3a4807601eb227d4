"""Every example in pycon of these pages is run again and compared."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


PAGES = sorted(
    page
    for folder in ("explanation", "how-to")
    for page in (DOCS / folder).glob("*.md")
    if "```pycon" in page.read_text("utf-8")
    and page.stem not in {"episodes", "slices", "on-policy", "windows"}  # tests of their own
)


@pytest.mark.parametrize("path", PAGES, ids=[page.stem for page in PAGES])
def test_every_example_prints_what_the_page_says(path: Path) -> None:
    blocks = "\n".join(re.findall(r"^```pycon\n(.*?)^```$", path.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL))
    if "gymnasium" in blocks:
        pytest.importorskip("gymnasium")
    page = doctest.DocTestParser().get_doctest(blocks, {}, path.name, path.name, 0)
    report: list[str] = []
    results = doctest.DocTestRunner(verbose=False).run(page, out=report.append)
    assert results.failed == 0, "".join(report)
