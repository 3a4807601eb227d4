"""Export the items of a table to disk, each item once.

Reverb has no call that lists a table: items come in the order of the table's sampler. So the way depends on the table:

    table                                                    way                                     items stay
    -------------------------------------------------------  --------------------------------------  ----------
    gives each item once (`max_times_sampled=1`)             sample as many as there are             no
    uniform or prioritized sampler, no `max_times_sampled`   sample until every key has been seen    yes
    uniform or prioritized sampler, `max_times_sampled` > 1  the same                                some
    fifo, lifo or heap, which give the same item again       sample one, delete it, and so on        no

Items are only removed if the caller allows it. Each sample counts for the table's rate limiter, which may make an
export wait. To see every key of n items takes about n ln n random samples, and more if priorities differ much.
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


def takes_items_out(table: TableInfo) -> bool:
    """Return whether an export removes items from a table."""
    return table.sampler not in _RANDOM or table.max_times_sampled > 0


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
    consume: bool = False,
    timeout_s: float | None = None,
) -> Generator[Exported, None, None]:
    """Write each item that a table holds now as a trajectory; items in the writer's directory are skipped.

    Key and priority are in the trajectory's metadata. An item is complete on disk before the next one is asked for.

    Args:
        client: of the server.
        table: its name.
        writer: where items go.
        consume: whether the export may remove items from the table; needed if `takes_items_out` returns True.
        timeout_s: how long to wait for a sample, seconds; None for the client's.

    Yields:
        The outcome of each item.

    Raises:
        SpecError: the table can only be read by removing its items, and `consume` is False.
        StructureError: there is no such table.
        ReplayTimeoutError: not all items came; says how many did.
    """
    info = client.request_info(timeout_s)
    check_tables_exist([table], info, client.address)
    found = info.tables[table]
    if takes_items_out(found) and not consume:
        limit = f", `max_times_sampled` {found.max_times_sampled}" if found.max_times_sampled else ""
        raise SpecError(
            f"table `{table}` ({found.sampler} sampler{limit}) can only be read by removing its items. Pass "
            "`consume` to do that, or have the server write a checkpoint."
        )
    seen = exported_keys(writer.data_dir, table)
    if found.max_times_sampled == 1:
        samples = _once(client, found, timeout_s)
    elif found.sampler in _RANDOM:
        samples = _until_all_are_seen(client, found, timeout_s)
    else:
        samples = _one_by_one(client, found, timeout_s)
    for sample in samples:
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


def _once(client: Client, table: TableInfo, timeout_s: float | None) -> Iterator[Sample]:
    missing = table.current_size
    while missing > 0:
        for sample in client.sample(table.name, min(missing, _BATCH), timeout_s):
            missing -= 1
            yield sample


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


def _one_by_one(client: Client, table: TableInfo, timeout_s: float | None) -> Iterator[Sample]:
    for _ in range(table.current_size):
        for sample in client.sample(table.name, 1, timeout_s):
            yield sample
            client.mutate_priorities(table.name, deletes=[sample.info.key], timeout_s=timeout_s)
