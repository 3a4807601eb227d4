"""Each worked example of docs/how-to/from-tf-agents.md is given to TF-Agents and to ours."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tf_agents.replay_buffers import reverb_utils as theirs

from reverb_writer import tf_agents as ours

from .trajectories import CALLS, step, take

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "from-tf-agents.md"
EXAMPLE = re.compile(
    r"^\| (?:[a-d] )?\| `(Trajectory|Episode)\((.*)\)` \| `(.*)` \| (?:`(.*)` )?\| (?:`(.*)` )?\|$", re.MULTILINE
)
OPTIONS: dict[str, dict[str, Any]] = {
    "pad": {"pad_end_of_episodes": True},
    "cover": {"end_of_episode": "cover"},
    "bypass": {"bypass_partial_episodes": True},
}


def written(peer: Any, module: Any, observer: str, arguments: str, calls: str, table: str) -> str:
    """Give an observer the calls of an example, and spell what it writes and where it raises as the example does."""
    numbers = [int(argument) for argument in arguments.split(", ") if argument.isdigit()]
    options: dict[str, Any] = {}
    for argument in arguments.split(", ")[len(numbers) :]:
        options |= OPTIONS[argument]
    names = calls.split()
    found = []
    made = getattr(module, f"ReverbAdd{observer}Observer")(peer, table, *numbers, **options)
    for number, name in enumerate(names):
        first = number == 0 or not names[number - 1].isdigit()
        last = names[number + 1 : number + 2] == ["B"]
        try:
            if name == "reset":
                made.reset(write_cached_steps=True)
            elif name in CALLS:
                CALLS[name](made)
            else:
                made(step(number, first=first, last=last, boundary=name == "B"))
        except ValueError:
            found.append("error")
        with suppress(ValueError):  # refused while closed
            made.flush()
        for item in take(peer, table):
            letters = ["P" if word == "P" else names[int(word.rstrip("B"))] for word in item.label.split()]
            found.append("".join(letters))
    made.close()
    return " ".join(found)


@pytest.mark.parametrize(
    ("observer", "arguments", "calls", "their_items", "our_items"), EXAMPLE.findall(PAGE.read_text("utf-8"))
)
def test_both_write_what_the_page_says(
    peer: Any, observer: str, arguments: str, calls: str, their_items: str, our_items: str
) -> None:
    if "cover" not in arguments:  # TF-Agents has no such mode
        assert written(peer, theirs, observer, arguments, calls, "theirs") == their_items
    assert written(peer, ours, observer, arguments, calls, "ours") == our_items


def test_the_page_has_an_example_of_each_fault() -> None:
    rows = [line for line in PAGE.read_text("utf-8").splitlines() if EXAMPLE.match(line)]
    assert {row[2] for row in rows} == {*"abcd", "|"}
    assert len(rows) == 9
