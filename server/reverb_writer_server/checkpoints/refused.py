"""Items that Reverb saves but refuses to restore, and a copy of a checkpoint without them.

Reverb stores any priority that a writer sends, and writes it into each checkpoint. A prioritized table refuses NaN and
negative priorities when it is restored, and then nothing of the checkpoint is served.

Source: Reverb 0.14 (`selectors/prioritized.cc`: `CheckValidPriority`).
"""

from __future__ import annotations

import math
import os
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

from reverb_writer.files.saved_replay import SavedReplay
from reverb_writer.files.tfrecord import CHUNKS, DONE, ITEMS, TABLES, read_messages, write_records
from reverb_writer.protocol import messages
from reverb_writer.tables.table_messages import selector_name


def refused_items(saved: SavedReplay) -> dict[str, int]:
    """Return the number of items that Reverb refuses to restore, by table; {} if it refuses none.

    The items are read only if a table is prioritized.

    Raises:
        FormatError: the checkpoint is damaged.
    """
    prioritized = _prioritized(saved)
    if not prioritized:
        return {}
    return dict(
        Counter(item.table for item in saved.parsed_items(messages.StoredItem) if _is_refused(item, prioritized))
    )


def copy_without_refused(saved: SavedReplay, path: Path) -> dict[str, int]:
    """Write a checkpoint without the items that Reverb refuses; return their number by table.

    If Reverb refuses none, nothing is written. The copy shares the file of chunks with the original, if the file system
    has hard links.

    Raises:
        FormatError: the checkpoint is damaged.
        FileExistsError: `path` exists.
    """
    refused = refused_items(saved)
    if not refused:
        return {}
    prioritized = _prioritized(saved)
    sizes: Counter[str] = Counter()

    def restorable() -> Any:
        for item, record in read_messages(saved.path / ITEMS, messages.StoredItem):
            if not _is_refused(item, prioritized):
                sizes[item.table] += 1
                yield record

    path.mkdir()
    write_records(path / ITEMS, restorable())
    write_records(path / TABLES, (_with_size(table, sizes[table.table_name]) for table in saved.all_tables()))
    link(saved.path / CHUNKS, path / CHUNKS)
    (path / DONE).touch()
    shutil.copystat(saved.path / DONE, path / DONE)  # the time of the checkpoint
    return refused


def link(file: Path, target: Path) -> None:
    """Give a file another name; copy it if the file system has no hard links."""
    try:
        os.link(file, target)
    except OSError:
        shutil.copyfile(file, target)


def _prioritized(saved: SavedReplay) -> set[str]:
    """Return the names of the tables that refuse some priorities."""
    return {
        table.table_name
        for table in saved.tables()
        if "prioritized" in (selector_name(table.sampler), selector_name(table.remover))
    }


def _is_refused(item: Any, prioritized: set[str]) -> bool:
    return item.table in prioritized and (math.isnan(item.priority) or item.priority < 0)


def _with_size(table: Any, num_items: int) -> bytes:
    """Return a PriorityTableCheckpoint of `num_items` items: Reverb computes the number from the counters."""
    limiter = table.rate_limiter
    limiter.insert_count = max(limiter.insert_count, num_items)
    limiter.delete_count = limiter.insert_count - num_items
    data: bytes = table.SerializeToString()
    return data
