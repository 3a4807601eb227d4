"""The documentation site. Sphinx reads the Markdown of this folder and the docstrings of the packages: `make docs`."""

from __future__ import annotations

import posixpath
import re
from typing import Any

import reverb_writer

project = "reverb-writer"
copyright = "The reverb-writer authors"  # noqa: A001  # Sphinx's name
version = release = reverb_writer.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_click",
    "sphinx_copybutton",
]
exclude_patterns = ["_build"]

myst_enable_extensions = ["colon_fence", "deflist", "linkify"]
myst_heading_anchors = 4

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "show-inheritance": True}
autoclass_content = "class"
napoleon_google_docstring = True
napoleon_numpy_docstring = False

html_theme = "furo"
html_title = f"reverb-writer {version}"
html_static_path = ["_static"]
html_show_sphinx = False
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

# Files outside this folder that pages link to, and the pages that show them on the site.
_SHOWN_AS = {
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "SECURITY.md": "project/security.md",
    "README.md": "index.md",
}
_LINK = re.compile(r"\]\(([^)#:]+)(#[^)]*)?\)")


def _relink(source: list[str], folder: str) -> None:
    """Turn links that are right for a file of the repository into links that are right for a page of the site."""

    def relinked(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, match[1]))
        if target.startswith("examples"):
            target = "docs/project/examples.md"
        elif target in _SHOWN_AS:
            target = f"docs/{_SHOWN_AS[target]}"
        inside = target.startswith("docs/")
        return f"](/{target.removeprefix('docs/')}{match[2] or ''})" if inside else match[0]

    source[0] = _LINK.sub(relinked, source[0])


def setup(app: Any) -> None:
    """Register what this site adds to Sphinx."""
    app.connect("source-read", lambda _, page, source: _relink(source, posixpath.dirname(f"docs/{page}")))
    app.connect(
        "include-read",
        lambda _, path, __, source: _relink(source, "examples" if "examples" in path.parts else ""),
    )
