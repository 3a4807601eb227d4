"""The folder of a server's checkpoints, and the items of one checkpoint as bytes of Reverb's messages.

    FOLDER/
      OWNER.json     if `reverb-writer-server` has used the folder
      kept/          named by a number, which orders them, and the time at which they were finished
        00000042-20260801T120000.123456Z/
          the files of a Reverb checkpoint, as `tfrecord` describes them

`LocalServer` and `reverb-writer-server` have their checkpoints in such folders, and read each other's. Reverb by itself
has the checkpoints directly in the folder, named by the time.
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

OWNER, KEPT = "OWNER.json", "kept"
PARTIAL = ".partial-"  # begins the name of an entry of `kept` that is being written or deleted
NAME = re.compile(r"(?:(\d{8,})-)?\d{8}T\d{6}\.\d{6}Z")  # those without a number are of earlier versions


def checkpoint_name(sequence: int, at: datetime) -> str:
    """Return the name of a checkpoint with a number, finished at a time."""
    return f"{sequence:08d}-{at.astimezone(timezone.utc):%Y%m%dT%H%M%S.%fZ}"


def sequence_of(name: str) -> int:
    """Return the number in the name of a checkpoint; 0 for a name without one, which is older than any with one."""
    named = NAME.fullmatch(name)
    return int(named[1] or 0) if named else 0


@dataclass(frozen=True)
class SavedReplay:
    """A checkpoint; methods raise FormatError if its files are damaged."""

    path: Path  # its folder

    def tables(self) -> list[Any]:
        """Return the tables as PriorityTableCheckpoint messages."""
        return [table for table, _ in read_messages(self.path / TABLES, messages.PriorityTableCheckpoint)]

    def signatures(self) -> dict[str, Any]:
        """Return the nest of each table's items; None where it is not known."""
        return {table.table_name: signatures.decode(table.signature) for table in self.tables()}

    def parsed_items(self, message: Any) -> Iterator[Any]:
        """Yield the items, table by table, the oldest first, as messages of a class that can read PrioritizedItem."""
        return (item for item, _ in read_messages(self.path / ITEMS, message))

    def chunks(self) -> Iterator[tuple[Any, bytes]]:
        """Yield the chunks as ChunkData messages, each with its bytes."""
        return read_messages(self.path / CHUNKS, messages.ChunkData)


def open_saved(path: Path) -> SavedReplay:
    """Find a checkpoint: the folder itself, or of several in it the newest complete one; FormatError if none."""
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
