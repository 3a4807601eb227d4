"""One checkpoint: its completeness, its damage, its contents, and its differences from a configuration."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import tree

from reverb_writer.errors import FormatError
from reverb_writer.files.saved_replay import SavedReplay, sequence_of
from reverb_writer.files.tfrecord import DONE, FILES, read_file
from reverb_writer.protocol import messages, signatures
from reverb_writer.tables import SAVES, Prioritized, Selector, TableConfig
from reverb_writer.tables.table_messages import read_balance, read_selector, write_table
from reverb_writer_server.checkpoints.refused import refused_items

MANIFEST = "MANIFEST.json"  # size and checksum of each file; the size shows a short file without reading it


class Checkpoint(SavedReplay):
    """A checkpoint of a server, with a manifest of the sizes and checksums of its files."""

    @property
    def name(self) -> str:
        """The name in lists and for `restore`."""
        return self.path.name

    @property
    def sequence(self) -> int:
        """Its number in its folder; 0 for a name without a number, which is older than all numbered checkpoints."""
        return sequence_of(self.name)

    @property
    def written_at(self) -> datetime:
        """The time at which it was finished, UTC; if it is incomplete, of its last change; if it is gone, long ago."""
        done = self.path / DONE
        for path in (done, self.path):
            with contextlib.suppress(OSError):
                return datetime.fromtimestamp(path.stat().st_mtime, timezone.utc)
        return datetime.fromtimestamp(0, timezone.utc)

    @property
    def size_bytes(self) -> int:
        """Its size on disk; 0 if it is gone."""
        total = 0
        with contextlib.suppress(OSError):
            for file in self.path.iterdir():
                total += file.stat().st_size
        return total

    def fault(self) -> str | None:
        """Return the missing files or a wrong size; None if the checkpoint is complete. Files are not read."""
        missing = [name for name in FILES if not (self.path / name).is_file()]
        if missing:
            return f"{', '.join(missing)} missing"
        try:
            expected = self._manifest()
            for name, (size, _) in expected.items():
                found = (self.path / name).stat().st_size if (self.path / name).is_file() else 0
                if found != size:
                    return f"{name} has {found} bytes, expected {size}"
        except FormatError as error:
            return str(error)
        except OSError as error:
            return f"cannot be read ({error})"
        return None

    def check(self) -> None:
        """Read the files, and compare them with the manifest; raise FormatError if they differ."""
        fault = self.fault()
        if fault:
            raise FormatError(fault)
        expected = self._manifest()
        if not expected:
            inspect(self)  # without a manifest, because another program wrote it or the disk was full
            return
        try:
            for name in FILES:
                if read_file(self.path / name) != expected.get(name):
                    raise FormatError(f"{name} is damaged: its checksum differs from the one that was stored with it")
        except OSError as error:
            raise FormatError(f"cannot be read ({error})") from error

    def _manifest(self) -> dict[str, tuple[int, int]]:
        """Return size and checksum of each file; {} without the manifest."""
        try:
            found = json.loads((self.path / MANIFEST).read_bytes())
            return {name: (int(one["bytes"]), int(one["crc32"])) for name, one in found.items()}
        except FileNotFoundError:
            return {}
        except (ValueError, AttributeError, TypeError, KeyError, RecursionError) as error:
            raise FormatError(f"{MANIFEST} is damaged ({error!r})") from error


@dataclass(frozen=True)
class Contents:
    """The contents of a checkpoint."""

    tables: tuple[Any, ...]  # one PriorityTableCheckpoint per table
    items: dict[str, int]  # number of items of each table
    chunks: int  # number of chunks
    steps: int  # number of steps in the chunks
    refused: dict[str, int]  # number of items of each table that Reverb refuses to restore; {} without such items


def checked(checkpoint: Checkpoint) -> dict[str, dict[str, int]]:
    """Read a finished checkpoint to its end, and return its manifest: size and checksum of each file."""
    found = {name: read_file(checkpoint.path / name, inflate=name != DONE) for name in FILES}
    return {name: {"bytes": size, "crc32": crc} for name, (size, crc) in found.items()}


def rules_of(table: Any) -> dict[str, Any]:
    """Return the rules of a PriorityTableCheckpoint as text, by name."""
    signature = signatures.decode(table.signature)
    leaves = () if signature is None else tree.flatten_with_path(signature)
    return {
        "max_size": table.max_size,
        "sampler": _selector_name(read_selector(table.sampler)),
        "remover": _selector_name(read_selector(table.remover)),
        "max_times_sampled": max(0, table.max_times_sampled),
        **read_balance(table.rate_limiter)._asdict(),
        "signature": [f"{'/'.join(map(str, path))}: {leaf.dtype}{list(leaf.shape or ())}" for path, leaf in leaves],
    }


def inspect(checkpoint: Checkpoint) -> Contents:
    """Read all of a checkpoint and return its contents.

    Raises:
        FormatError: this is no checkpoint, it is damaged or incomplete, or an item refers to a missing table or chunk.
    """
    if not any((checkpoint.path / name).is_file() for name in FILES):
        raise FormatError(f"{checkpoint.path}: {_why_not_a_checkpoint(checkpoint.path)}")
    fault = checkpoint.fault()
    if fault:
        raise FormatError(f"{checkpoint.path}: {fault}. It is incomplete; use another one.")
    tables = tuple(checkpoint.tables())
    names = {table.table_name for table in checkpoint.all_tables()}
    items: Counter[str] = Counter()
    needed: set[int] = set()
    reserved: set[int] = set()  # chunks of the reserved table, which no one else has
    for item in checkpoint.parsed_items(messages.PrioritizedItem):
        if item.table not in names:
            raise FormatError(f"{checkpoint.path}: item {item.key} belongs to table `{item.table}`, which is missing.")
        items[item.table] += 1
        chunk_keys = {part.chunk_key for column in item.flat_trajectory.columns for part in column.chunk_slices}
        needed |= chunk_keys
        if item.table == SAVES:
            reserved |= chunk_keys
    chunks = steps = 0
    for chunk, _ in checkpoint.chunks():
        needed.discard(chunk.chunk_key)
        if chunk.chunk_key in reserved:
            continue
        chunks += 1
        steps += chunk.sequence_range.end - chunk.sequence_range.start + 1
    if needed:
        raise FormatError(
            f"{checkpoint.path}: {len(needed)} chunks that items refer to are missing; the checkpoint has {chunks}."
        )
    of_tables = {name: items[name] for name in sorted(names - {SAVES})}
    return Contents(tables, of_tables, chunks, steps, refused_items(checkpoint))


def differences(tables: Sequence[TableConfig], saved: Iterable[Any]) -> list[str]:
    """Return the differences between configured tables and the tables of a checkpoint, one per line."""
    configured = {table.name: table for table in tables}
    theirs = {table.table_name: rules_of(table) for table in saved}
    lines = [f"table `{name}`: in the checkpoint, not configured" for name in theirs if name not in configured]
    for name, table in configured.items():
        if name not in theirs:
            lines.append(f"table `{name}`: configured, not in the checkpoint")
            continue
        message = messages.PriorityTableCheckpoint()
        write_table(table, message)
        for rule, ours in rules_of(message).items():
            if theirs[name][rule] != ours and (rule != "signature" or table.signature is not None):
                lines.append(
                    f"table `{name}`: {rule} is {theirs[name][rule]} in the checkpoint, {ours} in the configuration"
                )
    return lines


def _why_not_a_checkpoint(path: Path) -> str:
    """Explain why a folder is not a checkpoint, and name a checkpoint inside it if one exists."""
    if not path.is_dir():
        return "the folder does not exist. Check the path."
    inside = sorted({done.parent for pattern in ("*", "kept/*") for done in path.glob(f"{pattern}/{DONE}")})
    if not inside:
        return f"is not a checkpoint: it has none of {', '.join(FILES)}. Check the path."
    return f"is not a checkpoint, but a folder with {len(inside)} in it. Name one, such as {inside[-1]}."


def _selector_name(chosen: Selector) -> str:
    return f"prioritized ({chosen.exponent:g})" if isinstance(chosen, Prioritized) else chosen
