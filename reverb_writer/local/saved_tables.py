"""A server's tables in a folder, so that they are there again tomorrow.

    manifest.json       format, version, the tables with their counters, and size and SHA-256 of the two files
    chunks-ID.bin       Reverb's ChunkData messages
    items-ID.bin        Reverb's PrioritizedItem messages, table after table, in the order of their insertion

Both files are records: the length, eight bytes little-endian, then as many bytes. The manifest is renamed into place
when the files are complete, and only then are those of the last save deleted: a folder holds one whole save or another.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import secrets
import struct
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError

from reverb_writer.errors import FormatError, ReverbWriterError
from reverb_writer.files.saved_replay import LOCAL_FORMAT, LOCAL_MANIFEST, read_local_records
from reverb_writer.local.chunk_store import Chunk
from reverb_writer.local.incoming import chunks_named, read_chunk
from reverb_writer.local.refusals import Refusal
from reverb_writer.local.store import Store, encode_signature
from reverb_writer.local.stored_items import Item
from reverb_writer.local.table import Table
from reverb_writer.protocol import messages, signatures
from reverb_writer.protocol.trajectory_parsing import parse_trajectory
from reverb_writer.tables import (
    MinSize,
    Prioritized,
    Queue,
    RateLimiter,
    SampleToInsertRatio,
    Selector,
    Stack,
    TableConfig,
)

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_saving = threading.Lock()  # never taken by the main thread, which may be interrupted
_VERSION = 1
_COUNTERS = ("num_inserts", "num_samples", "num_unique_samples", "num_deleted_episodes")
_LENGTH = struct.Struct("<Q")
_LIMITERS = {kind.__name__: kind for kind in (MinSize, SampleToInsertRatio, Queue, Stack)}


def save(store: Store, folder: str | os.PathLike[str]) -> None:
    """Write all tables into a folder, in place of what was saved there before. Saves into one folder take turns.

    Raises:
        OSError: the folder cannot be written; what was saved before is still there.
    """
    with store.lock:  # copies what may change; the bytes of chunks and trajectories are shared
        chunks = {chunk.key: chunk for table in store.tables.values() for item in table for chunk in item.chunks}
        items = [item for table in store.tables.values() for item in table.encoded_items()]
        tables = [_table_to_json(table) for table in store.tables.values()]
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    with _turn(path):
        name = secrets.token_hex(8)
        files = {
            "chunks": _write(path / f"chunks-{name}.bin", (chunk.data for chunk in chunks.values())),
            "items": _write(path / f"items-{name}.bin", items),
        }
        manifest = {"format": LOCAL_FORMAT, "version": _VERSION, "tables": tables, "files": files}
        partial = path / f"{LOCAL_MANIFEST}.{name}"
        _write_synced(partial, [json.dumps(manifest, indent=1).encode()])
        partial.replace(path / LOCAL_MANIFEST)
        current = {file["name"] for file in files.values()}
        for old in (*path.glob("chunks-*.bin"), *path.glob("items-*.bin")):
            if old.name not in current:
                old.unlink(missing_ok=True)


@contextlib.contextmanager
def _turn(path: Path) -> Iterator[None]:
    """Wait until no other save into a folder is under way, of this process or, where files have locks, of another."""
    with _saving, contextlib.ExitStack() as stack:
        if fcntl is not None:
            folder = os.open(path, os.O_RDONLY)
            stack.callback(os.close, folder)  # which gives the lock back
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(folder, fcntl.LOCK_EX)
        yield


def load(folder: str | os.PathLike[str], max_bytes: int, max_item_bytes: int | None = None) -> Store:
    """Return a store with the tables of a folder.

    Raises:
        FormatError: there is nothing that was saved, it is damaged, or it takes more than `max_bytes`; names it.
    """
    path = Path(folder)
    try:
        manifest = json.loads((path / LOCAL_MANIFEST).read_bytes())
        if manifest["format"] != LOCAL_FORMAT or manifest["version"] != _VERSION:
            raise FormatError(
                f"{path / LOCAL_MANIFEST}: version {manifest['version']}, expected {_VERSION} of `{LOCAL_FORMAT}`."
            )
        store = Store([_config_from_json(table) for table in manifest["tables"]], max_bytes, max_item_bytes)
        chunks = [read_chunk(data) for data in read_local_records(path, manifest["files"]["chunks"])]
        _fill(store, {chunk.key: chunk for chunk in chunks}, read_local_records(path, manifest["files"]["items"]))
        for saved in manifest["tables"]:
            for counter in _COUNTERS:
                setattr(store.tables[saved["name"]], counter, int(saved["counters"][counter]))
    except Refusal as error:
        raise FormatError(f"{path}: cannot be restored: {error.text}") from None
    except (OSError, KeyError, TypeError, ValueError, DecodeError, struct.error) as error:
        if isinstance(error, ReverbWriterError):
            raise
        raise FormatError(
            f"{path}: no tables that a local server has saved ({type(error).__name__}: {error})."
        ) from error
    return store


def _fill(store: Store, chunks: dict[int, Chunk], items: Iterable[bytes]) -> None:
    for data in items:
        read = messages.StoredItem.FromString(data)
        parsed = parse_trajectory(read.flat_trajectory)
        its_chunks = [store.chunks.add(chunks[key]) for key in chunks_named(parsed)]
        item = Item(read.key, read.table, read.priority, its_chunks, read.flat_trajectory, parsed)
        item.inserted_at = read.inserted_at.seconds * 1_000_000_000 + read.inserted_at.nanos
        store.chunks.take(item.num_bytes)
        store.table(read.table).restore(item, read.times_sampled)


def _write(path: Path, records: Iterable[bytes]) -> dict[str, Any]:
    """Write records; return the file's entry in the manifest."""
    digest = hashlib.sha256()

    def parts() -> Iterator[bytes]:
        for record in records:
            for part in (_LENGTH.pack(len(record)), record):
                digest.update(part)
                yield part

    _write_synced(path, parts())
    return {"name": path.name, "bytes": path.stat().st_size, "sha256": digest.hexdigest()}


def _write_synced(path: Path, parts: Iterable[bytes]) -> None:
    with path.open("wb") as file:
        file.writelines(parts)
        file.flush()
        os.fsync(file.fileno())


def _table_to_json(table: Table) -> dict[str, Any]:
    config = table.config
    signature = encode_signature(config.signature)
    return {
        "name": config.name,
        "max_size": config.max_size,
        "sampler": _selector_to_json(config.sampler),
        "remover": _selector_to_json(config.remover),
        "rate_limiter": {"kind": type(config.rate_limiter).__name__, **vars(config.rate_limiter)},
        "max_times_sampled": config.max_times_sampled,
        "signature": None if signature is None else base64.b64encode(signature.SerializeToString()).decode(),
        "counters": {counter: getattr(table, counter) for counter in _COUNTERS},
    }


def _config_from_json(saved: dict[str, Any]) -> TableConfig:
    limiter = dict(saved["rate_limiter"])
    kind: Any = _LIMITERS[limiter.pop("kind")]
    rate_limiter: RateLimiter = kind(**limiter)
    signature = saved["signature"]
    return TableConfig(
        saved["name"],
        saved["max_size"],
        _selector_from_json(saved["sampler"]),
        _selector_from_json(saved["remover"]),
        rate_limiter,
        saved["max_times_sampled"],
        None
        if signature is None
        else signatures.decode(messages.StructuredValue.FromString(base64.b64decode(signature))),
    )


def _selector_to_json(selector: Selector) -> Any:
    return {"exponent": selector.exponent} if isinstance(selector, Prioritized) else selector


def _selector_from_json(saved: Any) -> Selector:
    selector: Selector = Prioritized(saved["exponent"]) if isinstance(saved, dict) else saved
    return selector
