"""Each drawing, session and command line of the documentation is made again, or accepted by its command."""

from __future__ import annotations

import doctest
import importlib
import re
import shlex
from pathlib import Path

import click
import pytest
from pages import BLOCK, ROOT, each_page, runnable

from reverb_writer.windows import EndOfEpisode

WINDOWS = ROOT / "docs/explanation/windows.md"


@pytest.mark.filterwarnings("ignore:`stride_length`")  # one drawing shows S > L
@each_page
def test_every_session_of_a_page_prints_what_the_page_says(path: Path) -> None:
    page, missing = runnable(path.read_text("utf-8"))
    blocks = [match[2] for match in BLOCK.finditer(page) if match[1] == "pycon"]
    session = doctest.DocTestParser().get_doctest("\n".join(blocks), {}, path.name, str(path), 0)
    report: list[str] = []
    results = doctest.DocTestRunner(verbose=False).run(session, out=report.append)
    assert results.failed == 0, "".join(report)
    if missing:
        pytest.skip(f"the rest of the page needs {', '.join(missing)}")


@pytest.mark.parametrize("mode", EndOfEpisode)
def test_every_mode_is_drawn_for_an_unaligned_and_for_a_short_episode(mode: EndOfEpisode) -> None:
    section = WINDOWS.read_text("utf-8").split(f"\n### {mode.name}\n")[1].split("\n#")[0]
    calls = re.findall(r'>>> print\(WindowSpec\(4, .*end_of_episode="(\w+)"\)\.preview\((\d+)\)\)', section)
    assert {*calls} >= {(mode.value, "6"), (mode.value, "3")}
    assert {name for name, _ in calls} == {mode.value}


def test_table_of_modes_is_the_one_of_the_docstring() -> None:
    assert EndOfEpisode.__doc__ is not None
    rows = [row.strip() for row in EndOfEpisode.__doc__.splitlines() if row.strip().startswith("|")]
    assert "\n".join(rows) in WINDOWS.read_text("utf-8")


WITH_README = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCED = re.compile(r"^( *)```[^\n`]*\n(.*?)^\1```", re.DOTALL | re.MULTILINE)
INLINE = re.compile(r"`(reverb-writer(?:-server)? [^`]+)`")
GROUPS = {"reverb-writer": "reverb_writer.cli", "reverb-writer-server": "reverb_writer_server.cli"}


def command_lines(page: str) -> list[str]:
    """Return what stands in blocks at the beginning of a line, and between backticks in the text."""
    in_blocks = [line.strip() for _, block in FENCED.findall(page) for line in block.splitlines()]
    candidates = [*in_blocks, *INLINE.findall(FENCED.sub("", page).replace("\n", " "))]
    return [line.removeprefix("$ ") for line in candidates if re.match(r"(\$ )?reverb-writer(-server)? ", line)]


LINES = sorted({line for page in WITH_README for line in command_lines(page.read_text("utf-8"))})


def check_line(line: str) -> None:
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
        check_line("reverb-writer status localhost:8000 --no-such-option")
    with pytest.raises(AssertionError):
        check_line("reverb-writer no-such-command")


@pytest.mark.parametrize("line", LINES)
def test_command_line_is_accepted(line: str) -> None:
    if line.startswith("reverb-writer-server"):
        pytest.importorskip("reverb_writer_server")
    check_line(line)
