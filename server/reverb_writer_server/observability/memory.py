"""Estimated memory of the tables, and the memory that is available.

A step is stored once, however many items refer to it, and freed with the last of them. If the oldest item is removed
first, N items of L steps that start S steps apart hold N x S + (L - S) steps in long episodes. Items do not overlap if
episodes are shorter than L + S, and with any other remover the remaining items may not overlap either: then they hold
N x L steps. Arrays are counted uncompressed; snappy often makes them much smaller. The estimates are not bounds: they
include neither the allocator's overhead nor other steps in the chunks that items refer to.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tree

from reverb_writer_server.config.schema import ServedTable

__all__ = ["Estimate", "available_bytes", "estimate", "used_bytes"]

_ITEM_BYTES = 1_000  # of Reverb's own bookkeeping for an item of one chunk; measured, see docs/server.md
_CGROUP = Path("/sys/fs/cgroup")
_NO_LIMIT = 2**60  # cgroup v1 writes a number near 2**63


@dataclass(frozen=True)
class Estimate:
    """The estimated memory of a full table.

    Attributes:
        table: its name.
        steps: number of steps in the table if its items overlap; None if their length is unknown.
        step_bytes: size of one step, uncompressed; None if the signature does not tell.
        total_bytes: size of the full table; None if it is unknown.
        total_bytes_without_overlap: its size if no two items share a step.
    """

    table: str
    steps: int | None
    step_bytes: int | None
    total_bytes: int | None
    total_bytes_without_overlap: int | None


def estimate(table: ServedTable) -> Estimate:
    """Return the estimated memory of a table when it is full."""
    config, length = table.config, table.sequence_length
    specs = tree.flatten(config.signature) if config.signature is not None else []
    sizes = [_leaf_bytes(spec) for spec in specs]
    step_bytes = sum(size for size in sizes if size is not None) if sizes and None not in sizes else None
    length = length or next((spec.shape[0] for spec in specs if spec.shape), None)
    steps = None
    if length is not None:
        stride = min(table.stride_length, length)
        steps = config.max_size * length
        if config.remover == "fifo":
            steps = config.max_size * stride + (length - stride)
    if steps is None or step_bytes is None:
        return Estimate(config.name, steps, step_bytes, None, None)
    assert length is not None  # noqa: S101  # as `steps` is known
    items_bytes = config.max_size * _ITEM_BYTES
    total_bytes_without_overlap = config.max_size * length * step_bytes + items_bytes
    return Estimate(config.name, steps, step_bytes, steps * step_bytes + items_bytes, total_bytes_without_overlap)


def available_bytes(cgroup: Path = _CGROUP) -> int:
    """Return the memory limit of the container, or the machine's memory if there is no limit."""
    machine = next(
        int(line.split()[1]) * 1024 for line in Path("/proc/meminfo").read_text().splitlines() if "MemTotal" in line
    )
    limits = [_number(path) for path in (cgroup / "memory.max", cgroup / "memory/memory.limit_in_bytes")]
    return min([machine, *(limit for limit in limits if limit is not None and limit < _NO_LIMIT)])


def used_bytes(processes: Iterable[int | str] = ("self",)) -> int:
    """Return the resident memory of those processes that run."""
    total = 0
    for process in processes:
        try:
            status = Path(f"/proc/{process}/status").read_text()
        except OSError:
            continue
        total += sum(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmRSS"))
    return total


def _leaf_bytes(spec: Any) -> int | None:
    """Return the bytes of a leaf of one step; None if its shape is unknown or it holds objects."""
    if spec.shape is None or None in spec.shape[1:] or spec.dtype.hasobject:
        return None
    return int(math.prod(spec.shape[1:]) * spec.dtype.itemsize)


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
