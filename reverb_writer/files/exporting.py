"""Export the items of a table to disk, each item once; the table keeps them all.

Reverb has no call that lists a table: items come in the order of the table's sampler. So an export samples until every
key has been seen, which needs a uniform or prioritized sampler, and a table without `max_times_sampled`: such a table
removes an item when it hands it out, and the item would be lost if the export stopped, or could not write it. The other
samplers give the same item again and again.

Each sample counts for the table's rate limiter, which may make an export wait. To see every key of n items takes about
n ln n random samples, and more if priorities differ much.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator
from typing import Any, NamedTuple

from reverb_writer.client.client import Client
from reverb_writer.client.server_calls import Sample
from reverb_writer.errors import FormatError, ReplayTimeoutError, SpecError, StructureError
from reverb_writer.files.rollout_writer import RolloutWriter
from reverb_writer.files.trajectory_folder import StoredTrajectory, list_trajectories
from reverb_writer.tables.table_info import TableInfo, check_tables_exist

_BATCH = 256
_RANDOM = ("uniform", "prioritized")
_PATIENCE = 7.0  # a chance of e^-7, or 1 in 1000, that one of the items of a uniform table was not seen


class Exported(NamedTuple):
    """The outcome of one item.

    Attributes:
        key: the item's.
        num_steps: steps written; 0 if it was skipped.
        error: why it was skipped; empty if it was not.
    """

    key: int
    num_steps: int
    error: str = ""


def check_exportable(table: TableInfo) -> None:
    """Check that all items of a table can be seen without removing one.

    Raises:
        SpecError: they cannot.
    """
    if table.sampler not in _RANDOM or table.max_times_sampled:
        limit = f", `max_times_sampled` {table.max_times_sampled}" if table.max_times_sampled else ""
        raise SpecError(
            f"table `{table.name}` ({table.sampler} sampler{limit}) can only be read by removing its items. An export "
            "needs a uniform or prioritized sampler without `max_times_sampled`. Have the server write a checkpoint "
            "instead, or sample the items and write each with `RolloutWriter.save`."
        )


def exported_keys(data_dir: Any, table: str) -> set[int]:
    """Return the keys of a table's items that a directory has already."""
    keys = set()
    for path in list_trajectories(data_dir):
        try:
            item = StoredTrajectory(path).manifest.metadata.get("reverb", {})
        except FormatError:
            continue
        if item.get("table") == table:
            keys.add(int(item["key"]))
    return keys


def export_items(
    client: Client,
    table: str,
    writer: RolloutWriter,
    *,
    timeout_s: float | None = None,
) -> Generator[Exported, None, None]:
    """Write each item that a table holds now as a trajectory; items in the writer's directory are skipped.

    Key and priority are in the trajectory's metadata. An item is complete on disk before the next one is asked for.

    Args:
        client: of the server.
        table: its name.
        writer: where items go.
        timeout_s: how long to wait for a sample, seconds; None for the client's.

    Yields:
        The outcome of each item.

    Raises:
        SpecError: the table can only be read by removing its items.
        StructureError: there is no such table.
        ReplayTimeoutError: not all items came; says how many did.
    """
    info = client.request_info(timeout_s)
    check_tables_exist([table], info, client.address)
    found = info.tables[table]
    check_exportable(found)
    seen = exported_keys(writer.data_dir, table)
    for sample in _until_all_are_seen(client, found, timeout_s):
        key = sample.info.key
        if key in seen:
            continue
        seen.add(key)
        try:
            num_steps = _save(writer, table, sample)
        except StructureError as error:
            yield Exported(key, 0, f"item {key}: {error}")
        else:
            yield Exported(key, num_steps)


def _save(writer: RolloutWriter, table: str, sample: Sample) -> int:
    item = {"table": table, "key": str(sample.info.key), "times_sampled": sample.info.times_sampled}
    path = writer.save(sample.data, metadata={"priority": sample.info.priority, "reverb": item})
    return StoredTrajectory(path).manifest.num_steps


def _until_all_are_seen(client: Client, table: TableInfo, timeout_s: float | None) -> Iterator[Sample]:
    size, keys, in_vain = table.current_size, set[int](), 0
    while len(keys) < size:
        for sample in client.sample(table.name, min(max(size - len(keys), _BATCH), 4 * _BATCH), timeout_s):
            in_vain = in_vain + 1 if sample.info.key in keys else 0
            keys.add(sample.info.key)
            yield sample
        if len(keys) < size and in_vain > size * (math.log(size) + _PATIENCE):
            raise ReplayTimeoutError(
                f"table `{table.name}`: {size - len(keys)} of {size} items never came in {in_vain} samples, because "
                "their priority is too small, or because they were removed meanwhile."
            )
