"""Export the items of a table to disk, each item once, without removing them from the table.

`export_saved` reads the items of a checkpoint. `export_items` samples a live table until it has seen every key, because
Reverb has no call that lists a table. Each sample counts for the table's rate limiter, which may make the export wait.
Seeing all keys of n items takes about n ln n random samples, more if priorities differ.
"""

from __future__ import annotations

import math
import os
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import tree

from reverb_writer.client.server_calls import Sample
from reverb_writer.decoding.batch_assembler import MAX_SAMPLE_BYTES, BatchAssembler
from reverb_writer.errors import FormatError, ReplayTimeoutError, SpecError, StructureError, UnsafeDataError
from reverb_writer.files.importing import Transferred
from reverb_writer.files.rollout_writer import RolloutWriter
from reverb_writer.files.saved_replay import open_saved
from reverb_writer.files.trajectory_file import stored_metadata
from reverb_writer.protocol import messages
from reverb_writer.protocol.responses import Samples
from reverb_writer.protocol.trajectory_parsing import parse_trajectory
from reverb_writer.replay.client import Client, only_server
from reverb_writer.tables.table_info import check_tables_exist

_BATCH = 256
_RANDOM = ("uniform", "prioritized")
_PATIENCE = 7.0  # an unseen item remains in a uniform table with probability e^-7, or 1 in 1000
_CACHE_BYTES = 64 << 20  # decoded chunks: neighbouring items share them


def export_saved(
    folder: str | os.PathLike[str], table: str, writer: RolloutWriter
) -> Generator[Transferred, None, None]:
    """Write each saved item of a table as a trajectory, unless the writer's directory has it; yield each outcome.

    The trajectory has the kinds of the item's rows, and its metadata has key and priority. The table's compressed data
    are held in memory.

    Args:
        folder: a checkpoint, such as `LocalServer.save` writes, or a folder of checkpoints: the newest one is read.
        table: the table's name.
        writer: writer of the items, oldest first.

    Raises:
        FormatError: the checkpoint is damaged.
        StructureError: the checkpoint has no such table.
        OSError: the disk failed, for example because it is full.
    """
    saved = open_saved(Path(folder))
    signatures = saved.signatures()
    if table not in signatures:
        raise StructureError(f"{saved.path} has no table `{table}`; it has {', '.join(sorted(signatures)) or 'none'}.")
    done = _keys_on_disk(writer.data_dir, table)
    found = saved.parsed_items(messages.StoredItem)
    items = [(item, _chunk_keys(item)) for item in found if item.table == table and item.key not in done]
    wanted = {key for _, keys in items for key in keys}
    chunks = {chunk.chunk_key: data for chunk, data in saved.chunks() if chunk.chunk_key in wanted}
    assembler = BatchAssembler(_CACHE_BYTES, MAX_SAMPLE_BYTES)
    for item, keys in items:
        try:
            sample = _decoded(item, keys, chunks, assembler, signatures[table])
        except (FormatError, UnsafeDataError) as error:
            yield Transferred(str(item.key), 0, f"item {item.key}: {error}")
        else:
            yield _save(writer, table, sample)


def export_items(client: Client, table: str, writer: RolloutWriter) -> Generator[Transferred, None, None]:
    """Write each item that `table` holds now as a trajectory, unless the directory of `writer` has it.

    The trajectory has the kinds of the item's rows, and its metadata has key and priority. An item is complete on disk,
    and its outcome yielded, before `client` asks for the next one.

    Raises:
        SpecError: the table can only be read by removing its items.
        StructureError: the server has no such table.
        ReplayTimeoutError: some items did not arrive; the error has their number.
    """
    info = only_server(client).channel.server_info(client.timeout_s)
    check_tables_exist([table], info, client.address)
    found = info.tables[table]
    if found.sampler not in _RANDOM or found.max_times_sampled:
        limit = f", `max_times_sampled` {found.max_times_sampled}" if found.max_times_sampled else ""
        raise SpecError(
            f"table `{table}` ({found.sampler} sampler{limit}) can only be read by removing its items. An export "
            "needs a uniform or prioritized sampler without `max_times_sampled`. Have the server save a checkpoint, "
            "and export that: `export_saved`, or `reverb-writer export --saved`."
        )
    done, size = _keys_on_disk(writer.data_dir, table), found.current_size
    keys, in_vain = set[int](), 0
    while len(keys) < size:
        for sample in client.sample(table, min(max(size - len(keys), _BATCH), 4 * _BATCH)):
            if sample.info.key in keys:
                in_vain += 1
                continue
            keys.add(sample.info.key)
            in_vain = 0
            if sample.info.key not in done:
                yield _save(writer, table, sample)
        if len(keys) < size and in_vain > size * (math.log(size) + _PATIENCE):
            raise ReplayTimeoutError(
                f"table `{table}`: {size - len(keys)} of {size} items never came in {in_vain} samples, because their "
                "priority is too small, or because they were removed meanwhile."
            )


def _keys_on_disk(data_dir: Path, table: str) -> set[int]:
    """Return the keys of the table's items in the directory."""
    items = [metadata.get("reverb", {}) for metadata in stored_metadata(data_dir)]
    return {int(item["key"]) for item in items if item.get("table") == table}


def _save(writer: RolloutWriter, table: str, sample: Sample) -> Transferred:
    key = str(sample.info.key)
    item = {"table": table, "key": key, "times_sampled": sample.info.times_sampled}
    try:
        writer.save_rows(sample.data, sample.kinds, {"priority": sample.info.priority, "reverb": item})
    except StructureError as error:
        return Transferred(key, 0, f"item {key}: {error}")
    return Transferred(key, len(tree.flatten(sample.data)[0]))


def _chunk_keys(item: Any) -> set[int]:
    try:
        _, slices = parse_trajectory(item.flat_trajectory)
    except FormatError:
        return set()  # decoding reports it
    return {key for of_group in slices for key, _, _ in of_group}


def _decoded(
    item: Any, keys: set[int], chunks: Mapping[int, bytes], assembler: BatchAssembler, signature: Any
) -> Sample:
    """Return an item as a sample; `keys` are the keys of its chunks."""
    if missing := keys - chunks.keys():
        raise FormatError(f"it needs chunk {min(missing)}, which was not saved.")
    entry = messages.SampledResponse().entries.add(data=[chunks[key] for key in keys])
    for field in ("key", "priority", "times_sampled", "flat_trajectory"):
        setattr(entry.info.item, field, getattr(item, field))
    if errors := assembler.add(Samples.of([entry])):
        raise errors[0]
    ((data, info, kinds),) = assembler.take_each(signature)
    return Sample.of(data, info, kinds)
