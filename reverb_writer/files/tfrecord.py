"""The files of a Reverb checkpoint, read and written without Reverb and without TensorFlow.

    tables.tfrecord   PriorityTableCheckpoint, one per table
    items.tfrecord    PrioritizedItem, one per item, table by table, oldest first
    chunks.tfrecord   ChunkData
    DONE              empty; written last

A file is one zlib stream of records: length (8 bytes), its checksum (4), the bytes, their checksum (4). The reader here
checks only zlib's checksum, which covers the whole file. Reverb's reader also checks the records' checksums.

Source: Reverb 0.14 (`tfrecord_checkpointer.cc`), TensorFlow 2.15 (`record_writer.cc`).
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import google_crc32c
from google.protobuf.message import DecodeError

from reverb_writer.errors import FormatError

TABLES, ITEMS, CHUNKS, DONE = "tables.tfrecord", "items.tfrecord", "chunks.tfrecord", "DONE"
FILES = (TABLES, ITEMS, CHUNKS, DONE)

_LENGTH_BYTES, _CHECKSUM_BYTES = 8, 4
_HEADER_BYTES = _LENGTH_BYTES + _CHECKSUM_BYTES
_MASK_DELTA = 0xA282EAD8
_READ_BYTES = 1 << 20
_MAX_RECORD_BYTES = 2**31  # limit of protobuf messages


def read_records(path: Path) -> Iterator[bytes]:
    """Yield the records of a file; raises FormatError at a truncated or damaged record."""
    buffer = bytearray()
    number = 0
    for block in _inflate(path):
        buffer += block
        start = 0
        while len(buffer) - start >= _HEADER_BYTES:
            size = int.from_bytes(buffer[start : start + _LENGTH_BYTES], "little")
            if size > _MAX_RECORD_BYTES:
                raise FormatError(f"{path}: record {number}: {size} bytes, expected < 2 GiB. The file is damaged.")
            end = start + _HEADER_BYTES + size + _CHECKSUM_BYTES
            if end > len(buffer):
                break
            yield bytes(buffer[start + _HEADER_BYTES : end - _CHECKSUM_BYTES])
            number += 1
            start = end
        del buffer[:start]
    if buffer:
        raise FormatError(f"{path}: record {number} is truncated. The checkpoint was not written completely.")


def read_messages(path: Path, kind: Any) -> Iterator[tuple[Any, bytes]]:
    """Yield the records of a file as messages of class `kind`, each with its bytes; raises as `read_records`."""
    for number, record in enumerate(read_records(path)):
        try:
            yield kind.FromString(record), record
        except DecodeError as error:
            raise FormatError(
                f"{path}: record {number} is not a {kind.DESCRIPTOR.name}. The file is damaged."
            ) from error


class RecordWriter:
    """Writes a file of records; the end of the `with` block syncs it. Not thread-safe."""

    def __init__(self, path: Path) -> None:
        """Make an empty file. All methods raise OSError if the disk fails."""
        self._file = path.open("wb")
        self._stream = zlib.compressobj(0)  # chunks are already compressed, and zlib writes 20 MB per second

    def write(self, record: bytes) -> None:
        """Add a record."""
        length = len(record).to_bytes(_LENGTH_BYTES, "little")
        for part in (length, _checksum(length), record, _checksum(record)):
            self._file.write(self._stream.compress(part))

    def __enter__(self) -> RecordWriter:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Sync the file, unless an error ended the block, and close it."""
        with self._file:
            if kind is None:
                self._file.write(self._stream.flush())
                self._file.flush()
                os.fsync(self._file.fileno())


def write_records(path: Path, records: Iterable[bytes]) -> None:
    """Write a file of records, and sync it."""
    with RecordWriter(path) as file:
        for record in records:
            file.write(record)


def _checksum(data: bytes) -> bytes:
    """Return the CRC-32C with TensorFlow's mask: rotated, plus a constant."""
    crc: int = google_crc32c.value(data)
    return (((crc >> 15 | crc << 17) + _MASK_DELTA) & 0xFFFFFFFF).to_bytes(_CHECKSUM_BYTES, "little")


def read_file(path: Path, *, inflate: bool = False) -> tuple[int, int]:
    """Return the size of a file, in bytes, and its CRC-32.

    With `inflate`, raise FormatError unless the file is one complete zlib stream.
    """
    size = crc = 0
    stream = zlib.decompressobj()
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            size += len(block)
            crc = zlib.crc32(block, crc)
            if inflate:
                for _ in _inflated(stream, block, path):
                    pass
    if inflate and not stream.eof:
        raise FormatError(f"{path}: is truncated. The checkpoint was not written completely.")
    return size, crc


def _inflate(path: Path) -> Iterator[bytes]:
    stream = zlib.decompressobj()
    try:
        with path.open("rb") as file:
            while block := file.read(_READ_BYTES):
                yield from _inflated(stream, block, path)
    except OSError as error:
        raise FormatError(f"{path}: cannot be read ({error.strerror}).") from error
    if not stream.eof:
        raise FormatError(f"{path}: is truncated. The checkpoint was not written completely.")


def _inflated(stream: zlib._Decompress, block: bytes, path: Path) -> Iterator[bytes]:
    """Yield the inflated block in parts of at most `_READ_BYTES`."""
    try:
        while not stream.eof:
            part = stream.decompress(block, _READ_BYTES)
            yield part
            block = stream.unconsumed_tail
            if not block and len(part) < _READ_BYTES:
                return
    except zlib.error as error:
        raise FormatError(f"{path}: is damaged ({error}).") from error
