"""Convert checkpoints of M servers to checkpoints of N servers, for a changed configuration or number of shards.

    all items, each once -> without the oldest, if the tables have too little room -> an equal share per server
    all chunks           -> the chunks that the share of each server needs

An item keeps its key, priority, data, number of samples (below the table's limit) and, in its table, its place in the
order of insertion. Items that share chunks stay together. All servers get the newest item of a table with `max_size` 1,
such as a table of weights. The conversion needs memory for the items, but not for the chunks.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from reverb_writer.errors import FormatError
from reverb_writer.files.saved_replay import SavedReplay, open_saved
from reverb_writer.files.tfrecord import CHUNKS, DONE, ITEMS, TABLES, RecordWriter, write_records
from reverb_writer.progress import progress
from reverb_writer.protocol import messages
from reverb_writer.tables import SAVES, Queue, TableConfig
from reverb_writer.tables.table_messages import read_balance, write_table
from reverb_writer_server.checkpoints.folder import CheckpointFolder, finished_in
from reverb_writer_server.checkpoints.owner import CheckpointError
from reverb_writer_server.checkpoints.refused import link
from reverb_writer_server.config.keys import ConfigError
from reverb_writer_server.config.schema import load

_RESHARDED = "resharded"  # `CheckpointFolder` adopts it when it is complete
_RUN = 256  # limit of consecutive items that go to one server because they share chunks


class _Item(NamedTuple):
    key: int
    at: tuple[int, int]  # time of insertion: seconds and nanoseconds
    chunks: frozenset[int]
    data: bytes  # a PrioritizedItem


@dataclass
class Target:
    """A checkpoint to write."""

    path: Path  # its folder, which does not exist
    tables: Mapping[str, TableConfig]  # the rules of its tables, by name
    items: dict[str, list[_Item]] = field(default_factory=dict, init=False)  # items of each table, the oldest first


def convert(sources: Sequence[SavedReplay], targets: Sequence[Target]) -> dict[str, int]:
    """Write the items of checkpoints to new checkpoints, and return the number of items left out by table.

    Items of tables that the targets lack are left out, and the oldest items of a table that has less room than before.
    If the rate limiter of a table differs, its counters start in balance. If several sources have an item with the same
    key, it is taken once. All targets have the same tables.
    """
    tables = _tables_by_name(sources)
    left_out: dict[str, int] = {}
    for name, items in _items_by_table(sources, targets[0].tables).items():
        if name not in targets[0].tables or name not in tables:
            left_out[name] = 0 if name == SAVES else len(items)
            continue
        sizes = [target.tables[name].max_size for target in targets]
        if max(sizes) == 1:
            shares = [[max(items, key=_time)] for _ in targets]
            is_version = all(table.max_size == 1 for table in tables[name])
            left_out[name] = 0 if is_version else len(items) - 1  # older versions do not count
        else:
            newest = {item.key for item in sorted(items, key=_time)[-sum(sizes) :]}
            shares = _deal([item for item in items if item.key in newest], sizes)
            left_out[name] = len(items) - len(newest)
        for target, share in zip(targets, shares, strict=True):
            target.items[name] = sorted(share, key=_time)
    for target in targets:
        target.path.mkdir()
        write_records(target.path / TABLES, _tables_of(target, tables, targets))
        items_of_all = (item.data for name in tables for item in target.items.get(name, ()))
        write_records(target.path / ITEMS, items_of_all)
    _write_chunks(sources, targets)
    for target in targets:
        (target.path / DONE).touch()
    return {name: count for name, count in left_out.items() if count}


def reshard(saved: Sequence[Path], config: Path, environment: Mapping[str, str], shards: int | None) -> Iterator[str]:
    """Write checkpoints for the servers of a configuration; yield a line about each, and about items left out.

    `saved` has a checkpoint of each old server, or a folder of checkpoints, whose newest one is taken. `shards` is the
    number of new servers, in place of the configuration's number.
    """
    flags: dict[tuple[str, ...], Any] = {} if shards is None else {("cluster", "shards"): shards}
    num_shards = load(config, environment, {**flags, ("cluster", "shard"): 0}).cluster_shards
    loaded = [load(config, environment, {**flags, ("cluster", "shard"): shard}) for shard in range(num_shards)]
    with contextlib.ExitStack() as stack:
        folders = []
        for one in loaded:
            if one.checkpoints_directory is None:
                raise ConfigError(f"{config}: `checkpoints.directory`: got nothing, allowed: a path.")
            folders.append(stack.enter_context(CheckpointFolder(one.checkpoints_directory, one.checkpoints_keep)))
        sources = [_open(path) for path in saved]  # after the new folders have kept their finished checkpoints
        targets = [
            Target(folder.incoming / _RESHARDED, {table.config.name: table.config for table in one.tables})
            for folder, one in zip(folders, loaded, strict=True)
        ]
        with progress(f"resharding {len(sources)} checkpoints to {num_shards}"):
            left_out = convert(sources, targets)
        for folder, target in zip(folders, targets, strict=True):
            adopted = folder.adopt_finished()
            for reason in adopted.refused.values():
                raise CheckpointError(f"{folder.directory}: the new checkpoint is damaged: {reason}")
            counts = ", ".join(f"{name} {len(items):,}" for name, items in sorted(target.items.items()))
            yield f"{adopted.kept[_RESHARDED].path}: {counts or 'no items'}"
    for name, count in sorted(left_out.items()):
        yield f"table `{name}`: {count:,} items left out: the table has no room for them, or is not configured"


def _open(path: Path) -> SavedReplay:
    if finished := finished_in(path):
        raise CheckpointError(
            f"{path}: {finished[-1].name} is finished, but its server ended before it kept it. Start and stop that "
            "server, or name a checkpoint."
        )
    return open_saved(path)


def _time(item: _Item) -> tuple[int, int]:
    return item.at


def _items_by_table(sources: Sequence[SavedReplay], tables: Mapping[str, TableConfig]) -> dict[str, list[_Item]]:
    limits = {name: table.max_times_sampled for name, table in tables.items() if table.max_times_sampled}
    found: dict[str, dict[int, _Item]] = {}
    for source in sources:
        for read in source.parsed_items(messages.PrioritizedItem):
            chunks = frozenset(
                part.chunk_key for column in read.flat_trajectory.columns for part in column.chunk_slices
            )
            if read.table in limits:  # a server removes an item that reaches the limit, but not an item beyond it
                read.times_sampled = min(read.times_sampled, limits[read.table] - 1)
            at = (read.inserted_at.seconds, read.inserted_at.nanos)
            item = _Item(read.key, at, chunks, read.SerializeToString())
            found.setdefault(read.table, {}).setdefault(read.key, item)
    return {name: [*items.values()] for name, items in found.items()}


def _tables_by_name(sources: Sequence[SavedReplay]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for source in sources:
        for table in source.all_tables():
            found.setdefault(table.table_name, []).append(table)
    return found


def _deal(items: Sequence[_Item], sizes: Sequence[int]) -> list[list[_Item]]:
    """Divide items equally, as far as targets have room; consecutive items that share chunks stay together."""
    left, num_left = [0] * len(sizes), len(items)
    by_room = sorted(range(len(sizes)), key=lambda target: sizes[target])
    for turn, target in enumerate(by_room):  # the target with the least room first; the others take the rest
        left[target] = min(sizes[target], -(-num_left // (len(sizes) - turn)))
        num_left -= left[target]
    shares: list[list[_Item]] = [[] for _ in sizes]
    target, run, last = 0, 0, frozenset[int]()
    for item in items:
        if run >= _RUN or not left[target] or not last & item.chunks:
            target, run = max(range(len(sizes)), key=left.__getitem__), 0
        shares[target].append(item)
        left[target] -= 1
        run, last = run + 1, item.chunks
    return shares


def _tables_of(target: Target, tables: Mapping[str, Sequence[Any]], targets: Sequence[Target]) -> Iterable[bytes]:
    for name, before in tables.items():
        if name == SAVES and name in target.tables:
            yield before[0].SerializeToString()  # it names the save
        elif name in target.tables:
            total = sum(len(one.items.get(name, ())) for one in targets)
            num_items = len(target.items.get(name, ()))
            yield _table(target.tables[name], before, num_items, num_items / total if total else 1 / len(targets))


def _table(config: TableConfig, before: Sequence[Any], num_items: int, share: float) -> bytes:
    """Return a PriorityTableCheckpoint with `num_items` items and a share of the old counters."""
    table = messages.PriorityTableCheckpoint()
    write_table(config, table)
    table.num_deleted_episodes = round(share * sum(one.num_deleted_episodes for one in before))
    table.num_unique_samples = round(share * sum(one.num_unique_samples for one in before))
    limiter, limiters = table.rate_limiter, [one.rate_limiter for one in before]
    limiter.insert_count = max(num_items, round(share * sum(one.insert_count for one in limiters)))
    limiter.delete_count = limiter.insert_count - num_items  # Reverb computes the number of items from it
    limiter.sample_count = round(share * sum(one.sample_count for one in limiters))
    new = read_balance(limiter)
    is_same = len(before) == 1 and read_balance(limiters[0]) == new
    if isinstance(config.rate_limiter, Queue):  # its balance is its length, so each item can be sampled once
        limiter.sample_count = limiter.delete_count
    elif not is_same and math.isfinite(new.max_diff):
        centre = min(new.max_diff, max(new.min_diff, new.samples_per_insert * new.min_size))
        limiter.sample_count = max(0, int(limiter.insert_count * new.samples_per_insert - centre))
    data: bytes = table.SerializeToString()
    return data


def _write_chunks(sources: Sequence[SavedReplay], targets: Sequence[Target]) -> None:
    if len(sources) == len(targets) == 1:
        link(sources[0].path / CHUNKS, targets[0].path / CHUNKS)
        return
    missing = [set[int]().union(*(item.chunks for items in one.items.values() for item in items)) for one in targets]
    with contextlib.ExitStack() as files:
        outs = [files.enter_context(RecordWriter(target.path / CHUNKS)) for target in targets]
        for source in sources:
            for chunk, data in source.chunks():
                for out, needed in zip(outs, missing, strict=True):
                    if chunk.chunk_key in needed:
                        needed.remove(chunk.chunk_key)
                        out.write(data)
    for needed in missing:
        if needed:
            raise FormatError(f"{len(needed)} chunks that items refer to are in none of {len(sources)} checkpoints.")
