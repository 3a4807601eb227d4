"""The documentation site. Sphinx reads the Markdown of this folder and the docstrings of the packages: `make docs`."""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path
from typing import Any

import reverb_writer

sys.path.insert(0, str(Path(__file__).parents[1] / "server"))  # its dependencies need not be installed here
sys.modules["reverb_writer.returns"] = reverb_writer.returns  # `automodule` imports the name that programs use

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
suppress_warnings = ["ref.python"]  # Sphinx looks for fields such as `mask` in other classes, too, and finds several

myst_enable_extensions = ["colon_fence", "deflist", "linkify"]
myst_heading_anchors = 4
myst_linkify_fuzzy_links = False  # `actor.py` is a file, not a host of Paraguay

linkcheck_ignore = [r"http://(127\.0\.0\.1|localhost)\b"]  # what a reader's own machine serves
linkcheck_timeout = 20

autodoc_mock_imports = ["prometheus_client", "reverb", "tensorflow", "waitress"]
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {
    "members": True,
    "inherited-members": "BaseException, Enum, object, str, tuple",
    "show-inheritance": True,
    "special-members": "__call__",
    "exclude-members": "MiniBatch, Transition",  # a storage's names for records that have entries of their own
}
autoclass_content = "both"  # arguments and errors stand on the constructor
default_role = "code"  # one backtick marks code in our docstrings
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
strip_signature_backslash = True  # else `id_` loses its underscore

html_theme = "furo"
html_title = f"reverb-writer {version}"
html_static_path = ["_static"]
html_favicon = "_static/icon.svg"
html_show_sphinx = False
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

# Files outside this folder that pages link to, and the pages that show them on the site.
_SHOWN_AS = {
    "CHANGELOG.md": "project/contributing.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "SECURITY.md": "deploy/tls.md",
    "README.md": "index.md",
}
_PLURAL = re.compile(r"(`[^`\s][^`]*`)(?=s\b)")  # reStructuredText ends markup before a space only
_PAGE = re.compile(r"`?\bdocs/([\w/-]+)\.md`?")
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


def _examples() -> str:
    """Return a section for each program of `examples/`, as Markdown."""
    folder = Path(__file__).parents[1] / "examples"
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.py"))
    return "".join(
        f"\n## {name}\n\n```{{literalinclude}} ../../examples/{name}\n:language: python\n```\n" for name in names
    )


def _read(_app: Any, page: str, source: list[str]) -> None:
    """Complete the text of a page before it is parsed."""
    if page == "project/examples":
        source[0] += _examples()
    _relink(source, posixpath.dirname(f"docs/{page}"))


def _drawings(_app: Any, _what: str, _name: str, _of: Any, _options: Any, lines: list[str]) -> None:
    """Show indented blocks and tables of a docstring as they stand there; reStructuredText would flow them together.

    Pages that a docstring names become links.
    """
    shown: list[str] = []
    below, is_code = 0, False
    for line in lines:
        indent = len(line) - len(line.lstrip())
        after_blank = not shown or not shown[-1]
        if not line or (is_code and (indent > below or line.startswith("|"))):
            shown.append(f"    {line}" if line.startswith("|") else line)
            continue
        is_code = line.startswith("|") or (after_blank and indent > below and not line.lstrip().startswith(">>>"))
        if is_code:
            shown += ["", " " * below + "::", "", f"    {line}" if line.startswith("|") else line]
        elif line == "Example:":
            is_code, below = True, 0
            shown += ["Example::", ""]
        else:
            below = indent
            shown.append(line)
    lines[:] = [_PAGE.sub(r":doc:`/\1`", _PLURAL.sub(r"\1\\ ", line)) for line in shown]


def _is_field_of_a_tuple(_app: Any, _what: str, _name: str, member: Any, _skip: bool, _options: Any) -> bool | None:
    """Leave out what a named tuple says of its fields by itself: the docstring of the class describes them."""
    return True if type(member).__name__ == "_tuplegetter" else None


def setup(app: Any) -> None:
    """Register what this site adds to Sphinx."""
    app.connect("source-read", _read)
    app.connect(
        "include-read",
        lambda _, path, __, source: _relink(source, "examples" if "examples" in path.parts else ""),
    )
    app.connect("autodoc-process-docstring", _drawings, priority=400)  # before napoleon
    app.connect("autodoc-skip-member", _is_field_of_a_tuple)
