"""A checkpoint as a server restores it: its reserved table names the new life of the server, and the restored save."""

from __future__ import annotations

from pathlib import Path

from reverb_writer.errors import FormatError
from reverb_writer.files.saved_replay import SavedReplay
from reverb_writer.files.tfrecord import FILES, TABLES, write_records
from reverb_writer.tables import SAVES
from reverb_writer.tables.saves import saves_table
from reverb_writer.tables.table_messages import encode_signature


def for_new_life(checkpoint: Path, folder: Path) -> Path:
    """Put links to a checkpoint's files into `folder`, beside its tables for a new life; return the folder.

    A checkpoint that cannot be read is returned itself, because Reverb says why it cannot be restored.
    """
    saved = SavedReplay(checkpoint)
    try:
        tables, restored = saved.all_tables(), saved.save()
    except (FormatError, OSError):
        return checkpoint
    for table in tables:
        if table.table_name == SAVES:
            table.signature.CopyFrom(encode_signature(saves_table(restored).signature))
    write_records(folder / TABLES, [table.SerializeToString() for table in tables])
    for name in FILES:
        if name != TABLES and (checkpoint / name).exists():
            (folder / name).symlink_to((checkpoint / name).resolve())
    return folder
