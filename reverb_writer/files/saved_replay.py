"""The items of one server on disk, as bytes of Reverb's messages: a checkpoint of Reverb, or a save of `LocalServer`.

A checkpoint of Reverb is a folder, or the newest one of a folder of checkpoints. `tfrecord` and `local/saved_tables`
describe the files.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError

from reverb_writer.errors import FormatError
from reverb_writer.files.tfrecord import CHUNKS, DONE, FILES, ITEMS, TABLES, read_records
from reverb_writer.protocol import messages, signatures

LOCAL_FORMAT, LOCAL_MANIFEST = "reverb-writer local server", "manifest.json"

_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True)
class SavedReplay:
    """What a server has saved."""

    path: Path  # its folder
    items: Callable[[], Iterable[bytes]]  # returns PrioritizedItem messages, table by table, oldest first
    chunks: Callable[[], Iterable[bytes]]  # returns ChunkData messages
    signatures: Callable[[], dict[str, Any]]  # returns the nest of each table's items; None where it is not known

    def parsed_items(self, message: Any) -> Iterator[Any]:
        """Yield the items as messages of a class that can read PrioritizedItem.

        Raises:
            FormatError: one is damaged.
        """
        for number, record in enumerate(self.items()):
            try:
                yield message.FromString(record)
            except DecodeError as error:
                raise FormatError(f"{self.path}: item {number} is damaged.") from error

    def keyed_chunks(self) -> Iterator[tuple[int, bytes]]:
        """Yield the chunks with their keys.

        Raises:
            FormatError: one is damaged.
        """
        for number, record in enumerate(self.chunks()):
            try:
                yield messages.ChunkData.FromString(record).chunk_key, record
            except DecodeError as error:
                raise FormatError(f"{self.path}: chunk {number} is damaged.") from error


def open_saved(path: Path) -> SavedReplay:
    """Find out what a folder holds; of several checkpoints take the newest complete one.

    Raises:
        FormatError: nothing that a server has saved.
    """
    manifest = path / LOCAL_MANIFEST
    try:
        if manifest.is_file():
            saved = _local_manifest(manifest)
            return SavedReplay(
                path,
                functools.partial(read_local_records, path, saved["files"]["items"]),
                functools.partial(read_local_records, path, saved["files"]["chunks"]),
                functools.partial(_local_signatures, saved["tables"]),
            )
        found = [path] if (path / DONE).is_file() else _complete_in(path)
    except OSError as error:
        raise FormatError(f"{path}: cannot be read ({error.strerror}).") from error
    if not found:
        raise FormatError(f"{path}: is no checkpoint, and has none in it. Name the folder of a server's checkpoints.")
    if missing := [name for name in FILES if not (found[-1] / name).is_file()]:
        raise FormatError(f"{found[-1]}: {', '.join(missing)} missing. It is incomplete; use another one.")
    return SavedReplay(
        found[-1],
        functools.partial(read_records, found[-1] / ITEMS),
        functools.partial(read_records, found[-1] / CHUNKS),
        functools.partial(_signatures, found[-1] / TABLES),
    )


def read_local_records(folder: Path, entry: dict[str, Any]) -> list[bytes]:
    """Return the records of a file that is as its entry in the manifest says.

    Raises:
        FormatError: it is not.
    """
    path = folder / Path(entry["name"]).name
    data = path.read_bytes()
    if len(data) != entry["bytes"] or hashlib.sha256(data).hexdigest() != entry["sha256"]:
        raise FormatError(f"{path}: damaged: its bytes are not those that were saved.")
    records, at = [], 0
    while at < len(data):
        (length,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size
        records.append(data[at : at + length])
        at += length
    return records


def _signatures(path: Path) -> dict[str, Any]:
    try:
        tables = [messages.PriorityTableCheckpoint.FromString(record) for record in read_records(path)]
    except DecodeError as error:
        raise FormatError(f"{path}: is damaged ({error}).") from error
    return {table.table_name: signatures.decode(table.signature) for table in tables}


def _local_signatures(tables: list[dict[str, Any]]) -> dict[str, Any]:
    encoded = {table["name"]: base64.b64decode(table["signature"] or "") for table in tables}
    return {name: signatures.decode(messages.StructuredValue.FromString(data)) for name, data in encoded.items()}


def _local_manifest(manifest: Path) -> Any:
    try:
        read = json.loads(manifest.read_bytes())
        if read["format"] == LOCAL_FORMAT:
            return read
    except (ValueError, KeyError, TypeError) as error:
        raise FormatError(f"{manifest}: is damaged ({error!r}).") from error
    raise FormatError(f"{manifest}: is not of a `LocalServer`, but `{read['format']}`.")


def _complete_in(folder: Path) -> list[Path]:
    """Return the complete checkpoints in a folder of Reverb's or of `reverb-writer-server`, the newest last.

    Both name them so that the newest comes last: by the time, or by a number and the time.
    """
    kept = folder / "kept"
    return sorted(path.parent for path in (kept if kept.is_dir() else folder).glob(f"*/{DONE}"))
