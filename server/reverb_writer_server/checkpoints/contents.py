"""One checkpoint: is it complete, what is in it, is it sound, and how it differs from a configuration."""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import tree
from google.protobuf.message import DecodeError

from reverb_writer.errors import FormatError
from reverb_writer.protocol import messages, signatures
from reverb_writer.tables import Prioritized, Selector, TableConfig
from reverb_writer_server.checkpoints.tfrecord import CHUNKS, DONE, FILES, ITEMS, TABLES, read_records
from reverb_writer_server.config.textproto import selector

__all__ = ["MANIFEST", "Checkpoint", "Contents", "TableState", "differences", "inspect", "tables_of", "verify"]

MANIFEST = "MANIFEST.json"  # the size of each file, so that a short one is noticed without reading it


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk.

    Attributes:
        path: its folder.
    """

    path: Path

    @property
    def name(self) -> str:
        """What it is called in lists and by `restore`."""
        return self.path.name

    @property
    def written_at(self) -> datetime:
        """When it was finished, UTC; of an incomplete one when it was last touched."""
        done = self.path / DONE
        return datetime.fromtimestamp((done if done.exists() else self.path).stat().st_mtime, timezone.utc)

    @property
    def size_bytes(self) -> int:
        """What it takes on disk."""
        return sum(file.stat().st_size for file in self.path.iterdir() if file.is_file())

    def fault(self) -> str | None:
        """Return what is missing of it; None if it is complete."""
        missing = [name for name in FILES if not (self.path / name).is_file()]
        if missing:
            return f"{', '.join(missing)} missing"
        try:
            expected = json.loads((self.path / MANIFEST).read_text())
        except FileNotFoundError:
            return None
        except ValueError:
            return f"{MANIFEST} is no JSON"
        for name, size in expected.items():
            found = (self.path / name).stat().st_size if (self.path / name).is_file() else 0
            if found != size:
                return f"{name} has {found} bytes, expected {size}"
        return None


@dataclass(frozen=True)
class TableState:
    """A table in a checkpoint.

    Attributes:
        name: its name.
        max_size: items that it held at most.
        sampler: how items were chosen to be sampled.
        remover: how they were chosen to be removed.
        max_times_sampled: samples after which an item was removed; 0 for no limit.
        limiter: samples_per_insert, min_size, min_diff and max_diff.
        inserts: since it was made or reset.
        samples: likewise.
        deletes: likewise.
        signature: nest of `ArraySpec`; None if it has none.
    """

    name: str
    max_size: int
    sampler: Selector
    remover: Selector
    max_times_sampled: int
    limiter: tuple[float, int, float, float]
    inserts: int
    samples: int
    deletes: int
    signature: Any


@dataclass(frozen=True)
class Contents:
    """What is in a checkpoint.

    Attributes:
        tables: their rules and counters.
        items: how many each table holds.
        chunks: how many there are.
        steps: that the chunks hold.
    """

    tables: tuple[TableState, ...]
    items: dict[str, int]
    chunks: int
    steps: int


def tables_of(checkpoint: Checkpoint) -> tuple[TableState, ...]:
    """Return the tables without their items, which is quick.

    Raises:
        FormatError: the file is damaged.
    """
    return tuple(_table_state(record) for record in _parsed(checkpoint.path / TABLES, messages.PriorityTableCheckpoint))


def inspect(checkpoint: Checkpoint) -> Contents:
    """Read all of a checkpoint and return what is in it.

    Raises:
        FormatError: it is no checkpoint, damaged, incomplete, or an item refers to a table or chunk that is not there.
    """
    if not any((checkpoint.path / name).is_file() for name in FILES):
        raise FormatError(f"{checkpoint.path}: {_no_checkpoint(checkpoint.path)}")
    fault = checkpoint.fault()
    if fault:
        raise FormatError(f"{checkpoint.path}: {fault}. It is incomplete; use another one.")
    tables = tables_of(checkpoint)
    names = {table.name for table in tables}
    items: Counter[str] = Counter()
    needed: set[int] = set()
    for item in _parsed(checkpoint.path / ITEMS, messages.PrioritizedItem):
        if item.table not in names:
            raise FormatError(f"{checkpoint.path}: item {item.key} is of table `{item.table}`, which is not there.")
        items[item.table] += 1
        needed.update(part.chunk_key for column in item.flat_trajectory.columns for part in column.chunk_slices)
    chunks = steps = 0
    for chunk in _parsed(checkpoint.path / CHUNKS, messages.ChunkData):
        needed.discard(chunk.chunk_key)
        chunks += 1
        steps += chunk.sequence_range.end - chunk.sequence_range.start + 1
    if needed:
        raise FormatError(
            f"{checkpoint.path}: {len(needed)} chunks that items refer to are missing, of {chunks} there."
        )
    return Contents(tables, {name: items[name] for name in sorted(names)}, chunks, steps)


verify = inspect  # whatever can be wrong shows when all of it is read


def differences(tables: Sequence[TableConfig], checkpoint: Sequence[TableState]) -> list[str]:
    """Say how the tables of a checkpoint differ from the configured ones, a line each; nothing if they do not."""
    saved = {state.name: state for state in checkpoint}
    configured = {table.name: table for table in tables}
    lines = [f"table `{name}`: in the checkpoint, not configured" for name in saved if name not in configured]
    for name, table in configured.items():
        if name not in saved:
            lines.append(f"table `{name}`: configured, not in the checkpoint")
            continue
        for key, theirs, ours in _compared(saved[name], table):
            lines.append(f"table `{name}`: {key} is {theirs} in the checkpoint, {ours} in the configuration")
    return lines


def _no_checkpoint(path: Path) -> str:
    """Say what a folder is that has no file of a checkpoint, and which checkpoints are in it."""
    if not path.is_dir():
        return "there is no such folder. Check the path."
    inside = sorted({done.parent for pattern in ("*", "kept/*") for done in path.glob(f"{pattern}/{DONE}")})
    if not inside:
        return f"is no checkpoint: it has none of {', '.join(FILES)}. Check the path."
    return f"is no checkpoint, but a folder with {len(inside)} in it. Name one, such as {inside[-1]}."


def _compared(state: TableState, table: TableConfig) -> list[tuple[str, str, str]]:
    balance = table.rate_limiter.balance
    pairs: list[tuple[str, Any, Any]] = [
        ("max_size", state.max_size, table.max_size),
        ("sampler", _named(state.sampler), _named(table.sampler)),
        ("remover", _named(state.remover), _named(table.remover)),
        ("max_times_sampled", state.max_times_sampled, table.max_times_sampled),
        *zip(("samples_per_insert", "min_size", "min_diff", "max_diff"), state.limiter, balance, strict=True),
    ]
    different = [(key, f"{theirs}", f"{ours}") for key, theirs, ours in pairs if theirs != ours]
    if table.signature is not None and _leaves(state.signature) != _leaves(table.signature):
        different.append(("signature", f"{_leaves(state.signature)}", f"{_leaves(table.signature)}"))
    return different


def _named(chosen: Selector) -> str:
    return f"prioritized ({chosen.exponent:g})" if isinstance(chosen, Prioritized) else chosen


def _leaves(signature: Any) -> list[str]:
    if signature is None:
        return []
    leaves = tree.flatten_with_path(signature)
    return [f"{'/'.join(map(str, path))}: {leaf.dtype}{list(leaf.shape or ())}" for path, leaf in leaves]


def _parsed(path: Path, kind: Any) -> Any:
    for number, record in enumerate(read_records(path)):
        try:
            yield kind.FromString(record)
        except DecodeError as error:
            raise FormatError(f"{path}: record {number} is no {kind.DESCRIPTOR.name}. It is damaged.") from error


def _table_state(table: Any) -> TableState:
    limiter = table.rate_limiter
    return TableState(
        name=table.table_name,
        max_size=table.max_size,
        sampler=selector(table.sampler),
        remover=selector(table.remover),
        max_times_sampled=max(0, table.max_times_sampled),
        limiter=(
            limiter.samples_per_insert,
            limiter.min_size_to_sample,
            _unbounded(limiter.min_diff),
            _unbounded(limiter.max_diff),
        ),
        inserts=limiter.insert_count,
        samples=limiter.sample_count,
        deletes=limiter.delete_count,
        signature=signatures.decode(table.signature) if table.HasField("signature") else None,
    )


def _unbounded(diff: float) -> float:
    return math.copysign(math.inf, diff) if abs(diff) >= sys.float_info.max / 2 else diff
