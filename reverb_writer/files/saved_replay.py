"""The folder of a server's checkpoints, and the items of one checkpoint as bytes of Reverb's messages.

    FOLDER/
      OWNER.json     if `reverb-writer-server` has used the folder
      kept/          checkpoints, named by a number, which orders them, and the time of their end
        00000042-20260801T120000.123456Z/
          the files of a Reverb checkpoint, see `tfrecord`

`LocalServer` and `reverb-writer-server` write such folders, and read each other's. Reverb's own server writes
checkpoints, named by the time, directly into the folder.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from reverb_writer.errors import FormatError
from reverb_writer.files.tfrecord import CHUNKS, DONE, FILES, ITEMS, TABLES, read_messages
from reverb_writer.protocol import messages, signatures
from reverb_writer.tables import SAVES
from reverb_writer.tables.saves import NO_SAVE, read_saves

OWNER, KEPT = "OWNER.json", "kept"
PARTIAL = ".partial-"  # prefix of entries of `kept` that are being written or deleted
NAME = re.compile(r"(?:(\d{8,})-)?\d{8}T\d{6}\.\d{6}Z")  # earlier versions wrote names without a number


def checkpoint_name(sequence: int, at: datetime) -> str:
    """Return the name of a checkpoint with number `sequence`, finished at `at`."""
    return f"{sequence:08d}-{at.astimezone(timezone.utc):%Y%m%dT%H%M%S.%fZ}"


def sequence_of(name: str) -> int:
    """Return the number in a checkpoint's name; 0 without a number: such checkpoints are older."""
    named = NAME.fullmatch(name)
    return int(named[1] or 0) if named else 0


@dataclass(frozen=True)
class SavedReplay:
    """A checkpoint; methods raise FormatError if its files are damaged."""

    path: Path  # its folder

    def all_tables(self) -> list[Any]:
        """Return the tables as PriorityTableCheckpoint messages, the reserved table of `tables.saves` included."""
        return [table for table, _ in read_messages(self.path / TABLES, messages.PriorityTableCheckpoint)]

    def tables(self) -> list[Any]:
        """Return the tables as PriorityTableCheckpoint messages, without the reserved table."""
        return [table for table in self.all_tables() if table.table_name != SAVES]

    def save(self) -> tuple[str, int]:
        """Return the name by which writers know the save: its server's life, and a number; 0 if none was counted."""
        for table in self.all_tables():
            if table.table_name == SAVES:
                number = table.rate_limiter.insert_count
                return read_saves(number, 0, signatures.decode(table.signature)).life, number
        return NO_SAVE

    def signatures(self) -> dict[str, Any]:
        """Return the nest of each table's items, None if it is unknown, by table name."""
        return {table.table_name: signatures.decode(table.signature) for table in self.tables()}

    def parsed_items(self, message: Any) -> Iterator[Any]:
        """Yield the items, by table, oldest first, as `message`: a class that can parse PrioritizedItem."""
        return (item for item, _ in read_messages(self.path / ITEMS, message))

    def chunks(self) -> Iterator[tuple[Any, bytes]]:
        """Yield the chunks as ChunkData messages, each with its bytes."""
        return read_messages(self.path / CHUNKS, messages.ChunkData)


def open_saved(path: Path) -> SavedReplay:
    """Find a checkpoint: the folder itself, or the newest complete one in it; raises FormatError if there is none."""
    try:
        if (path / DONE).is_file():
            found = [path]
        else:
            folder = path / KEPT if (path / KEPT).is_dir() else path
            found = [done.parent for done in folder.glob(f"*/{DONE}") if done.parent.name[0] != "."]
    except OSError as error:
        raise FormatError(f"{path}: cannot be read ({error.strerror}).") from error
    if not found:
        raise FormatError(f"{path}: is no checkpoint, and has none in it. Name the folder of a server's checkpoints.")
    newest = max(found, key=lambda one: (sequence_of(one.name), one.name))  # without a number the name is the time
    if missing := [name for name in FILES if not (newest / name).is_file()]:
        raise FormatError(f"{newest}: {', '.join(missing)} missing. It is incomplete; use another one.")
    return SavedReplay(newest)
