"""The journal of an import: what was confirmed is known again, wherever a write was cut short."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from reverb_writer.errors import SpecError
from reverb_writer.files.importing import Journal

PURPOSE = {"tables": ["replay"], "length": 3}
FIRST_LINE = json.dumps(PURPOSE)
NAMES = ["t1", "t2"]
WHOLE = f'{FIRST_LINE}\n"t1"\n"t2"\n'


def complete_names(text: str) -> set[str]:
    return {name for name in NAMES if f'"{name}"' in text}


@pytest.mark.parametrize("size", [0, *range(len(FIRST_LINE), len(WHOLE) + 1)])
def test_names_that_are_added_after_a_torn_write_are_known_by_the_next_import(tmp_path: Path, size: int) -> None:
    path = tmp_path / "journal"
    path.write_text(WHOLE[:size])
    journal = Journal(path, PURPOSE, tmp_path)
    assert journal.done == complete_names(WHOLE[:size])
    journal.add(["t2"])
    journal.add(["t3", "t4"])
    assert Journal(path, PURPOSE, tmp_path).done == complete_names(WHOLE[:size]) | {"t2", "t3", "t4"}


@pytest.mark.parametrize("content", [FIRST_LINE[:9].encode(), FIRST_LINE[:-1].encode(), b"notes\n", b"\xff\xfe\n"])
def test_file_that_does_not_begin_as_a_journal_is_refused_and_stays(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "journal"
    path.write_bytes(content)
    with pytest.raises(SpecError, match=r"first line cannot be read.* remove the file.* name another file"):
        Journal(path, PURPOSE, tmp_path)
    assert path.read_bytes() == content
