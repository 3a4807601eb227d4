"""Every drawing and example of docs/how-to/slices.md and docs/how-to/on-policy.md is made again and compared."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest

from reverb_writer.slices import By, Short

DOCS = Path(__file__).parents[2] / "docs"
CONTIGUOUS, ROLLOUTS = DOCS / "how-to/slices.md", DOCS / "how-to/on-policy.md"


def sessions(path: Path) -> list[str]:
    """Read the page's fenced blocks that are sessions of Python."""
    return re.findall(r"^```pycon\n(.*?)^```$", path.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("path", [CONTIGUOUS, ROLLOUTS], ids=lambda path: path.stem)
def test_every_session_is_what_the_code_prints(path: Path) -> None:
    page = doctest.DocTestParser().get_doctest("\n".join(sessions(path)), {}, path.name, str(path), 0)
    report: list[str] = []
    results = doctest.DocTestRunner(verbose=False).run(page, out=report.append)
    assert results.failed == 0, "".join(report)


@pytest.mark.parametrize("option", [*By, *Short])
def test_every_option_is_on_the_page(option: By | Short) -> None:
    assert f'"{option.value}"' in CONTIGUOUS.read_text("utf-8")
