"""The pages of the documentation, as far as the packages of this interpreter reach.

A page may need what a reader has already: a server, an environment, a network. It says so in comments that the site
does not show. `<!-- test: ... -->` holds Python that runs before the blocks that follow it. `<!-- needs: a -->` names
packages that everything after it needs: without them, the page runs as far as that.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
PIECE = re.compile(r"^```(python|pycon)\n(.*?)^```$|^<!-- test:\n(.*?)^-->$", re.DOTALL | re.MULTILINE)
NEEDS = re.compile(r"<!-- needs: (.*?) -->")

each_page = pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))


def runnable(page: str) -> tuple[str, list[str]]:
    """Return a page up to the first package that is missing here, and the packages that are missing there."""
    for needs in NEEDS.finditer(page):
        missing = [package for package in needs[1].split(", ") if importlib.util.find_spec(package) is None]
        if missing:
            return page[: needs.start()], missing
    return page, []
