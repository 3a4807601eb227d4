"""The pages of the documentation, as far as the packages of this interpreter reach.

Comments that the site does not show are for tests. `<!-- needs: a -->` names packages that everything after it needs:
without them, the page runs as far as that. `<!-- test: ... -->` holds checks, which run after all blocks of the page.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
BLOCK = re.compile(r"^```(python|pycon)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
CHECKS = re.compile(r"^<!-- test:\n(.*?)^-->$", re.DOTALL | re.MULTILINE)
NEEDS = re.compile(r"<!-- needs: (.*?) -->")

each_page = pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))


def runnable(page: str) -> tuple[str, list[str]]:
    """Return a page up to the first package that is missing here, and the packages that are missing there."""
    for needs in NEEDS.finditer(page):
        missing = [package for package in needs[1].split(", ") if importlib.util.find_spec(package) is None]
        if missing:
            return page[: needs.start()], missing
    return page, []
