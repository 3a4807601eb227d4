"""Every command line of the documentation is one that the commands accept."""

from __future__ import annotations

import importlib
import re
import shlex
from pathlib import Path

import pytest

click = pytest.importorskip("click")

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^( *)```[^\n`]*\n(.*?)^\1```", re.DOTALL | re.MULTILINE)
INLINE = re.compile(r"`(reverb-writer(?:-server)? [^`]+)`")
GROUPS = {"reverb-writer": "reverb_writer.cli", "reverb-writer-server": "reverb_writer_server.cli"}


def command_lines(page: str) -> list[str]:
    """Return what stands in blocks at the beginning of a line, and between backticks in the text."""
    in_blocks = [line.strip() for _, block in BLOCK.findall(page) for line in block.splitlines()]
    candidates = [*in_blocks, *INLINE.findall(BLOCK.sub("", page).replace("\n", " "))]
    return [line.removeprefix("$ ") for line in candidates if re.match(r"(\$ )?reverb-writer(-server)? ", line)]


LINES = sorted({line for page in PAGES for line in command_lines(page.read_text("utf-8"))})


def check(line: str) -> None:
    """Raise what click says of a command line; nothing is run."""
    program, *arguments = shlex.split(line, comments=True)
    command = importlib.import_module(GROUPS[program]).commands
    context = click.Context(command, info_name=program)
    while isinstance(command, click.Group) and arguments and not arguments[0].startswith("-"):
        name, *arguments = arguments
        found = command.get_command(context, name.partition("|")[0])
        assert found is not None, f"{program} has no command {name}"
        command = found
        context = click.Context(command, info_name=name, parent=context)
    _, rest, _ = command.make_parser(context).parse_args(arguments)  # neither types nor files, which need not be here
    assert not rest, f"{line}: {rest} is too much"


def test_lines_are_found_and_wrong_ones_refused() -> None:
    assert command_lines("a `reverb-writer status X`\n```\nreverb-writer local  # b\nother\n```\n") == [
        "reverb-writer local  # b",
        "reverb-writer status X",
    ]
    with pytest.raises(click.ClickException):
        check("reverb-writer status localhost:8000 --no-such-option")
    with pytest.raises(AssertionError):
        check("reverb-writer no-such-command")


@pytest.mark.parametrize("line", LINES)
def test_command_line_is_accepted(line: str) -> None:
    if line.startswith("reverb-writer-server"):
        pytest.importorskip("reverb_writer_server")
    check(line)
