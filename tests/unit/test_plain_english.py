"""Docstrings, errors and log lines use standard English and the field's nouns (docs/reference/glossary.md)."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BANNED = [
    "anew", "as people have it", "does as well", "end of the line", "is no key", "lane", "lanes", "last words",
    "lessons", "let go", "lets go", "may still name", "nobody", "of no account", "play no part", "plays no part",
    "shelf", "somebody", "squeezed", "tells of", "that there is not", "what became of", "what is there",
    "what there is", "who has", "whoever",
]  # fmt: skip
FILES = sorted(
    path.relative_to(ROOT)
    for folder in ("reverb_writer", "server/reverb_writer_server")
    for path in (ROOT / folder).rglob("*.py")
)


def banned_in(source: str) -> set[str]:
    """Return the banned phrases in the strings of a module: docstrings, and the literal parts of messages."""
    nodes = ast.walk(ast.parse(source))
    strings = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    text = "\n".join(" ".join(string.lower().split()) for string in strings)
    return {phrase for phrase in BANNED if re.search(rf"\b{phrase}\b", text)}


def test_phrases_are_found_across_lines_and_in_messages() -> None:
    assert banned_in('"""Let\n  go of it."""\nraise ValueError(f"{1}: is no key.")') == {"let go", "is no key"}
    assert banned_in('plane = "a plane"  # let go') == set()


@pytest.mark.parametrize("path", FILES, ids=str)
def test_no_banned_phrase_in_docstrings_errors_and_log_lines(path: Path) -> None:
    assert banned_in((ROOT / path).read_text()) == set()
