"""Pages, docstrings, comments, errors and log lines keep the rules of English that a machine can check.

CONTRIBUTING.md and docs/reference/glossary.md have the words. Each rule has sentences that it finds and passes.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
CODE = sorted(path for folder in ("examples", "reverb_writer", "server") for path in (ROOT / folder).rglob("*.py"))
PAGES = sorted(
    path
    for pattern in ("*.md", "*/README.md", "docs/**/*.md")
    for path in ROOT.glob(pattern)
    if not {"_build", "node_modules"} & set(path.parts) and not any(part.startswith(".venv") for part in path.parts)
)
MANY = r"(?:second|minute|batch|step|item|sample|call|environment|table|server|actor|column|slice)"
BEGINNING = r"(?:^(?:[#*|-]+ )?|(?<=[.!?:;] )|(?<=\| ))"
RULES = {
    "a sentence begins with a free relative": BEGINNING + r"(?:What|Whatever|Whoever|Whichever)\b(?![^.!?]*\?)",
    "`for` means because": r"[,;] for (?:it|they|there|he|we|nothing|nobody) (?!\w+ing\b)",
    "`a` means per": rf"\bone an? {MANY}\b|\b\d(?:[\d,.]*\d)?(?: (?!of|in|as|from|for|to|by|is)[a-z]+)? an? {MANY}\b",
    "`is there` means exists": r"\b(?:is|are|was|were|be) there\b",
    "`likewise`": r"\b[Ll]ikewise\b",
    "`of them`": r"\bof them\b",
    "a sentence begins with `Of`": BEGINNING + r"Of\b(?! (?:course|arrays))",
    "an adverb trails": r"\bat most(?=[.;:,)]|$)|,? too(?=[.;:)]|$)|\ball the same\b",
    "`so many`": r"\bso many\b",
    "a figurative verb": r"\b(?:go|goes|went|comes|came|come) on\b|\bhas come\b|\btells? (?:of|how|wh\w+)\b",
    "`want of`": r"\bwant of\b",
}
BANNED = (
    """
    anew, as people have it, does as well, end of the line, is no key, lane, lanes, last words, lessons, let go,
    lets go, may still name, nobody, of no account, play no part, plays no part, shelf, somebody, squeezed, tells of,
    that there is not, what became of, what is there, what there is, who has, whoever
""".replace("\n    ", " ")
    .strip()
    .split(", ")
)


def texts_of_code(source: str) -> Iterator[str]:
    """Yield strings and comments of a module; a paragraph of a docstring is one line, a drawing keeps its lines."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield re.sub(r"(?<=\S)\n[ \t]*(?=[\w`(])", " ", node.value)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string.lstrip("# ")


def texts_of_page(page: str) -> Iterator[str]:
    """Yield the prose of a page, without blocks and code; a paragraph is one line."""
    prose = re.sub(r"^( *)```.*?^\1```", "", page, flags=re.DOTALL | re.MULTILINE)
    yield re.sub(r"(?<=\S)\n[ \t]*(?=[\w`(\[])", " ", re.sub(r"`[^`\n]+`", "`code`", prose))


def broken_in(text: str) -> list[str]:
    """Return the places of a text that break a rule, each with the rule."""
    found = [
        f"{rule}: {text[max(0, match.start() - 30) : match.end() + 40]!r}"
        for rule, pattern in RULES.items()
        for match in re.finditer(pattern, text, re.MULTILINE)
    ]
    plain = " ".join(text.lower().split())
    return found + [f"banned: {phrase}" for phrase in BANNED if re.search(rf"\b{phrase}\b", plain)]


@pytest.mark.parametrize(
    ("rule", "broken", "kept"),
    [
        ("a sentence begins with a free relative", "Sent. What is left is lost.", "The rest is lost. What is left?"),
        ("a sentence begins with a free relative", "## What it costs", "## Cost"),
        ("`for` means because", "Refused, for it keeps one version.", "Refused, for example, for its size."),
        ("`a` means per", "one an environment; 256 a batch", "one per environment; a batch of 256"),
        ("`a` means per", "20,000 items a second", "20,000 items per second"),
        ("`is there` means exists", "until the table is there", "until the table exists; there is one"),
        ("`likewise`", "Likewise for rows.", "The same holds for rows."),
        ("`of them`", "one of them ends", "a dataset ends"),
        ("a sentence begins with `Of`", "Of several servers all get it.", "All servers get it, most of several."),
        ("an adverb trails", "Two seconds at most, too.", "At most two seconds, at most once."),
        ("`so many`", "Ask for so many.", "Request `num_samples` samples."),
        ("a figurative verb", "It goes on, and tells how it fares.", "It continues, and reports its state."),
        ("`want of`", "ended for want of memory", "ended because memory ran out; a program may want a file"),
    ],
)
def test_each_rule_finds_what_breaks_it(rule: str, broken: str, kept: str) -> None:
    assert {found.split(": ")[0] for found in broken_in(broken)} == {rule}
    assert not broken_in(kept)


def test_phrases_are_found_across_lines_in_messages_and_comments() -> None:
    source = '"""Let\n  go of it."""\nraise ValueError(f"{1}: is no key.")  # anew\n'
    found = [place for text in texts_of_code(source) for place in broken_in(text)]
    assert found == ["banned: let go", "banned: is no key", "banned: anew"]
    assert not [place for text in texts_of_page("a\n```\nlet go\n```\na plane") for place in broken_in(text)]


@pytest.mark.parametrize("path", [*CODE, *PAGES], ids=lambda path: str(path.relative_to(ROOT)))
def test_rules_are_kept(path: Path) -> None:
    text = path.read_text("utf-8")
    texts = texts_of_code(text) if path.suffix == ".py" else texts_of_page(text)
    assert not [place for each in texts for place in broken_in(each)]
