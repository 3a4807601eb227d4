"""Conversion of a checkpoint to the tables of another configuration; needs TensorFlow."""

from __future__ import annotations

import math
import os
import shutil
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

from reverb_writer.files.tfrecord import CHUNKS, DONE, ITEMS, TABLES, read_records
from reverb_writer.protocol import messages, signatures
from reverb_writer.tables import Prioritized, Selector, TableConfig


def convert_checkpoint(checkpoint: Path, target: Path, tables: Sequence[TableConfig]) -> dict[str, int]:
    """Write a copy of a checkpoint with the rules of `tables`, and return how many items of each table are left out.

    The items of tables that are not in `tables` are left out, and the oldest items of a table that has become smaller.
    If the rate limiter of a table differs, its counters are set as if samplers had kept pace with inserts.

    Raises:
        FormatError: the checkpoint is damaged.
    """
    wanted = {table.name: table for table in tables}
    held = Counter(_item(record).table for record in read_records(checkpoint / ITEMS))
    surplus = {
        name: count - wanted[name].max_size if name in wanted else count
        for name, count in held.items()
        if name not in wanted or count > wanted[name].max_size
    }
    left_out: Counter[str] = Counter()
    target.mkdir()
    with _writer(target / TABLES) as out:
        for record in read_records(checkpoint / TABLES):
            saved = messages.PriorityTableCheckpoint.FromString(record)
            if saved.table_name in wanted:
                out.write(_convert_table(saved, wanted[saved.table_name]).SerializeToString())
    with _writer(target / ITEMS) as out:
        for record in read_records(checkpoint / ITEMS):
            name = _item(record).table
            if left_out[name] < surplus.get(name, 0):
                left_out[name] += 1
            else:
                out.write(record)
    _link(checkpoint / CHUNKS, target / CHUNKS)
    (target / DONE).touch()
    return dict(left_out)


def _link(file: Path, target: Path) -> None:
    try:
        os.link(file, target)
    except OSError:  # a file system without hard links
        shutil.copyfile(file, target)


def _item(record: bytes) -> Any:
    return messages.PrioritizedItem.FromString(record)


def _writer(path: Path) -> Any:
    return tf.io.TFRecordWriter(str(path), options="ZLIB")


def _convert_table(saved: Any, table: TableConfig) -> Any:
    saved.max_size = table.max_size
    saved.max_times_sampled = table.max_times_sampled
    _set_selector(saved.sampler, table.sampler)
    _set_selector(saved.remover, table.remover)
    if table.signature is None:
        saved.ClearField("signature")
    else:
        saved.signature.CopyFrom(signatures.encode(table.signature))
    limiter, balance = saved.rate_limiter, table.rate_limiter.balance
    low, high = (
        math.copysign(min(abs(bound), sys.float_info.max), bound) for bound in (balance.min_diff, balance.max_diff)
    )
    new = (balance.samples_per_insert, balance.min_size, low, high)
    if new != (limiter.samples_per_insert, limiter.min_size_to_sample, limiter.min_diff, limiter.max_diff):
        limiter.samples_per_insert, limiter.min_size_to_sample, limiter.min_diff, limiter.max_diff = new
        if math.isfinite(balance.max_diff):
            centre = min(balance.max_diff, max(balance.min_diff, balance.samples_per_insert * balance.min_size))
            limiter.sample_count = max(0, int(limiter.insert_count * balance.samples_per_insert - centre))
    return saved


def _set_selector(options: Any, chosen: Selector) -> None:
    options.Clear()
    if isinstance(chosen, Prioritized):
        options.prioritized.priority_exponent = chosen.exponent
    elif chosen in ("max_heap", "min_heap"):
        options.heap.min_heap = chosen == "min_heap"
    else:
        setattr(options, chosen, True)
    options.is_deterministic = chosen in ("fifo", "lifo", "max_heap", "min_heap")
