"""A server's tables as a checkpoint of Reverb, which a local server or a real server can restore.

`files/saved_replay` describes the folder. A checkpoint gets its name when it is complete, and earlier checkpoints are
deleted afterwards. So a folder always holds a complete save.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import threading
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from reverb_writer.errors import FormatError, SpecError, StructureError
from reverb_writer.files.saved_replay import (
    KEPT,
    NAME,
    OWNER,
    PARTIAL,
    SavedReplay,
    checkpoint_name,
    open_saved,
    sequence_of,
)
from reverb_writer.files.tfrecord import CHUNKS, DONE, ITEMS, TABLES, write_records
from reverb_writer.local.read_items import tensors_named
from reverb_writer.local.refusals import Refusal
from reverb_writer.local.store import Store
from reverb_writer.local.stored_items import Item, SharedChunks
from reverb_writer.local.streams import read_chunk
from reverb_writer.local.table import Table
from reverb_writer.protocol import messages
from reverb_writer.protocol.trajectory_parsing import parse_trajectory
from reverb_writer.tables import SAVES
from reverb_writer.tables.table_messages import read_table, write_table

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_saving = threading.Lock()  # the main thread never takes it, because it may be interrupted


def save(store: Store, folder: str | os.PathLike[str]) -> Path:
    """Write all tables into a folder, in place of an earlier save. Saves into one folder take turns.

    Writers release the items that the save has, because the reserved table of `tables.saves` counts it.

    Returns:
        The checkpoint.

    Raises:
        OSError: the folder cannot be written; an earlier save is unchanged.
    """
    counter = store.tables[SAVES]
    with store.lock:  # copies data that may change, and shares the bytes of chunks and trajectories
        counter.num_inserts += 1  # of the reserved table, which has no items here
        number = counter.num_inserts
        chunks = {chunk.key: chunk for table in store.tables.values() for item in table for chunk in item.shared.chunks}
        items = [item for table in store.tables.values() for item in table.encoded_items()]
        tables = [_encode_table(table) for table in store.tables.values()]
    kept = Path(folder) / KEPT
    kept.mkdir(parents=True, exist_ok=True)
    with _turn(kept):
        partial = kept / f"{PARTIAL}{secrets.token_hex(8)}"
        partial.mkdir()
        try:
            write_records(partial / TABLES, tables)
            write_records(partial / ITEMS, items)
            write_records(partial / CHUNKS, (chunk.data for chunk in chunks.values()))
            (partial / DONE).touch()
            older = [path for path in kept.iterdir() if path != partial and _is_checkpoint(path.name)]
            sequence = 1 + max((sequence_of(path.name) for path in older), default=0)
            saved = partial.rename(kept / checkpoint_name(sequence, datetime.now(timezone.utc)))
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        with store.lock:
            counter.num_samples = max(counter.num_samples, number)
        if not (Path(folder) / OWNER).exists():  # a server that owns the folder deletes checkpoints itself
            for old in older:
                _delete(old)
    return saved


def load(folder: str | os.PathLike[str], max_bytes: int, max_item_bytes: int | None = None) -> Store:
    """Return a store with the tables of the newest checkpoint of a folder.

    Raises:
        FormatError: the checkpoint is missing or damaged, a local server cannot serve its tables, or it exceeds
            `max_bytes`.
    """
    saved = open_saved(Path(folder))
    try:
        tables = saved.all_tables()
        configs = [read_table(table) for table in tables if table.table_name != SAVES]
        store = Store(configs, max_bytes, max_item_bytes, saved.save())
        _fill(store, saved)
    except Refusal as error:
        raise FormatError(f"{saved.path}: cannot be restored: {error.details()}") from None
    except (SpecError, StructureError) as error:
        raise FormatError(f"{saved.path}: cannot be restored: {error}") from error
    for table in tables:
        counted, limiter = store.tables[table.table_name], table.rate_limiter
        counted.num_inserts, counted.num_samples = limiter.insert_count, limiter.sample_count
        counted.num_unique_samples = table.num_unique_samples
        counted.num_deleted_episodes = table.num_deleted_episodes
    store.tables[SAVES].num_samples = store.tables[SAVES].num_inserts  # the restored save is safe
    return store


@contextlib.contextmanager
def _turn(path: Path) -> Iterator[None]:
    """Wait for other saves into a folder: of this process and, if the file system has locks, of other processes."""
    with _saving, contextlib.ExitStack() as stack:
        if fcntl is not None:
            folder = os.open(path, os.O_RDONLY)
            stack.callback(os.close, folder)  # releases the lock
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(folder, fcntl.LOCK_EX)
        yield


def _fill(store: Store, saved: SavedReplay) -> None:
    chunks = {chunk.chunk_key: read_chunk(data) for chunk, data in saved.chunks()}
    for read in saved.parsed_items(messages.StoredItem):
        table = store.table(read.table)
        table.check_priority(read.key, read.priority)
        parsed = parse_trajectory(read.flat_trajectory)
        its_chunks = []
        for key, tensor in tensors_named(parsed).items():
            if key not in chunks or tensor >= chunks[key].num_tensors:
                raise FormatError(
                    f"{saved.path}: item {read.key} of table `{read.table}` needs tensor {tensor} of chunk {key}, "
                    "which was not saved."
                )
            its_chunks.append(store.chunks.add(chunks[key]))
        layout, slices = parsed
        flat = read.flat_trajectory
        shared = SharedChunks(read.table, layout, its_chunks, 1, len(flat), sum(map(len, slices)))
        item = Item(read.key, read.priority, flat, slices, shared)
        item.inserted_at = read.inserted_at.seconds * 1_000_000_000 + read.inserted_at.nanos
        store.chunks.take(shared.item_bytes)
        table.restore(item, read.times_sampled)


def _encode_table(table: Table) -> bytes:
    message: Any = messages.PriorityTableCheckpoint()
    write_table(table.config, message)
    message.num_unique_samples, message.num_deleted_episodes = table.num_unique_samples, table.num_deleted_episodes
    limiter = message.rate_limiter
    limiter.insert_count = table.num_inserts
    limiter.sample_count = table.num_inserts if table.config.name == SAVES else table.num_samples  # of this save
    limiter.delete_count = table.num_inserts - len(table)  # Reverb computes the number of items from it
    data: bytes = message.SerializeToString()
    return data


def _is_checkpoint(name: str) -> bool:
    """Return whether an entry of `kept` is a checkpoint, or the remains of one after a kill."""
    return NAME.fullmatch(name) is not None or name.startswith(PARTIAL)


def _delete(path: Path) -> None:
    """Delete a checkpoint; first rename it, so that a kill leaves no incomplete checkpoint under its name."""
    partial = path.with_name(f"{PARTIAL}{secrets.token_hex(8)}")
    path.rename(partial)
    shutil.rmtree(partial, ignore_errors=True)
